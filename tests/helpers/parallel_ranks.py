"""What ranks do in the tests of layers that they share; over NCCL rank r has GPU r."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hopsparse.formats import NM, NMPattern, bounds_of, parse_form
from hopsparse.nn import SparseLinear
from hopsparse.ops import pack_nm
from hopsparse.ops.peer_sum import reference
from hopsparse.ops.peer_sum.plan import HEADER_BYTES, Place
from hopsparse.parallel import (
    ColumnParallelSparseLinear,
    Peers,
    RowParallelSparseLinear,
    parallelize,
)
from hopsparse.parallel.cut import whole_of
from hopsparse.parallel.symmetric import SymmetricMemory
from hopsparse.quant import quantize_matrix


def integers(shape: tuple[int, ...], seed: int, part: float = 1.0) -> Tensor:
    """-1, 0 and 1, a part of them not zero: products and sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, 2, shape, generator=generator).float()
    return values * (torch.rand(shape, generator=generator) < part)


def sparse_layer(
    out: int, k: int, seed: int, dtype: torch.dtype, *, bias: bool = True, form: str = "2:4"
) -> SparseLinear:
    """A 2:4 layer of small integers, or a quantized one."""
    dense = integers((out, k), seed)
    if "+" in form:
        zeros = pack_nm(dense.to(dtype), select="magnitude").to_dense()
        matrix: Any = quantize_matrix(zeros, parse_form(form))
    else:
        pattern = NMPattern(*(int(each) for each in form.split(":")))
        if form == "2:4":
            matrix = pack_nm(dense.to(dtype), select="magnitude")
        else:
            groups = nn.functional.pad(dense, (0, -k % pattern.m)).view(out, -1, pattern.m)
            groups[..., pattern.n :] = 0
            matrix = NM.from_dense(groups.flatten(1)[:, :k].to(dtype), pattern)
    offset = nn.Parameter(integers((out,), seed + 1).to(dtype), False) if bias else None
    return SparseLinear(matrix, offset)


