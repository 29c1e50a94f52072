"""The model that is planned for: its layers, which forms fit each, and the text to measure on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError
from ..formats import Form, Pattern, parse_form
from ..measure import Decoder
from ..prune import Recipe
from ..version import __version__
from ._family import Family
from .rules import FITS_ALL, Selection, family_blocks, family_of, select
from .source import WeightSource, open_source, skeleton
from .text import CALIBRATION, bundled_text, random_windows, read_text, windows_digest

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from .sensitivity import SensitivityOptions


@dataclass(frozen=True)
class Subject:
    """One model, opened; nothing but its configuration and tokenizer is read.

    Attributes:
        source: Where its weights come from.
        family: Where its parts are.
        network: The skeleton.
        paths: Its blocks.
        eligible: Layers to plan, full names, by block.
        forms: The forms that fit each of them.
        kept_dense: Why each other linear layer stays dense.
        decoder: What a decode step reads.
        windows: Windows of the calibration text.
    """

    source: WeightSource
    family: Family
    network: PreTrainedModel
    paths: tuple[str, ...]
    eligible: Mapping[str, tuple[str, ...]]
    forms: Mapping[str, tuple[str, ...]]
    kept_dense: Mapping[str, str]
    decoder: Decoder
    windows: Sequence[Tensor]

    @classmethod
    def of(
        cls, model: str, recipe: Recipe, forms: Sequence[str], options: SensitivityOptions
    ) -> Subject:
        """Open the model, divide its layers, and cut the text.

        Raises:
            CheckpointError: The model cannot be read.
            CalibrationError: The text cannot be used.
            UnsupportedError: The architecture is unknown, or no layer can be pruned.
        """
        source = open_source(model)
        family = family_of(source.config.model_type)
        network = skeleton(source)
        paths = family_blocks(family, network)
        selection = select(network, paths, Recipe(FITS_ALL, keep=recipe.keep))
        text = read_text(options.calibration) if options.calibration else bundled_text(CALIBRATION)
        windows = random_windows(
            text, source.tokenizer(), options.windows, options.window_tokens, recipe.seed
        )
        return cls(
            source,
            family,
            network,
            paths,
            selection.eligible,
            _fitting(network, paths, selection, forms, recipe.keep),
            selection.kept_dense,
            _decoder(network, family, paths, source.config),
            windows,
        )

    def identity(self, recipe: Recipe, options: SensitivityOptions) -> dict[str, Any]:
        """What measured costs belong to."""
        chosen = recipe.to_json()
        return {
            "model": self.source.identity(),
            "recipe": {
                key: value
                for key, value in chosen.items()
                if key not in ("pattern", "scheme", "forms", "keep")
            },
            "calibration": windows_digest(self.windows),
            "fisher_windows": options.fisher_windows,
            "additive": options.additive,
            "software": f"hopsparse {__version__}, torch {torch.__version__}",
        }


def _fitting(
    network: nn.Module,
    paths: Sequence[str],
    every: Selection,
    forms: Sequence[str],
    keep: tuple[str, ...],
) -> dict[str, tuple[str, ...]]:
    """The forms that each layer can take."""
    patterns: dict[Pattern | None, set[str]] = {None: _names(every)}
    for form in map(parse_form, forms):
        if form.pattern not in patterns:
            assert form.pattern is not None
            try:
                patterns[form.pattern] = _names(
                    select(network, paths, Recipe(form.pattern, keep=keep))
                )
            except UnsupportedError:
                patterns[form.pattern] = set()
    return {
        name: tuple(form for form in forms if name in patterns[parse_form(form).pattern])
        or (str(Form()),)
        for names in every.eligible.values()
        for name in names
    }


def _names(selection: Selection) -> set[str]:
    return {name for names in selection.eligible.values() for name in names}


def _decoder(
    network: nn.Module, family: Family, paths: Sequence[str], config: PretrainedConfig
) -> Decoder:
    head = network.get_submodule(family.head)
    assert isinstance(head, nn.Linear)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Decoder(
        layers={
            f"{path}.{name}": (module.out_features, module.in_features)
            for path in paths
            for name, module in network.get_submodule(path).named_modules()
            if isinstance(module, nn.Linear)
        },
        head=(head.out_features, head.in_features),
        blocks=len(paths),
        kv_width=int(config.num_key_value_heads * size),
    )
