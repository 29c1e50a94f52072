"""Ways to run one language model: as users run it today, and ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, UnsupportedError
from ..formats import NMPattern, Quantized, Scheme
from ..nn import SparseLinear
from ..ops import pack_nm
from ..prune import magnitude
from ..quant.grid import code_dtype, expand_scales, scale_dtype, to_codes, weight_scales
from .fused import fuse_blocks
from .rules import family_blocks, family_of

#: True shapes of models, for weights that are random.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "qwen3-8b": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 8192,
        "rope_theta": 1000000.0,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class ModelWay:
    """One way to run a model.

    Attributes:
        name: Shown to people.
        prepare: Changes the projections of a dense model in place.
        compiled: By torch.compile.
        captured: Prefill and the decode step replay CUDA graphs.
        attention: Steps of decoding attend by `attend_decode`, and not by torch.
    """

    name: str
    prepare: Callable[[nn.Module], None]
    compiled: bool = False
    captured: bool = False
    attention: bool = False


class DenseFp8(nn.Module):
    """A dense layer of E4M3: a scale for each row of weight and of input, sums of the fast kind.

    Args:
        linear: The layer, on a Hopper GPU.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, self.bias = linear.weight.detach(), linear.bias
        scale = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
        self.weight = nn.Buffer((weight / scale).to(torch.float8_e4m3fn))
        self.scale = nn.Buffer(scale.T.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features], in the dtype of x."""
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
        y = torch._scaled_mm(
            (rows / scale).to(torch.float8_e4m3fn),
            self.weight.T,
            scale_a=scale,
            scale_b=self.scale,
            bias=self.bias,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        return y.view(*x.shape[:-1], -1)


def projections(model: nn.Module) -> dict[str, nn.Linear]:
    """The dense layers inside the blocks of a model, by full name."""
    family = family_of(model.config.model_type)  # type: ignore[union-attr, arg-type]
    return {
        f"{path}.{name}": module
        for path in family_blocks(family, model)
        for name, module in model.get_submodule(path).named_modules()
        if isinstance(module, nn.Linear)
    }


def replace_projections(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Put another layer in the place of each projection."""
    found = projections(model)
    if not found:
        raise ArgumentError(
            "a model whose blocks hold no dense layers",
            need="a dense model, of which each way makes its own",
            hint="the model that the sparse one was made from",
        )
    for name, linear in found.items():
        home, _, last = name.rpartition(".")
        setattr(model.get_submodule(home), last, make(linear).eval())


def leave(model: nn.Module) -> None:
    """Dense as it is."""
    replace_projections(model, lambda linear: linear)


def dense_fp8(model: nn.Module) -> None:
    """Dense layers of E4M3."""
    replace_projections(model, DenseFp8)


def torch_two_four(model: nn.Module) -> None:
    """The 2:4 tensor class of PyTorch, over cuSPARSELt."""

    def made(linear: nn.Linear) -> nn.Linear:
        pruned = magnitude(linear.weight.detach(), NMPattern(2, 4))
        linear.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(pruned), False)
        return linear

    replace_projections(model, made)


def ours_16(model: nn.Module) -> None:
    """2:4 layers of 16 bits, fused."""

    def made(linear: nn.Linear) -> nn.Module:
        return SparseLinear(pack_nm(linear.weight.detach(), select="magnitude"), linear.bias)

    replace_projections(model, made)
    fuse_blocks(model)


def ours_in(scheme: str) -> Callable[[nn.Module], None]:
    """2:4 layers of codes, fused."""
    known = Scheme(scheme, activations=scheme)

    def made(linear: nn.Linear) -> nn.Module:
        pruned = magnitude(linear.weight.detach(), NMPattern(2, 4))
        scales = weight_scales(pruned, known).to(scale_dtype(known))
        spread = expand_scales(scales, pruned.shape[1], known)
        codes = to_codes(pruned, spread, known.weights).to(code_dtype(known))
        # As quantize_matrix does, but packed by a kernel: a model has hundreds of layers.
        matrix = Quantized.of(pack_nm(codes), scales, known, pruned.dtype)
        return SparseLinear(matrix, linear.bias)

    def prepare(model: nn.Module) -> None:
        replace_projections(model, made)
        fuse_blocks(model)

    return prepare


_QUICK: dict[str, bool] = {"compiled": True, "captured": True}
_OURS: dict[str, bool] = {"captured": True, "attention": True}

# Dense ones also with our attention: what 2:4 gains is beside those.
WAYS = (
    ModelWay("dense, eager", leave),
    ModelWay("dense, compiled", leave, **_QUICK),
    ModelWay("dense, compiled, our attention", leave, **_QUICK, attention=True),
    ModelWay("dense fp8, compiled", dense_fp8, **_QUICK),
    ModelWay("dense fp8, compiled, our attention", dense_fp8, **_QUICK, attention=True),
    ModelWay("torch 2:4, eager", torch_two_four),
    ModelWay("2:4", ours_16, **_OURS),
    ModelWay("2:4, compiled", ours_16, **_OURS, compiled=True),
    ModelWay("2:4+fp8", ours_in("fp8"), **_OURS),
    ModelWay("2:4+fp8, compiled", ours_in("fp8"), **_OURS, compiled=True),
)


def ways_named(names: str | None) -> tuple[ModelWay, ...]:
    """Ways by their names, separated by semicolons, since names have commas; None is all.

    Raises:
        ArgumentError: There is no such way.

    Example:
        >>> [way.name for way in ways_named("2:4; dense, eager")]
        ['2:4', 'dense, eager']
    """
    if names is None:
        return WAYS
    known = {way.name: way for way in WAYS}
    asked = [name.strip() for name in names.split(";")]
    for name in asked:
        if name not in known:
            raise ArgumentError(
                f"the way {name!r}", need="; ".join(known), hint='"dense, compiled; 2:4"'
            )
    return tuple(known[name] for name in asked)


def random_model(
    config: str | dict[str, Any],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
) -> nn.Module:
    """A model of true shapes with random weights, dense, in evaluation mode.

    Args:
        config: One of `CONFIGS`, or what a config.json holds.
        device: Where it is made.
        dtype: Of its weights.
        layers: So many blocks instead; None: as many as the model has.

    Raises:
        ArgumentError: No such config.
        UnsupportedError: transformers is not installed.

    Example:
        >>> tiny = CONFIGS["smollm2-135m"] | {"num_hidden_layers": 1, "vocab_size": 32}
        >>> model = random_model(tiny, device=torch.device("cpu"))
        >>> sum(weight.numel() for weight in model.parameters())
        3559104
    """
    if isinstance(config, str) and config not in CONFIGS:
        known = ", ".join(CONFIGS)
        raise ArgumentError(f"config {config!r}", need=f"one of {known}", hint="llama-3-8b")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise UnsupportedError(
            "a model without transformers",
            need="the models extra",
            hint="pip install hopsparse[models]",
        ) from error
    facts = dict(CONFIGS[config] if isinstance(config, str) else config)
    if layers is not None:
        facts["num_hidden_layers"] = layers
    made = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype)
    model.eval().requires_grad_(False)
    return model  # type: ignore[no-any-return]
