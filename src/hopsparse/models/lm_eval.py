"""Tasks of lm-evaluation-harness on a model of ours, sparse or dense.

The harness wraps any transformers model (`lm_eval.models.huggingface.HFLM`), and a sparse
checkpoint loads as one. It is an optional extra: it brings data set libraries, and its tasks fetch
their data from the network. Task files of one's own (`task_path`) may name local data.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_tasks(
    tasks: Sequence[str], *, task_path: Path | None = None, limit: int | None = None
) -> None:
    """Look at what `run_tasks` will be given, without loading data.

    Args:
        tasks: Names of tasks or groups.
        task_path: Folder with task files of one's own, besides those of the harness.
        limit: Most examples of each task; all when None.

    Raises:
        UnsupportedError: lm-eval is not installed.
        ArgumentError: No such task or folder, or a limit below 1.
    """
    _checked(tasks, task_path, limit)


def run_tasks(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    task_path: Path | None = None,
    limit: int | None = None,
) -> dict[str, dict[str, float]]:
    """Run tasks with the settings that their files give.

    Args:
        model: A transformers language model on its device.
        tokenizer: That belongs to it.
        tasks: Names of tasks or groups.
        task_path: Folder with task files of one's own, besides those of the harness.
        limit: Most examples of each task; all when None.

    Returns:
        By task and group, the numbers as the harness calls them: `acc,none`, `acc_stderr,none`.

    Raises:
        UnsupportedError: lm-eval is not installed, or the data of a task cannot be had.
        ArgumentError: No such task or folder, or a limit below 1.
    """
    manager = _checked(tasks, task_path, limit)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    try:
        found = simple_evaluate(
            wrapped, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=1000
        )
    except (OSError, ConnectionError) as error:
        raise UnsupportedError(
            f"the data of {', '.join(tasks)} cannot be loaded ({' '.join(str(error).split())})",
            need="the data set of every task, from the network or its cache",
            hint="--task-path DIR with a task file that names local data",
        ) from error
    assert found is not None
    return {name: _numbers(metrics) for name, metrics in found["results"].items()}


def _checked(tasks: Sequence[str], task_path: Path | None, limit: int | None) -> Any:
    """The harness's index of tasks, in which all of `tasks` are."""
    if find_spec("lm_eval") is None:
        raise UnsupportedError(
            "tasks to run, and lm-eval not installed",
            need="lm-evaluation-harness",
            hint='pip install "hopsparse[eval]"',
        )
    if limit is not None and limit < 1:
        raise ArgumentError(f"limit = {limit}", need="at least 1", hint="leave it out for all")
    if task_path is not None and not task_path.is_dir():
        raise ArgumentError(
            f"{task_path} is no folder", need="a folder with task files", hint="check the path"
        )
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(task_path) if task_path else None)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown or not tasks:
        raise ArgumentError(
            f"task {unknown[0]!r}" if unknown else "no task",
            need="names of tasks or groups of lm-evaluation-harness",
            hint="hellaswag, or `lm-eval ls tasks` for all",
        )
    return manager


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The numbers among what the harness says of a task; words such as "N/A" are left out."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "," in name
    }