def dense_layer(out: int, k: int, seed: int, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(k, out, dtype=dtype).requires_grad_(False)
    layer.weight.copy_(integers((out, k), seed))
    assert layer.bias is not None
    layer.bias.copy_(integers((out,), seed + 1))
    return layer


def layer_of(
    kind: str, out: int, k: int, seed: int, dtype: torch.dtype
) -> SparseLinear | nn.Linear:
    if kind == "dense":
        return dense_layer(out, k, seed, dtype)
    return sparse_layer(out, k, seed, dtype, form=kind)


def chained(rank: int, kind: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Two layers behind one another, shared and whole; and columns gathered, and inputs split."""
    k, middle, out = sizes
    peers = Peers()
    up = layer_of(kind, middle, k, 1, dtype)
    down = layer_of(kind, out, middle, 3, dtype)
    x, residual = integers((3, 5, k), 5, 0.1).to(dtype), integers((3, 5, out), 6).to(dtype)
    # Where one ends the other begins: multiples of what neither cuts.
    whole = math.lcm(whole_of(up, rows=True), whole_of(down, rows=False))
    bounds = bounds_of(middle, peers.ranks, whole)
    one = ColumnParallelSparseLinear.from_layer(up, peers, bounds=bounds)
    other = RowParallelSparseLinear.from_layer(down, peers, bounds=bounds)
    gathered = ColumnParallelSparseLinear.from_layer(up, peers, gather_output=True)
    split = RowParallelSparseLinear.from_layer(down, peers, input_is_split=False)
    wide = RowParallelSparseLinear.from_layer(down, peers, bounds=bounds, wide_parts=True)
    with torch.no_grad():
        between = up(x)
        results = [
            *(between, gathered(x), down(between), other(one(x)), split(between), wide(one(x))),
            *(down(between) + residual, other(one(x), residual)),
        ]
    # What bfloat16 holds exactly.
    assert all(0 < each.abs().max() <= 256 for each in results)
    nothing = other(one(x[:0]))
    assert nothing.shape == (0, 5, out)
    assert "collectives of gloo: tensors are on cpu" in other.plan(one(x)).describe()
    return results


def gradients(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of a block, whole and shared: x, and what this rank has of the rest."""
    peers, k, middle, out = Peers(), 48, 320, 40
    up = layer_of("dense", middle, k, 1, dtype).requires_grad_(True)
    down = layer_of("dense", out, middle, 3, dtype).requires_grad_(True)
    given = integers((4, k), 5).to(dtype)
    grad = integers((4, out), 7).to(dtype)
    one = ColumnParallelSparseLinear.from_layer(up, peers)
    other = RowParallelSparseLinear.from_layer(down, peers, bounds=one.bounds)
    gathered = ColumnParallelSparseLinear.from_layer(up, peers, gather_output=True)
    split = RowParallelSparseLinear.from_layer(down, peers, input_is_split=False)
    found = []
    for first, second in ((up, down), (one, other), (gathered, split)):
        x = given.clone().requires_grad_(True)
        y = second(torch.relu(first(x)))
        y.backward(grad)
        assert x.grad is not None
        found += [y, x.grad]
    start, stop = one.bounds[rank], one.bounds[rank + 1]
    assert isinstance(up, nn.Linear)
    assert isinstance(down, nn.Linear)
    for first, second, whole in ((one, other, 1), (gathered, split, 1)):
        begin, end = second.bounds[rank], second.bounds[rank + 1]
        start, stop = first.bounds[rank], first.bounds[rank + 1]
        found += [
            *(up.weight.grad[start:stop], first.shard.weight.grad * whole),
            *(up.bias.grad[start:stop], first.shard.bias.grad),
            *(down.weight.grad[:, begin:end], second.shard.weight.grad),
            *(down.bias.grad, second.bias.grad),
        ]
    return found


def sparse_gradient(rank: int) -> list[Tensor]:
    """The gradient of x through 2:4 layers, whole and shared."""
    peers, found = Peers(), []
    up = sparse_layer(192, 64, 1, torch.float32)
    down = sparse_layer(24, 192, 3, torch.float32)
    one = ColumnParallelSparseLinear.from_layer(up, peers)
    other = RowParallelSparseLinear.from_layer(down, peers)
    for first, second in ((up, down), (one, other)):
        x = integers((5, 64), 5).requires_grad_(True)
        y = second(torch.relu(first(x)))
        y.backward(integers((5, 24), 7))
        assert x.grad is not None
        found += [y, x.grad]
    return found


def model_of(rank: int, kv_heads: int) -> dict[str, Any]:
    """A block of a tiny Llama in integers, whole and shared: attention's products and the MLP."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        hidden_size=32 * kv_heads,
        intermediate_size=320,
        num_hidden_layers=1,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        attn_implementation="eager",
        attention_bias=True,
    )
    torch.manual_seed(0)
    block = LlamaDecoderLayer(config, 0).double().requires_grad_(False).eval()
    x = torch.randn(2, 7, 32 * kv_heads, dtype=torch.float64)
    angles = torch.randn(1, 7, 64, dtype=torch.float64)
    turned = angles.cos(), angles.sin()
    whole = block(x, position_embeddings=turned)
    names = parallelize(block, Peers())
    shared = block(x, position_embeddings=turned)
    whole, shared = (each[0] if isinstance(each, tuple) else each for each in (whole, shared))
    sizes = [block.self_attn.q_proj.shard.out_features, block.self_attn.k_proj.shard.out_features]
    return {
        "off": float((whole - shared).abs().max()),
        "size": float(whole.abs().max()),
        "shared": shared,
        "names": names,
        "rows": sizes,
    }


def models_of(rank: int, heads: tuple[int, ...]) -> list[dict[str, Any]]:
    """`model_of` for some counts of heads."""
    return [model_of(rank, each) for each in heads]


def fused(rank: int) -> dict[str, Any]:
    """A tiny sparse Llama: whole, shared, and shared with its layers joined; logits of each."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from hopsparse import fuse_blocks

    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).requires_grad_(False).eval()
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                packed = pack_nm(child.weight.detach(), select="magnitude")
                setattr(module, name, SparseLinear(packed))
    tokens = torch.arange(14).view(2, 7) % 96
    with torch.no_grad():
        found = [model(tokens).logits]
        parallelize(model, Peers(), inference=True)
        found.append(model(tokens).logits)
        done = fuse_blocks(model)
        found.append(model(tokens).logits)
    off = max(float((each - found[0]).abs().max()) for each in found)
    return {"off": off, "size": float(found[0].abs().max()), "logits": found, "fused": done.fused}


def raised(work: Callable[[], object]) -> BaseException | None:
    """What it raises, if anything."""
    try:
        work()
    except Exception as error:
        return error
    return None


def refused(rank: int) -> list[BaseException | None]:
    """What is refused, on every rank alike."""
    peers = Peers()
    layer = sparse_layer(192, 128, 1, torch.float32)
    csr = SparseLinear.from_linear(nn.Linear(64, 64), "csr")
    row = RowParallelSparseLinear.from_layer(layer, peers)
    headless = nn.Module()
    headless.head_dim = 0
    for name in "qkvo":
        headless.add_module(f"{name}_proj", nn.Linear(64, 64))
    tries: list[Callable[[], object]] = [
        lambda: ColumnParallelSparseLinear.from_layer(csr, peers),
        lambda: ColumnParallelSparseLinear.from_layer(nn.ReLU(), peers),
        lambda: ColumnParallelSparseLinear.from_layer(layer, peers, bounds=(0, 100, 192)),
        lambda: ColumnParallelSparseLinear.from_layer(layer, peers, bounds=(0, 192)),
        lambda: RowParallelSparseLinear.from_layer(sparse_layer(8, 64, 1, torch.float32), peers),
        lambda: RowParallelSparseLinear(layer, peers, (0, 64, 128)),
        lambda: ColumnParallelSparseLinear(layer, peers, (0, 64, 192)),
        lambda: row(torch.ones(3, 128)),
        lambda: row(torch.ones(3, 64), torch.ones(3, 8)),
        lambda: row(torch.ones(3, 64).double()),
        lambda: parallelize(nn.ReLU(), peers),
        lambda: Peers(object()),
        lambda: RowParallelSparseLinear(row.shard, peers, row.bounds, torch.ones(1)),
        lambda: RowParallelSparseLinear(row.shard, peers, row.bounds, act="tanh"),
        lambda: Peers(capacity_bytes=-1),
        lambda: Peers(patience_s=math.nan),
        lambda: parallelize(headless, peers),
    ]
    return [raised(each) for each in tries]


def quantized(rank: int, form: str, device: str) -> list[Tensor]:
    """Codes are cut with their scales: the sum of the codes' own products, and what it is."""
    peers = Peers()
    whole = layer_of(form, 256, 512, 3, torch.bfloat16).to(device)
    row = RowParallelSparseLinear.from_layer(whole, peers)
    column = ColumnParallelSparseLinear.from_layer(whole, peers, gather_output=True)
    x = integers((16, 512), 5, 0.1).to(device, torch.bfloat16)
    own = x[:, row.bounds[rank] : row.bounds[rank + 1]].contiguous()
    with torch.no_grad():
        part = row.shard(own)
        parts = [torch.empty_like(part) for _ in range(peers.ranks)]
        dist.all_gather(parts, part)
        want = reference.peer_sum(parts, torch.bfloat16, row.bias)
        return [row(own), want, column(x), whole(x)]


def of_a_mesh(rank: int) -> list[Any]:
    """A mesh of two dimensions, whose second one shares a layer: sums of pairs of ranks."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    peers = Peers(mesh["tp"])
    layer = sparse_layer(16, 128, 1, torch.float32)
    shared = RowParallelSparseLinear.from_layer(layer, peers, input_is_split=False)
    x = integers((3, 128), rank // 2)
    return [shared(x), layer(x), torch.tensor([peers.rank, peers.ranks])]


def standing_in(rank: int) -> list[Any]:
    """The way of parts through slots, with collectives in the place of the kernels.

    Returns:
        Pairs of what is and what should be, then the slots that were used, and what is told.
    """
    peers, used = Peers(), []
    memory = torch.full((HEADER_BYTES + 5 * 4096,), 0xA5, dtype=torch.uint8)
    peers._shared = SymmetricMemory(memory, (0,) * peers.ranks, rank, 4096, 1000, None)
    peers.reason = None

    def part_at(place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        used.append(((place.slot - HEADER_BYTES) // 4096, place.drain))
        size = math.prod(shape) * dtype.itemsize
        return memory[place.slot : place.slot + size].view(dtype).view(shape)

    def add(y: Tensor, place: Place, part: torch.dtype, *added: Tensor | None) -> None:
        mine = part_at(place, tuple(y.shape), part)
        parts = [torch.empty_like(mine) for _ in range(peers.ranks)]
        dist.all_gather(parts, mine)
        y.copy_(reference.peer_sum(parts, y.dtype, *added))

    def beside(y: Tensor, place: Place, bounds: tuple[int, ...]) -> None:
        shape = (*y.shape[:-1], bounds[rank + 1] - bounds[rank])
        y.copy_(peers.beside(part_at(place, shape, y.dtype), bounds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hopsparse.parallel.symmetric.capture_id", lambda device: None)
        patch.setattr("hopsparse.ops.peer_sum.device.peer_sum", add)
        patch.setattr("hopsparse.ops.peer_sum.device.peer_gather", beside)
        found: list[Any] = []
        for dtype, form in ((torch.bfloat16, "2:4"), (torch.float16, "dense")):
            up, down = layer_of(form, 192, 64, 1, dtype), layer_of(form, 40, 192, 3, dtype)
            x, residual = integers((7, 64), 5, 0.1).to(dtype), integers((7, 40), 6).to(dtype)
            bounds = (0, 128, 192)
            one = ColumnParallelSparseLinear.from_layer(up, peers, bounds=bounds)
            gathered = ColumnParallelSparseLinear.from_layer(
                up, peers, bounds=bounds, gather_output=True
            )
            with torch.no_grad():
                between = up(x)
                for wide in (False, True):
                    row = RowParallelSparseLinear.from_layer(
                        down, peers, bounds=bounds, wide_parts=wide
                    )
                    found += [row(one(x), residual), down(between) + residual]
                    found += [row(one(x)), down(between)]
                found += [gathered(x), between]
        many = integers((120, 64), 7, 0.1).to(dtype)
        told = [row.plan(one(x)).describe(), row.plan(one(many)).describe()]
        with torch.no_grad():  # 120 tokens are above the capacity, by a collective
            found += [row(one(many)), down(up(many))]
    return [found, used, [*told, gathered.plan(x).describe(), peers.describe()]]
