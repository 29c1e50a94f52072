"""`hopsparse doctor`: what this machine has, what works here, what to install for the rest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from ..settings import CACHE_VARIABLE
from ..version import __version__
from .console import bytes_text, print_json, stdout
from .options import command


@dataclass(frozen=True)
class Doctor:
    """Options of `hopsparse doctor`."""

    smoke: Annotated[
        bool, typer.Option("--smoke/--no-smoke", help="Run one small kernel on each Hopper GPU.")
    ] = True
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False


@dataclass(frozen=True)
class Ability:
    """One thing hopsparse can do, and whether it works here.

    Attributes:
        name: What it is.
        works: Whether it does.
        detail: By what it works, or what is missing.
        install: What to install or change, or "".
    """

    name: str
    works: bool
    detail: str
    install: str = ""


def run(options: Doctor) -> None:
    """Show GPU, driver, compiler, libraries, cache and memory, and what works with them."""
    from .health import smoke
    from .probe import gather

    facts = gather()
    sees_gpu = bool(facts["torch"]["sees_gpu"]) and facts["nvrtc"]["path"] is not None
    facts["smoke"] = smoke(facts["gpus"], sees_gpu=sees_gpu and options.smoke)
    able = abilities(facts)
    if options.json:
        document = {"hopsparse": __version__, **facts, "abilities": [asdict(each) for each in able]}
        print_json(document)
        return
    _print(facts, able)


def abilities(facts: dict[str, Any]) -> list[Ability]:
    """Judge the facts of `probe.gather`."""
    packages = facts["packages"]
    hopper = [gpu for gpu in facts["gpus"] if gpu["compute_capability"] == "9.0"]
    return [
        Ability(
            "formats, pruning, reference products", True, f"CPU, {facts['cpu']['cores']} cores"
        ),
        _needs(packages, "models: sparsify, load, evaluate", ("transformers",), "models"),
        _needs(packages, "GGUF files", ("transformers", "gguf", "accelerate"), "models"),
        _needs(packages, "HTML report", ("matplotlib", "jinja2"), "report"),
        _compiling(facts),
        _running(facts, hopper),
        _smoked(facts.get("smoke", {"ran": [], "failed": {}}), bool(hopper)),
        _cached(facts["cache"], facts["kernels"]),
        _versions(facts["faults"]),
        _profiling(facts["profiling"], bool(hopper)),
    ]


def _needs(packages: dict[str, Any], name: str, wanted: tuple[str, ...], extra: str) -> Ability:
    missing = [package for package in wanted if packages[package] is None]
    if missing:
        lacking = f"{', '.join(missing)} not installed"
        return Ability(name, False, lacking, f"pip install 'hopsparse[{extra}]'")
    return Ability(name, True, ", ".join(f"{each} {packages[each]}" for each in wanted))


def _compiling(facts: dict[str, Any]) -> Ability:
    name, nvrtc = "compile kernels for sm_90a (needs no GPU)", facts["nvrtc"]
    if nvrtc["path"] is None:
        return Ability(name, False, nvrtc["problem"], "pip install 'nvidia-cuda-nvrtc>=13.0,<14'")
    return Ability(name, True, f"NVRTC {nvrtc['version']}")


def _running(facts: dict[str, Any], hopper: list[dict[str, Any]]) -> Ability:
    name, torch = "run on a Hopper GPU", facts["torch"]
    if not facts["driver"]["libcuda"]:
        return Ability(
            name,
            False,
            "no NVIDIA driver (libcuda.so.1 does not load)",
            "a machine with an H100 or H200; the CPU path needs nothing",
        )
    if not facts["gpus"]:
        return Ability(
            name, False, "the driver shows no GPU", "check CUDA_VISIBLE_DEVICES and `nvidia-smi`"
        )
    if not hopper:
        names = ", ".join(gpu["name"] for gpu in facts["gpus"])
        return Ability(name, False, f"{names}: not compute capability 9.0", "an H100 or H200")
    if not torch["sees_gpu"]:
        return Ability(
            name,
            False,
            f"torch {torch['version']} sees no GPU",
            "pip install torch --index-url https://download.pytorch.org/whl/cu130",
        )
    return Ability(name, True, ", ".join(_gpu_text(gpu) for gpu in hopper))


def _smoked(smoke: dict[str, Any], has_gpu: bool) -> Ability:
    name = "clusters and TMA (smoke test)"
    if not has_gpu:
        return Ability(name, False, "no Hopper GPU", "a machine with an H100 or H200")
    if smoke["failed"]:
        told = "; ".join(f"GPU {index}: {why}" for index, why in smoke["failed"].items())
        return Ability(name, False, told, "another driver, or another GPU")
    if not smoke["ran"]:
        return Ability(
            name, False, "not run", "--smoke, where torch sees the GPU and NVRTC compiles"
        )
    return Ability(name, True, "GPU " + ", ".join(map(str, smoke["ran"])))


def _versions(faults: list[dict[str, str]]) -> Ability:
    name = "versions without known faults"
    if not faults:
        return Ability(name, True, "none is known to misbehave")
    told = "; ".join(f"{each['what']} {each['why']}" for each in faults)
    return Ability(name, False, told, "; ".join(each["install"] for each in faults))


def _cached(cache: dict[str, Any], kernels: dict[str, int]) -> Ability:
    if not cache["writable"]:
        return Ability(
            "kernel cache",
            False,
            f"{cache['path']} cannot be written",
            f"set {CACHE_VARIABLE} to a folder that can",
        )
    if kernels["damaged"]:
        bad = f"{kernels['damaged']} of {kernels['kernels']} kernels in {cache['path']} are damaged"
        return Ability("kernel cache", False, bad, "nothing: they are compiled again when needed")
    state = (
        f"{cache['entries']} files, {bytes_text(cache['bytes'])}" if cache["exists"] else "empty"
    )
    free = bytes_text(cache["disk_free_bytes"])
    return Ability("kernel cache", True, f"{cache['path']}: {state}, {free} free on that disk")


def _profiling(profiling: dict[str, Any], has_gpu: bool) -> Ability:
    name = "hardware counters (ncu)"
    if not has_gpu:
        return Ability(name, False, "no Hopper GPU", "a machine with an H100 or H200")
    if profiling["ncu"] is None:
        return Ability(name, False, "ncu not found", "install Nsight Compute and put it on PATH")
    if profiling["counters_allowed"] is False:
        return Ability(
            name,
            False,
            "counters are for administrators only",
            "load the driver with NVreg_RestrictProfilingToAdminUsers=0",
        )
    return Ability(name, True, profiling["ncu"])


def _gpu_text(gpu: dict[str, Any]) -> str:
    return f"{gpu['name']}, {gpu['sm_count']} SMs, {bytes_text(gpu['memory_bytes'])}"


def _print(facts: dict[str, Any], able: list[Ability]) -> None:
    from rich.markup import escape
    from rich.table import Table

    cpu, driver, torch = facts["cpu"], facts["driver"], facts["torch"]
    ram = bytes_text(cpu["ram_bytes"]) if cpu["ram_bytes"] else "unknown"
    free = f", {bytes_text(cpu['ram_free_bytes'])} free" if cpu["ram_free_bytes"] else ""
    build = f"CUDA {torch['cuda']}" if torch["cuda"] else "CPU build"
    rows = {
        "hopsparse": f"{__version__}, Python {facts['python']}",
        "CPU": f"{cpu['model']}, {cpu['cores']} cores{', AVX-512' if cpu['avx512'] else ''}",
        "memory": ram + free,
        "torch": f"{torch['version']} ({build})",
        "driver": f"{driver['version'] or 'unknown version'}, CUDA {driver['cuda']}"
        if driver["libcuda"]
        else "none",
        **{f"GPU {gpu['index']}": _gpu_row(gpu) for gpu in facts["gpus"]},
    }
    console = stdout()
    head = Table(box=None, show_header=False, pad_edge=False)
    for label, text in rows.items():
        head.add_row(f"[bold]{label}[/bold]", escape(text))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("", "what", "here", "to get it"):
        table.add_column(title, overflow="fold")
    for each in able:
        mark = "[green]yes[/green]" if each.works else "[yellow]no[/yellow]"
        table.add_row(mark, each.name, escape(each.detail), escape(each.install))
    console.print(head)
    console.print()
    console.print(table)


def _gpu_row(gpu: dict[str, Any]) -> str:
    parts = [
        _gpu_text(gpu),
        *(["a MIG slice"] if gpu["mig"] else []),
        f"compute capability {gpu['compute_capability']}",
        f"planned as {gpu['planned_as']}" if gpu["planned_as"] else "no kernels for it",
    ]
    for fact, label in (("cluster_launch", "clusters"), ("tensor_map", "TMA")):
        parts.append(label if gpu[fact] else f"no {label}")
    if gpu["peers"]:
        parts.append("reaches GPUs " + ", ".join(map(str, gpu["peers"])))
    return ", ".join(parts)


DOCTOR = command(Doctor, run, name="doctor")
