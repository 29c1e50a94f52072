"""Device code of tests, compiled by NVRTC alone."""

from __future__ import annotations

from typing import Any, Literal


def compiled(source: str, form: Literal["CUBIN", "PTX"]) -> bytes:
    """What NVRTC makes of a text for sm_90a."""
    from cuda.bindings import nvrtc

    def done(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) > 1 else None

    program = done(nvrtc.nvrtcCreateProgram(source.encode(), b"test.cu", 0, [], []))
    done(nvrtc.nvrtcCompileProgram(program, 2, [b"--gpu-architecture=sm_90a", b"--std=c++17"]))
    image = bytes(done(getattr(nvrtc, f"nvrtcGet{form}Size")(program)))
    done(getattr(nvrtc, f"nvrtcGet{form}")(program, image))
    done(nvrtc.nvrtcDestroyProgram(program))
    return image
