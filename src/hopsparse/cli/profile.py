"""`hopsparse profile`: what a GPU does while an operator or a model runs, and how far it is off."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ArgumentError, DriverError, UnsupportedError
from .console import print_json, stderr
from .options import Overwrite, command
from .problems import shape_of, tokens_of

if TYPE_CHECKING:
    from ..measure.profile.ncu import Profiled
    from ..measure.profile.subject import Subject
    from ..plan import Target
    from .profile_subjects import Setting

SCHEMA = 1
PROFILE_REPORT = "profile.ncu-rep"
_COUNTERS = ("auto", "on", "off")
# Of a GPU, and of a CPU, whose reference products are slow.
_LAYER = {"cuda": ("16384x4096", "2048"), "cpu": ("1024x1024", "64")}
_SCORES, _MODEL_TOKENS = ("64x131072", "2048"), "128"


@dataclass(frozen=True)
class Profile:
    """Options of `hopsparse profile`."""

    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[OP|MODEL]",
            help="formats, dense, spmm_nm, spmm_nm_scaled, spmm_bsr, spmm_csr, csr_matmul, select, "
            "or a model as evaluate takes it.",
        ),
    ] = None
    shape: Annotated[str | None, typer.Option(metavar="OUTxK", help="Of the weight.")] = None
    tokens: Annotated[int | None, typer.Option(help="Rows of x; what select chooses.")] = None
    dtype: Annotated[str | None, typer.Option(help="Of inputs and weight.")] = None
    density: Annotated[float | None, typer.Option(help="Part kept, of blocks and CSR.")] = None
    block: Annotated[int, typer.Option(help="Side of a block.")] = 64
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto.")] = "auto"
    counters: Annotated[str, typer.Option(help="Hardware counters by ncu: auto, on or off.")] = (
        "auto"
    )
    kernels: Annotated[int, typer.Option(help="Most kernels that ncu reads; 0: all.")] = 400
    rounds: Annotated[int, typer.Option(help="Samples of each time.")] = 15
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Read a profile of ncu instead.")
    ] = None
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="OUT", help="Folder for all results.")
    ] = None
    overwrite: Overwrite = False
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


def run(options: Profile) -> None:
    """Profile an operator or a model: times, counters by ncu, roofline, trace and report."""
    from .profile_output import show, write

    started = time.monotonic()
    check(options)
    document, subjects = _stored(options) if options.source is not None else _measured(options)
    if options.out is not None:
        write(options.out, document, subjects)
    spent = document["seconds"]
    spent["total"] = round(time.monotonic() - started, 2)
    spent["rest"] = round(spent["total"] - spent["timing"] - spent["ncu"], 2)
    if options.json:
        print_json(document)
    else:
        show(document, options.out)


def check(options: Profile) -> None:
    """Refuse options that do not go together, before anything is loaded.

    Raises:
        ArgumentError: It says which.
        UnsupportedError: The page cannot be made here.
    """
    if (options.subject is None) == (options.source is None):
        both = "both OP and --from" if options.subject else "neither OP, nor MODEL, nor --from"
        raise ArgumentError(both, need="one of them", hint="hopsparse profile formats")
    for name, value, known in (
        ("counters", options.counters, _COUNTERS),
        ("device", options.device, ("auto", "cuda", "cpu")),
    ):
        if value not in known:
            need = "one of " + ", ".join(known)
            raise ArgumentError(f"--{name} {value}", need=need, hint=f"--{name} auto")
    if options.rounds < 1 or options.kernels < 0:
        raise ArgumentError(
            f"--rounds {options.rounds} --kernels {options.kernels}",
            need="a round at least, and no negative number",
            hint="the defaults",
        )
    if options.out is not None:
        from ..report import check_extras

        check_extras()
        if (options.out / "profile.json").exists() and not options.overwrite:
            raise ArgumentError(
                f"{options.out} has a profile", need="another folder", hint="--overwrite"
            )


def settings_of(options: Profile, device: str) -> list[Setting]:
    """What is to be run, one setting for each row of the table.

    Args:
        options: Those of the command.
        device: `cuda` or `cpu`.

    Raises:
        ArgumentError: They make no sense.
    """
    from .profile_subjects import FORMATS, OPS, Setting

    subject = options.subject or ""
    if subject not in OPS:
        tokens = tokens_of(str(options.tokens or _MODEL_TOKENS))[0]
        dtype = options.dtype or ("bfloat16" if device == "cuda" else "float32")
        return [Setting("", subject, tokens=tokens, dtype=dtype)]
    shape, tokens_text = _SCORES if subject == "select" else _LAYER[device]
    out, k = shape_of(options.shape or shape)
    default = "float8_e4m3fn" if subject == "spmm_nm_scaled" else "bfloat16"
    setting = Setting(
        subject,
        out=out,
        k=k,
        tokens=int(tokens_text) if options.tokens is None else options.tokens,
        dtype=options.dtype or default,
        density=options.density,
        block=options.block,
    )
    names = FORMATS if subject == "formats" else (subject,)
    settings = [replace(setting, op=name) for name in names]
    for each in settings:
        each.check()
    return settings


def _measured(options: Profile) -> tuple[dict[str, Any], list[Subject]]:
    import torch

    from ..measure.record import environment
    from .profile_timing import timed

    has_gpu = torch.cuda.is_available()
    kind = ("cuda" if has_gpu else "cpu") if options.device == "auto" else options.device
    if kind == "cuda" and not has_gpu:
        raise UnsupportedError(
            "--device cuda without a GPU that torch sees", need="a GPU", hint="hopsparse doctor"
        )
    settings = settings_of(options, kind)
    started = time.monotonic()
    subjects = timed(settings, torch.device(kind), options.rounds)
    timing_s = time.monotonic() - started
    with ExitStack() as stack:
        folder = options.out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        profiled, why = _counted(options, settings, folder / PROFILE_REPORT, kind)
    if profiled is not None:
        subjects = with_kernels(subjects, profiled)
    target = target_here() if kind == "cuda" else None
    source = f"ncu {profiled.release}, read by {profiled.reader}" if profiled else "none"
    document = _document(subjects, target) | {
        "counters": {"source": source, "why": why},
        "environment": environment(),
        "settings": [asdict(each) for each in settings],
        "seconds": {
            "timing": round(timing_s, 2),
            "ncu": round(profiled.seconds, 2) if profiled else 0.0,
        },
    }
    return document, subjects


def _counted(
    options: Profile, settings: Sequence[Setting], report: Path, kind: str
) -> tuple[Profiled | None, str]:
    """What ncu saw; or None, and why."""
    from ..measure.profile.install import find_ncu
    from ..measure.profile.ncu import profile

    if options.counters == "off":
        return None, "--counters off"
    ncu = find_ncu()
    missing = "no GPU" if kind == "cpu" else "ncu is not installed" if ncu is None else ""
    if missing or ncu is None:
        if options.counters == "on":
            raise UnsupportedError(
                f"--counters on: {missing}",
                need="a Hopper GPU, and Nsight Compute on PATH",
                hint="--counters auto, for times alone without it",
            )
        return None, missing
    told = json.dumps([asdict(each) for each in settings])
    program = [sys.executable, "-m", "hopsparse.cli.profile_worker", told]
    try:
        return profile(ncu, program, report, most=options.kernels), ""
    except UnsupportedError as error:
        if options.counters == "on":
            raise
        stderr().print(f"Times alone: {error.got}. {error.hint}", markup=False, soft_wrap=True)
        return None, error.got


def with_kernels(subjects: Sequence[Subject], profiled: Profiled) -> list[Subject]:
    """The subjects with what ncu saw of each.

    Raises:
        DriverError: It saw nothing of one of them.
    """
    from ..measure.profile.files import subjects_of
    from ..measure.profile.phases import range_name

    by_subject = {
        range_name("subject", name).rpartition("subject.")[2]: kernels
        for name, kernels in subjects_of(profiled.kernels).items()
    }
    found = []
    for subject in subjects:
        kernels = by_subject.get(subject.name.replace(" ", "_"))
        if kernels is None:
            raise DriverError(
                f"ncu saw no kernel of {subject.name}, and {len(profiled.kernels)} others",
                need="kernels inside the range of each subject",
                hint="--kernels 0, which reads all",
            )
        found.append(replace(subject, kernels=tuple(kernels)))
    return found


def _stored(options: Profile) -> tuple[dict[str, Any], list[Subject]]:
    from ..measure.profile.files import read_profile, subjects_of
    from ..measure.profile.subject import Subject, Work
    from ..measure.timing import Timing

    assert options.source is not None
    kernels = read_profile(options.source)
    subjects = [
        Subject(name, "", Work(0, 0, 0, ""), Timing(name), "ncu", kernels=tuple(own))
        for name, own in subjects_of(kernels).items()
    ]
    document = _document(subjects, None) | {
        "counters": {"source": str(options.source), "why": ""},
        "environment": {"gpu": None, "driver": None, "torch": None},
        "settings": [],
        "seconds": {"timing": 0.0, "ncu": 0.0},
    }
    return document, subjects


def _document(subjects: Sequence[Subject], target: Target | None) -> dict[str, Any]:
    ceilings = None
    if target is not None:
        ceilings = {
            "target": target.name,
            "source": target.source,
            "read_tbps": target.read_bandwidth / 1e12,
            "dense_tflops": {key: each.sustained / 1e12 for key, each in target.dense_peak.items()},
            "sparse_tflops": {
                key: each.sustained / 1e12 for key, each in target.sparse_peak.items()
            },
        }
    return {
        "schema": SCHEMA,
        "rows": [subject.row(target) for subject in subjects],
        "phases": [row for subject in subjects for row in subject.phases()],
        "ceilings": ceilings,
    }


def target_here() -> Target | None:
    """The GPU that torch runs on, with its ceilings; None where it is no Hopper."""
    from .probe import planned_for, probe_gpus

    gpus = probe_gpus()
    return planned_for(gpus[0]) if gpus else None


PROFILE = command(Profile, run, name="profile")
