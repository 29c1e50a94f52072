"""What a recovery run is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import ArgumentError

TRAIN = ("projections", "all")
MASKS = ("fixed", "sr-ste")
LEVELS = ("end-to-end", "layer-wise")
PRECISIONS = ("no", "bf16", "fp16")


@dataclass(frozen=True)
class RecoverOptions:
    """How to train a pruned student towards its dense teacher.

    Attributes:
        steps: Optimizer steps; with level `layer-wise`, steps for each block.
        lr: Largest learning rate.
        warmup: Part of the steps in which the rate rises from zero; then it falls to zero as a
            cosine.
        weight_decay: Decoupled weight decay of matrices; norms and biases never decay.
        betas: Of AdamW.
        clip: Largest norm of the gradient, without the pull of sr-ste; 0 does not clip.
        batch_windows: Windows of one step, over all processes together.
        window_tokens: Tokens of a window.
        accumulation: Parts in which each process runs its share of a step, to save memory.
        kl: Weight of KL(teacher || student) over the vocabulary, temperature 1.
        hidden: Weight of the squared distance between the residual streams behind blocks, in parts
            of the teacher's own, averaged over tokens.
        hidden_blocks: Which blocks; negative ones count from the end; empty: all.
        cross_entropy: Weight of the negative log-likelihood of the text itself.
        position_fraction: Part of the positions, drawn anew each step, at which `kl` and
            `cross_entropy` are computed.
        train: `projections`: weights of pruned layers; `all`: every weight but embeddings and head.
        masks: `fixed`, or `sr-ste` (arXiv:2102.04010): re-selected by magnitude while training.
        mask_every: sr-ste: steps between two selections.
        mask_decay: sr-ste: pull of pruned weights towards zero, as part of them in the gradient.
        mask_freeze: sr-ste: last part of the steps, in which masks stay as they are.
        level: `end-to-end`, or `layer-wise` (arXiv:2402.12419): each block by itself, on inputs
            made by the blocks recovered before it.
        evaluate_every: Steps between two looks at the held-out windows.
        patience: Looks without a better one before training stops; 0 never stops early. The best
            weights are kept in any case.
        ema: Decay of a running mean of the weights, which is then what is judged and kept; 0: none.
        cache_teacher: Run the teacher once on each window instead of at every step.
        cache_top: Logits kept a position by the cache, with the mass of the rest as one more event.
        cache_limit: Bytes that the cache may take.
        lora_rank: Above 0, pruned weights stay as they are and a product of this rank beside each
            is trained instead.
        precision: Of the forward and backward pass: `no` (float32), `bf16` or `fp16`.
        save_every: Steps between two saves of the state.
        seed: Of the order of the windows, and of everything that is drawn.

    Raises:
        ArgumentError: A value that cannot mean anything, or values that exclude each other.

    Example:
        >>> RecoverOptions(steps=100, lr=1e-4).masks
        'fixed'
    """

    steps: int = 200
    lr: float = 4e-4
    warmup: float = 0.05
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    batch_windows: int = 4
    window_tokens: int = 256
    accumulation: int = 1
    kl: float = 1.0
    hidden: float = 0.0
    hidden_blocks: tuple[int, ...] = ()
    cross_entropy: float = 0.0
    position_fraction: float = 1.0
    train: str = "projections"
    masks: str = "fixed"
    mask_every: int = 1
    mask_decay: float = 2e-4
    mask_freeze: float = 0.25
    level: str = "end-to-end"
    evaluate_every: int = 50
    patience: int = 0
    ema: float = 0.0
    cache_teacher: bool = False
    cache_top: int = 64
    cache_limit: int = 4_000_000_000
    lora_rank: int = 0
    precision: str = "no"
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_windows", "accumulation", "mask_every", "evaluate_every"):
            _check_integer(name, getattr(self, name), 1)
        for name in ("save_every", "cache_top", "cache_limit"):
            _check_integer(name, getattr(self, name), 1)
        for name in ("patience", "lora_rank", "seed"):
            _check_integer(name, getattr(self, name), 0)
        _check_integer("window_tokens", self.window_tokens, 2)
        _check_number("lr", self.lr, above=0)
        for name in ("weight_decay", "clip", "kl", "hidden", "cross_entropy", "mask_decay"):
            _check_number(name, getattr(self, name))
        for name in ("warmup", "mask_freeze"):
            _check_number(name, getattr(self, name), most=1)
        _check_number("position_fraction", self.position_fraction, above=0, most=1)
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "hidden_blocks", tuple(self.hidden_blocks))
        for name, value in (("ema", self.ema), *(("betas", beta) for beta in self.betas)):
            _check_number(name, value, below=1)
        for index in self.hidden_blocks:
            _check_integer("hidden_blocks", index, -(10**6))
        _check_choice("train", self.train, TRAIN)
        _check_choice("masks", self.masks, MASKS)
        _check_choice("level", self.level, LEVELS)
        _check_choice("precision", self.precision, PRECISIONS)
        self._check_together()

    def _check_together(self) -> None:
        if not (self.kl or self.hidden or self.cross_entropy):
            raise ArgumentError(
                "kl, hidden and cross_entropy all 0", need="at least one loss", hint="kl=1.0"
            )
        if len(self.betas) != 2:
            raise ArgumentError(f"betas={self.betas}", need="two numbers", hint="(0.9, 0.95)")
        if self.lora_rank and (self.masks != "fixed" or self.train != "projections"):
            raise ArgumentError(
                f"lora_rank={self.lora_rank} with masks={self.masks!r}, train={self.train!r}",
                need="weights that stay as they are beside a low-rank product",
                hint="masks='fixed', train='projections'",
            )
        if self.batch_windows % self.accumulation:
            fitting = self.accumulation * -(-self.batch_windows // self.accumulation)
            raise ArgumentError(
                f"batch_windows={self.batch_windows} in accumulation={self.accumulation} parts",
                need="equal parts",
                hint=f"batch_windows={fitting}",
            )

    @property
    def uses_logits(self) -> bool:
        """Whether any loss looks at the vocabulary."""
        return bool(self.kl or self.cross_entropy)

    @property
    def frozen_from(self) -> int:
        """First step at which sr-ste changes no mask any more."""
        return self.steps - max(1, math.ceil(self.steps * self.mask_freeze))

    def learning_rate(self, step: int) -> float:
        """The rate of step 0, 1, ...: linear warm-up, then a cosine that ends at zero.

        Example:
            >>> options = RecoverOptions(steps=100, lr=1.0, warmup=0.1)
            >>> [round(options.learning_rate(step), 2) for step in (0, 9, 54, 99)]
            [0.1, 1.0, 0.52, 0.0]
        """
        rising = round(self.steps * self.warmup)
        if step < rising:
            return self.lr * (step + 1) / rising
        part = (step - rising) / max(1, self.steps - rising)
        return self.lr * 0.5 * (1 + math.cos(math.pi * part))

    def to_json(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        lists = {"betas": list(self.betas), "hidden_blocks": list(self.hidden_blocks)}
        return asdict(self) | lists

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> RecoverOptions:
        """Read what `to_json` wrote.

        Raises:
            ArgumentError: An unknown entry, or a value that cannot mean anything.
        """
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(facts) - set(known)):
            raise ArgumentError(
                f"option {unknown[0]!r}", need="one of the options below", hint=", ".join(known)
            )
        return cls(**facts)


def _check_integer(what: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(
            f"{what}={value!r}", need=f"an integer of at least {least}", hint=f"{what}={least}"
        )


def _check_number(
    what: str,
    value: object,
    *,
    above: float | None = None,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = number and math.isfinite(float(str(value))) and 0 <= float(str(value)) <= most
    if fits and float(str(value)) < below and (above is None or float(str(value)) > above):
        return
    low = "at least 0" if above is None else f"above {above:g}"
    high = f", below {below:g}" if below < math.inf else f", at most {most:g}" if most < 2 else ""
    default = next(each.default for each in fields(RecoverOptions) if each.name == what)
    raise ArgumentError(
        f"{what}={value!r}", need=f"a finite number {low}{high}", hint=f"{what}={default}"
    )


def _check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ArgumentError(
            f"{what}={value!r}", need="one of " + ", ".join(choices), hint=f"{what}={choices[0]!r}"
        )
