"""How much of the context a model's attention reads, as a value."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import ArgumentError

#: The name that transformers knows the attention by, and the entry of a model's config.
IMPLEMENTATION, ENTRY = "hopsparse", "hopsparse_attention"
MODES = ("top-k", "top-p", "certified")
PAGES = (16, 32, 64, 128)
SCORES = ("bound", "mean", "mass")
#: What a call may ask for that changes scores, or what is seen: only dense attention knows of it.
FOREIGN = ("sliding_window", "softcap", "position_bias", "s_aux", "output_attentions")


def configs_of(model: Any) -> list[Any]:
    """Every config that a part of a model reads: one of several kinds has a config for each.

    Args:
        model: Of transformers.
    """
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(each): each for each in (model.config, *found) if each is not None}.values())


def set_attention(model: Any, name: str) -> None:
    """`model.set_attn_implementation(name)`, in every config.

    Versions of transformers differ in which of them that method reaches, where a part of the model
    has a config of its own.

    Args:
        model: Of transformers; it refuses what its attention cannot be.
        name: Of an attention.
    """
    model.set_attn_implementation(name)
    for config in configs_of(model):
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = name


@dataclass(frozen=True)
class AttentionConfig:
    """What `attn_implementation="hopsparse"` attends to.

    A query attends to whole blocks of `page` neighbouring tokens: the first `sink` and the last
    `recent` ones, and those with the best scores, `budget` tokens at most.

    Attributes:
        budget: Most tokens that a query attends to, a multiple of the page.
        page: Tokens of a block: 16, 32, 64 or 128.
        mode: "top-k": the whole budget. "top-p": until the estimates hold `top_p` of the mass.
            "certified": until at most `epsilon` of the attention can be outside, or the budget is
            full.
        top_p: Of that mode.
        epsilon: Of the mode "certified".
        sink: First blocks, which models put attention on whatever they hold.
        recent: Last blocks, at least one: that of the query itself.
        crossover: Keys up to which attention is that of "sdpa", bit for bit.
        prefill: Whether prompts are sparse too; else only the tokens that are generated.
        score: What blocks are ranked by, as in `hopsparse.ops.score_blocks`.

    Raises:
        ArgumentError: A value means nothing.

    Example:
        >>> AttentionConfig(budget=1024).blocks
        16
        >>> AttentionConfig(budget=100)
        Traceback (most recent call last):
        hopsparse.errors.ArgumentError: AttentionConfig: budget=100. Required: a multiple of the \
page of 64, at least 192: 1 sink, 1 recent and one more. Try: 192.
    """

    budget: int = 2048
    page: int = 64
    mode: str = "top-k"
    top_p: float = 0.95
    epsilon: float = 0.05
    sink: int = 1
    recent: int = 1
    crossover: int = 4096
    prefill: bool = False
    score: str = "mass"

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("page", PAGES), ("score", SCORES)):
            if getattr(self, name) not in known:
                self._refuse(name, "one of " + ", ".join(map(str, known)), str(known[0]))
        for name, least in (("sink", 0), ("recent", 1), ("crossover", 0), ("budget", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                self._refuse(name, f"a whole number from {least}", str(least))
        for name in ("top_p", "epsilon"):
            value = getattr(self, name)
            if not isinstance(value, float | int) or not 0 < value <= 1:
                self._refuse(name, "above 0 and at most 1", "0.95")
        if not isinstance(self.prefill, bool):
            self._refuse("prefill", "True or False", "False")
        least = (self.sink + self.recent + 1) * self.page
        if self.budget % self.page or self.budget < least:
            told = f"{self.sink} sink, {self.recent} recent and one more"
            need = f"a multiple of the page of {self.page}, at least {least}: {told}"
            self._refuse("budget", need, str(max(least, self.budget // self.page * self.page)))

    @property
    def blocks(self) -> int:
        """Most blocks that a query attends to."""
        return self.budget // self.page

    def apply(self, model: Any) -> None:
        """Make a loaded model of transformers attend so; its weights stay as they are.

        Args:
            model: A causal language model; its `config` says so from then on, and is saved so.

        Raises:
            ArgumentError: It is none of transformers.
        """
        if not hasattr(model, "set_attn_implementation") or not hasattr(model, "config"):
            raise ArgumentError(
                f"AttentionConfig.apply: a {type(model).__name__}",
                need="a model of transformers",
                hint="AutoModelForCausalLM.from_pretrained(...)",
            )
        for config in configs_of(model):
            setattr(config, ENTRY, asdict(self))
        set_attention(model, IMPLEMENTATION)

    @classmethod
    def of(cls, config: Any) -> AttentionConfig:
        """What a model's config asks for; the defaults where it says nothing.

        Raises:
            ArgumentError: The entry holds a name or a value that means nothing.
        """
        entry = getattr(config, ENTRY, None)
        if entry is None:
            return cls()
        known = {field.name for field in fields(cls)}
        if not isinstance(entry, dict) or not entry.keys() <= known:
            raise ArgumentError(
                f"{ENTRY} = {entry!r} in a model's config",
                need="values of " + ", ".join(sorted(known)),
                hint="hopsparse.AttentionConfig(...).apply(model)",
            )
        return cls(**entry)

    def _refuse(self, name: str, need: str, hint: str) -> None:
        raise ArgumentError(
            f"AttentionConfig: {name}={getattr(self, name)!r}", need=need, hint=hint
        )
