"""Tokens per second of whole models: prefill and decode, one way to run them after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, UnsupportedError
from ..graphs import capture
from ..measure.watch import Watch, emptied
from .contenders import ModelWay
from .generate import cache_argument, counts_on_device


@dataclass(frozen=True)
class Phase:
    """What is timed: a prefill, or one step of decoding behind a context.

    Attributes:
        kind: `prefill` or `decode`.
        batch: Texts side by side.
        tokens: Of each prompt; of decode, the context that is there already.

    Raises:
        ArgumentError: Another kind, or no texts or tokens.
    """

    kind: str
    batch: int
    tokens: int

    def __post_init__(self) -> None:
        if self.kind not in ("prefill", "decode") or self.batch < 1 or self.tokens < 1:
            raise ArgumentError(
                f"{self}", need="prefill or decode, of 1 and more", hint="Phase('decode', 8, 512)"
            )

    @property
    def name(self) -> str:
        """As rows have it.

        Example:
            >>> Phase("prefill", 8, 2048).name
            'prefill 8 x 2048'
        """
        return f"{self.kind} {self.batch} x {self.tokens}"

    @property
    def made(self) -> int:
        """Tokens that one run handles."""
        return self.batch * (self.tokens if self.kind == "prefill" else 1)


_LEAST_S = 1.1
_LATE = "left out: no time"

PHASES = (
    Phase("prefill", 1, 2048),
    Phase("prefill", 8, 2048),
    Phase("decode", 1, 512),
    Phase("decode", 8, 512),
    Phase("decode", 64, 512),
)


@dataclass(frozen=True)
class Found:
    """One way in one phase.

    Attributes:
        way: Its name.
        phase: Its name.
        ms: Median of a run.
        tokens_per_s: Handled.
        memory_bytes: Most that was allocated; of a CPU 0.
        watts: Mean over the timed runs, or None.
        early: Launches of the graph that start before the one ahead has ended.
        error: Why it could not run, or "".
    """

    way: str
    phase: str
    ms: float = 0.0
    tokens_per_s: float = 0.0
    memory_bytes: int = 0
    watts: float | None = None
    early: int = 0
    error: str = ""


def race(
    make: Callable[[], nn.Module],
    ways: Iterable[ModelWay],
    phases: Iterable[Phase] = PHASES,
    *,
    rounds: int = 10,
    seconds: float | None = None,
) -> Iterator[Found]:
    """Time every way in every phase; each has the GPU for itself, and a model of its own.

    A way that fails in a phase says why, and the race goes on.

    Args:
        make: Makes the dense model, the same at every call.
        ways: Ways to run it.
        phases: What is timed.
        rounds: Timed runs of each; the median counts.
        seconds: What begins later than that is left out, and says so; None: nothing is.
    """
    timed = list(phases)
    until = float("inf") if seconds is None else time.monotonic() + seconds
    for way in ways:
        if time.monotonic() > until:
            yield from (Found(way.name, each.name, error=_LATE) for each in timed)
            continue
        model = make()
        try:
            way.prepare(model)
        except Exception as error:  # A rival may lack anything; the others are still of interest.
            yield from (Found(way.name, each.name, error=_told(error)) for each in timed)
            continue
        device = next(model.parameters()).device
        for phase in timed:
            emptied(device)
            if time.monotonic() > until:
                yield Found(way.name, phase.name, error=_LATE)
                continue
            try:
                yield _timed(way, phase, model, device, rounds)
            except Exception as error:
                yield Found(way.name, phase.name, error=_told(error))
        del model
        torch._dynamo.reset()
        emptied(device)


def _timed(
    way: ModelWay, phase: Phase, model: nn.Module, device: torch.device, rounds: int
) -> Found:
    run, early = prepared(way, phase, model, device)
    for _ in range(3):
        run()
    watch = Watch(device)
    for _ in range(rounds):
        watch.time(run)
    while device.type == "cuda" and watch.seconds() < _LEAST_S:
        watch.time(run)  # Power is counted in steps.
    ms = statistics.median(watch.ms)
    return Found(
        way.name,
        phase.name,
        ms=round(ms, 4),
        tokens_per_s=round(phase.made / ms * 1e3, 1),
        memory_bytes=watch.memory_bytes(),
        watts=watch.watts(),
        early=early,
    )


# Compiled code cannot ask whether a cache is empty, and would attend through a mask over all of it:
# in prefills of dense models torch's kernel for causal attention runs, as the race knows it may.
_CAUSAL = "hopsparse_race_causal"


def _causal(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention to the tokens of this prefill alone: [batch, tokens, heads, dim] and None."""
    keys, values = (each[:, :, : query.shape[2]] for each in (key, value))
    grouped, scale = query.shape[1] != key.shape[1], options.get("scaling")
    out = nn.functional.scaled_dot_product_attention(
        query, keys, values, is_causal=True, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2), None


def _enter_causal() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_CAUSAL, _causal)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_CAUSAL, lambda *_, **__: None)


def prepared(
    way: ModelWay, phase: Phase, model: nn.Module, device: torch.device
) -> tuple[Callable[[], object], int]:
    """What is timed, and how many of its launches start early.

    Args:
        way: How the model runs.
        phase: What it does.
        model: As `way.prepare` left it.
        device: Where it is.
    """
    from transformers import StaticCache

    from .attention_config import set_attention
    from .cached_attention import IMPLEMENTATION, room_for

    network: Any = model
    texts = torch.randint(network.config.vocab_size, (phase.batch, phase.tokens), device=device)
    cache = StaticCache(config=network.config, max_cache_len=room_for(phase.tokens + 1))
    name = cache_argument(network)
    forward = torch.compile(network, dynamic=False) if way.compiled else network
    _enter_causal()
    captured_prefill = way.captured and phase.kind == "prefill"
    attention = IMPLEMENTATION if way.attention else _CAUSAL if captured_prefill else "sdpa"
    set_attention(network, attention)

    def call(ids: Tensor, through: Any = forward) -> Tensor:
        given = {name: cache, "use_cache": True, "logits_to_keep": 1}
        logits: Tensor = through(ids, **given).logits
        return logits

    with torch.no_grad():
        call(texts, network)  # A cache takes its memory at the first call, which none may trace.
    if not counts_on_device(cache):
        raise UnsupportedError(
            "a cache that counts its tokens on the host, as with sliding windows",
            need="a model that attends to all that came before",
            hint="hopsparse bench model --config llama-3-8b",
        )
    lengths = [layer.cumulative_length for layer in cache.layers]
    last = texts[:, -1:].contiguous()

    @torch.no_grad()
    def prefill(ids: Tensor) -> Tensor:
        torch._foreach_zero_(lengths)
        return call(ids)

    @torch.no_grad()
    def step(ids: Tensor) -> Tensor:
        logits = call(ids)
        # It leaves the cache one longer: set back, every step has one context.
        torch._foreach_sub_(lengths, 1)
        return logits

    timed, ids = (prefill, texts) if phase.kind == "prefill" else (step, last)
    if not way.captured:
        return lambda: timed(ids), 0
    captured = capture(timed, ids, reuse_outputs=True)
    early = sum(each.early for each in captured.recordings.values())
    return lambda: captured(ids), early


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
