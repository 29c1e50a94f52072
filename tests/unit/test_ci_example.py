"""The examples for CI of other repositories: they parse, and what they run exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hopsparse.cli import app
from hopsparse.cli.gate_cases import SUITES
from hopsparse.settings import CACHE_VARIABLE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "ci"
WORKFLOW, CONTAINER = FOLDER / "github-actions.yml", FOLDER / "Containerfile"
COMMANDS: Any = typer.main.get_command(app)


def parsed() -> dict[Any, Any]:
    yaml = pytest.importorskip("yaml")
    found: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return found


def scripts(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def commands_in(text: str) -> list[list[str]]:
    """Words of every call of hopsparse, without what it is redirected to."""
    lines = re.split(r"\n|&&", text.replace("\\\n", " "))
    calls = [re.sub(r"^\s*RUN\s+", "", line).strip() for line in lines]
    return [shlex.split(call.split(">")[0])[1:] for call in calls if call.startswith("hopsparse ")]


def test_the_cpu_tier_always_runs_and_the_gpu_tier_on_a_label() -> None:
    workflow = parsed()
    # YAML reads the word `on` as a truth value.
    events = workflow[True]
    assert {"push", "pull_request"} <= events.keys()
    assert "labeled" in events["pull_request"]["types"]
    cpu, gpu = workflow["jobs"]["cpu"], workflow["jobs"]["gpu"]
    assert "if" not in cpu
    assert "labels.*.name, 'gpu'" in gpu["if"]
    assert "self-hosted" in gpu["runs-on"]
    assert CACHE_VARIABLE in workflow["env"]
    assert any("pytest" in script for script in scripts(cpu))
    assert any("--gate" in script for script in scripts(gpu))


def test_every_command_and_option_exists() -> None:
    jobs = parsed()["jobs"].values()
    texts = [script for job in jobs for script in scripts(job)]
    texts.append(CONTAINER.read_text(encoding="utf-8"))
    calls = [words for text in texts for words in commands_in(text)]
    assert {words[0] for words in calls} >= {"doctor", "verify", "compile", "bench", "profile"}
    for words in calls:
        known = COMMANDS.commands[words[0]]
        options = {name for each in known.params for name in (*each.opts, *each.secondary_opts)}
        assert {word for word in words if word.startswith("-")} <= options, words
    suites = [words[words.index("--suite") + 1] for words in calls if "--suite" in words]
    assert set(suites) <= set(SUITES)


def test_the_extras_that_are_installed_exist() -> None:
    text = WORKFLOW.read_text(encoding="utf-8") + CONTAINER.read_text(encoding="utf-8")
    asked = {extra for found in re.findall(r"\[([a-z,]+)\]", text) for extra in found.split(",")}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = set(re.findall(r"^([a-z]+) = \[", project, re.MULTILINE))
    assert asked - {"main", "opened"} <= named
    assert {"models", "report", "profile"} <= asked


def test_the_container_is_made_of_instructions_that_exist() -> None:
    text = CONTAINER.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    words = [line.split()[0] for line in lines]
    assert set(words) <= {"FROM", "ARG", "ENV", "RUN", "USER", "WORKDIR", "CMD"}
    assert words[0] == "FROM"
    assert words.index("USER") < len(words) - 1 - words[::-1].index("RUN")
