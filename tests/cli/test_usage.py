"""Words that typer refuses: the exit code of every wrong input, and JSON where JSON is promised."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Run, start


@pytest.mark.parametrize(
    ("words", "told", "command"),
    [
        (("--nosuch",), "No such option: --nosuch", ""),
        (("nosuch",), "No such command 'nosuch'", ""),
        (("explain", "--tokens", "1"), "Missing option '--shape'", " explain"),
        (("explain", "--shape", "4x4", "--tokens", "1,,2"), "'--tokens'", " explain"),
        (("explain", "--shape", "4x4", "--tokens", "1", "more"), "more", " explain"),
        (("bench", "--rounds", "few"), "'--rounds'", " bench"),
        (("compile", "--all", "--workers", "-1"), "'--workers'", " compile"),
        (("tune", "--budget-s", "long"), "'--budget-s'", " tune"),
    ],
)
def test_a_wrong_option_is_told_as_text_and_as_json(
    run: Run, words: tuple[str, ...], told: str, command: str
) -> None:
    text = run(*words)
    assert (text.exit_code, text.stdout) == (2, "")
    assert told.split("'")[-1] in text.stderr
    result = run(*words, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == "ArgumentError"
    assert told in error["got"]
    assert error["try"].endswith(f"{command} --help")


def test_in_a_process_of_its_own() -> None:
    process = start("explain", "--json")
    told, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert json.loads(told)["error"]["try"] == "hopsparse explain --help"
    assert "Missing option" in errors


def test_help_is_no_error(run: Run) -> None:
    result = run("explain", "--help", "--json")
    assert result.exit_code == 0
    assert "--shape" in result.stdout
