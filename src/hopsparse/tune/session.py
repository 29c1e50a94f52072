"""A search whose result is kept, and is the same on every rank of a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import UnsupportedError
from .search import Ranking, Show, Steps, search
from .store import Entry, Key, Store, decode, encode

C = TypeVar("C")
R = TypeVar("R")


def tune(
    store: Store,
    key: Key,
    candidates: Mapping[str, C],
    steps: Steps[C, R],
    *,
    budget_s: float = 60.0,
    show: Show = lambda *step: None,
) -> Ranking:
    """Measure what the store does not know yet, and keep it.

    Where torch.distributed is initialised it is a collective: every rank calls it for the same key,
    rank 0 alone measures, and all get, remember and store what it found. Later look-ups of all
    ranks then name the same kernel, whether or not they share a folder. Their GPUs must be of one
    class. A look-up without a search before it reads the folder: ranks that share none must be
    given the same content.

    Args:
        store: Where results are kept.
        key: What is tuned.
        candidates: By name, the most promising first.
        steps: What is done with one.
        budget_s: Seconds for verifying and timing.
        show: Is told how far it is.

    Raises:
        UnsupportedError: Rank 0 failed; on rank 0 whatever it raised.
    """

    def measure() -> Ranking:
        return search(
            candidates,
            steps,
            known=store.get(key).measured,
            budget_s=budget_s,
            keep=lambda found: store.put(key, found),
            show=show,
        )

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return measure()
    return _of_rank_0(store, key, measure)


def _of_rank_0(store: Store, key: Key, measure: Callable[[], Ranking]) -> Ranking:
    told: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            ranking = measure()
        except BaseException as error:
            # The others wait for a word: they must not wait for ever.
            dist.broadcast_object_list([json.dumps({"error": type(error).__name__})], src=0)
            raise
        told = [json.dumps(_facts(key, ranking))]
    dist.broadcast_object_list(told, src=0)
    facts = json.loads(told[0] or "{}")
    if "error" in facts:
        raise UnsupportedError(
            f"a search that ended with {facts['error']} on rank 0",
            need="a search that ends well there",
            hint="look at what rank 0 says",
        )
    entry = decode(facts["entry"].encode(), key)
    if entry is None:
        raise UnsupportedError(
            f"{key.problem} on {key.machine.gpu}, which is not what rank 0 tuned",
            need="the same problem, kernel, driver and kind of GPU on every rank",
            hint="one call a layer, in the same order on every rank",
        )
    if dist.get_rank() != 0:
        store.replace(entry)
    return Ranking(
        entry.measured, tuple(facts["timed"]), facts["failed"], tuple(facts["unmeasured"])
    )


def _facts(key: Key, ranking: Ranking) -> dict[str, Any]:
    return {
        "entry": encode(Entry(key, ranking.measured)).decode(),
        "timed": ranking.timed,
        "failed": dict(ranking.failed),
        "unmeasured": ranking.unmeasured,
    }
