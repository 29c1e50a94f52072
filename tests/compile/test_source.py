from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hopsparse.compiler import translation_unit
from hopsparse.errors import CompileError
from tests.helpers.tiny_kernels import BESIDE, FILES, HEADER, tiny_spec


def unit(root: Path, text: str) -> str:
    (root / "ops/tiny/kernel.cuh").write_text(text)
    return translation_unit(replace(tiny_spec(), text="END"), root)


def test_every_header_stands_once_before_what_includes_it(root: Path) -> None:
    made = translation_unit(replace(tiny_spec(), text="END"), root)
    lanes, args = (FILES[name].splitlines()[1] for name in (HEADER, BESIDE))
    assert made == f"{lanes}\n{args}\nEND\n"


def test_cycles_end(root: Path) -> None:
    (root / "device/a.cuh").write_text('#include "b.cuh"\nint a;\n')
    (root / "device/b.cuh").write_text('#include "a.cuh"\nint b;\n')
    assert unit(root, '#include "a.cuh"\nint c;\n') == "int b;\nint a;\nint c;\nEND\n"


@pytest.mark.parametrize("line", ['#include "./step.cuh"', '  #  include  "./step.cuh" // as well'])
def test_spaces_and_comments_do_not_matter(root: Path, line: str) -> None:
    assert "struct Args" in unit(root, line + "\n")


def test_text_that_only_looks_like_a_directive_stays(root: Path) -> None:
    text = "// no #include here\n#define X 1\n#pragma unroll\n"
    assert unit(root, text) == text + "END\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('#include "ptx/none.cuh"', "device/ptx/none.cuh"),
        ('#include "./none.cuh"', "ops/tiny/none.cuh"),
        ("#include <cuda_fp16.h>", "<cuda_fp16.h>"),
        ('#include "../tiny/step.cuh"', "leaves its folder"),
        ('#include "/etc/passwd"', "leaves its folder"),
        ("#include NAME", "NAME"),
        ("#include", "#include"),
    ],
)
def test_a_wrong_include_is_named_with_file_and_line(root: Path, line: str, told: str) -> None:
    with pytest.raises(CompileError) as caught:
        unit(root, f"// a comment\n{line}\n")
    assert caught.value.got.startswith("ops/tiny/kernel.cuh, line 2: ")
    assert told in caught.value.got


def test_a_missing_kernel_is_named_with_its_spec(root: Path) -> None:
    with pytest.raises(CompileError, match="the spec tiny/none0: no file ops/tiny/none.cuh"):
        translation_unit(tiny_spec(kernel="none"), root)


def test_a_zip_holds_the_same_text(root: Path, tmp_path: Path) -> None:
    archive = tmp_path / "wheel.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in FILES:
            file.write(root / name, name)
    assert translation_unit(tiny_spec(), zipfile.Path(archive)) == translation_unit(
        tiny_spec(), root
    )
    with pytest.raises(CompileError, match="no file ops/tiny/none.cuh"):
        translation_unit(tiny_spec(kernel="none"), zipfile.Path(archive))
