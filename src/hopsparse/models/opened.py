"""A whole model in memory, to be judged: whatever a path or a packaged name holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, CheckpointError
from ._entries import ModuleEntry, SparseConfig
from .checkpoint import CheckpointReader
from .gguf import GGUFSource
from .kinds import kind_of
from .load import check_device, load
from .source import materialize_outside, open_source, skeleton
from .text import Text, leading_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class OpenedModel:
    """A model that can be run, and what is known of its weights.

    Attributes:
        name: As the user named it.
        model: In evaluation mode.
        tokenizer: That belongs to it.
        kind: `sparse` or `dense`.
        nbytes: Of the weights as a checkpoint stores them; of a GGUF file, dequantised.
        forms: How many weights have each form, where the checkpoint says so; else empty.
        kept_dense: Projections that a sparse checkpoint left dense.
    """

    name: str
    model: nn.Module = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    kind: str
    nbytes: int
    forms: dict[str, int]
    kept_dense: int = 0

    def windows(self, text: Text, count: int, tokens: int) -> list[Tensor]:
        """The first windows [1, tokens] of `text`, at most `count`.

        Raises:
            CalibrationError: The text is shorter than one window.
            ArgumentError: Windows longer than the model's context, or tokens that it does not know.
        """
        config = getattr(self.model, "config", None)
        context = getattr(config, "max_position_embeddings", None)
        if isinstance(context, int) and tokens > context:
            raise ArgumentError(
                f"windows of {tokens} tokens for {self.name}",
                need=f"at most its context of {context}",
                hint=f"--window-tokens {context}",
            )
        windows = leading_windows(text, self.tokenizer, count, tokens)
        largest = max(int(window.max()) for window in windows)
        size = getattr(config, "vocab_size", None)
        if isinstance(size, int) and largest >= size:
            raise ArgumentError(
                f"the tokenizer of {self.name} gives token {largest}",
                need=f"tokens below the model's vocabulary of {size}",
                hint="the tokenizer files that belong to the model",
            )
        return windows

    def vocabulary(self) -> dict[str, int]:
        """Tokens and ids; those that the model has no logit for are left out.

        transformers adds special tokens to what a GGUF file holds.
        """
        size = getattr(getattr(self.model, "config", None), "vocab_size", None)
        known: dict[str, int] = self.tokenizer.get_vocab()
        if not isinstance(size, int):
            return known
        return {token: index for token, index in known.items() if index < size}

    def to_json(self) -> dict[str, Any]:
        """What a report says of it."""
        return {
            "name": self.name,
            "kind": self.kind,
            "bytes": self.nbytes,
            "forms": self.forms,
            "kept_dense": self.kept_dense,
        }


def open_model(
    model: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> OpenedModel:
    """Load a model as a whole, dense or sparse.

    Args:
        model: An HF folder, dense or sparse, a .gguf file, or a packaged model.
        device: Where it will run.
        dtype: Of the arithmetic, and of the weights in memory.

    Raises:
        CheckpointError: There is no such model, or it is damaged.
        UnsupportedError: It cannot be run here, or a library is missing.
        ArgumentError: torch does not know the device.

    Example:
        >>> open_model("no/such/model")
        Traceback (most recent call last):
        hopsparse.errors.CheckpointError: 'no/such/model' is no folder, no .gguf file and no ...
    """
    check_device(device)
    path = Path(model)
    if path.is_dir() and kind_of(path) == "hopsparse":
        return _open_sparse(path, device, dtype)
    source = open_source(model)
    network = skeleton(source)
    materialize_outside(network, (), source, device)
    if isinstance(source, GGUFSource):
        nbytes = sum(weight.numel() for weight in network.parameters()) * source.dtype.itemsize
    else:
        nbytes = sum(source.load(name).nbytes for name in source.names())
    for weight in network.parameters():
        # Not network.to(dtype): rotary frequencies stay float32, as loaders leave them.
        weight.data = weight.data.to(dtype)
    return OpenedModel(model, network, source.tokenizer(), "dense", nbytes, {})


def check_alike(a: OpenedModel, b: OpenedModel, texts: Iterable[Text]) -> None:
    """Refuse to compare models that see a text as different tokens.

    Raises:
        ArgumentError: Vocabularies differ, or texts are cut into other tokens.
    """
    ours, theirs = a.vocabulary(), b.vocabulary()
    hint = "a model and what was made from it"
    if ours != theirs:
        odd = sorted(word for word in {*ours, *theirs} if ours.get(word) != theirs.get(word))
        raise ArgumentError(
            f"vocabularies differ: {a.name} has {len(ours):,} tokens, {b.name} {len(theirs):,}, "
            f"and {len(odd):,} are not the same, such as {odd[0]!r}",
            need="two models of one tokenizer: their losses count the same tokens",
            hint=hint,
        )
    for text in texts:
        # A few thousand characters show another way of cutting; texts may be whole books.
        sample = text.content[:10_000]
        if _ids(a.tokenizer, sample) != _ids(b.tokenizer, sample):
            raise ArgumentError(
                f"the tokenizers of {a.name} and {b.name} cut text {text.name!r} differently",
                need="two models of one tokenizer: their losses count the same tokens",
                hint=hint,
            )


def _open_sparse(path: Path, device: str, dtype: torch.dtype) -> OpenedModel:
    with CheckpointReader(path) as reader:
        assert reader.sparse is not None
        config = reader.sparse
        nbytes = sum(reader.load(name).nbytes for name in reader.names())
    network = load(path, device=device, dtype=dtype)
    forms = Counter(_form(entry, config) for entry in config.modules.values())
    return OpenedModel(
        str(path),
        network,
        _tokenizer(path),
        "sparse",
        nbytes,
        dict(forms.most_common()),
        len(config.kept_dense),
    )


def _form(entry: ModuleEntry, config: SparseConfig) -> str:
    """The form of one weight; a format that knows no pattern has that of the recipe."""
    facts = entry.attributes
    asked = config.pattern.partition("+")[0]
    pattern = str(facts.get("pattern") or (asked if asked != "mixed" else entry.stored_as))
    if "block" in facts:
        pattern = f"block:{facts['block']}"
    if entry.stored_as == "dense":
        pattern = "dense"
    return pattern + (f"+{entry.scheme}" if entry.scheme else "")


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be loaded ({' '.join(str(error).split())})",
            need="tokenizer.json or the files of a known tokenizer",
            hint="copy the tokenizer files of the dense model next to config.json",
        ) from error
    return tokenizer


def _ids(tokenizer: PreTrainedTokenizerBase, content: str) -> list[int]:
    ids: list[int] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    return ids
