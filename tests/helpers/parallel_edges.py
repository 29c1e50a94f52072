"""What ranks do in the tests of the edges of layers that they share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hopsparse.parallel import ColumnParallelSparseLinear, Peers, RowParallelSparseLinear
from hopsparse.parallel.symmetric import SymmetricMemory
from tests.helpers.parallel_ranks import dense_layer, integers, layer_of, raised, sparse_layer


def of_one_token(rank: int, kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of x [k] and of the bias, whole and shared; parts as wide as may be."""
    peers, found = Peers(), []
    whole = layer_of(kind, 40, 256, 3, dtype)
    shared = RowParallelSparseLinear.from_layer(
        whole, peers, input_is_split=False, wide_parts=dtype == torch.float64
    )
    for layer in (whole, shared):
        assert layer.bias is not None
        layer.bias.requires_grad_(True)
        # Numbers whose product needs more than float32.
        x = (integers((256,), 5) * (1 + 2.0**-40)).to(dtype).requires_grad_(True)
        y = layer(x)
        y.backward(torch.full_like(y, 1 + 2.0**-40))
        with torch.no_grad():
            quiet = layer(x)
        assert x.grad is not None
        assert layer.bias.grad is not None
        found += [y.detach(), quiet, x.grad, layer.bias.grad]
    return found


def gated_row(rank: int) -> list[Tensor]:
    """A row-parallel layer with SwiGLU behind its sum, and a residual of half the columns."""
    whole = sparse_layer(64, 256, 1, torch.float32)
    whole.act = "swiglu"
    shared = RowParallelSparseLinear.from_layer(whole, Peers(), input_is_split=False)
    x, residual = integers((3, 256), 5, 0.1), integers((3, 32), 6)
    given = x.clone().requires_grad_(True)
    with torch.no_grad():
        found = [shared(x), whole(x), shared(x, residual), whole(x) + residual]
    return [*found, shared(given, residual).detach(), found[-1]]


def under_autocast(rank: int, kind: str) -> list[Tensor]:
    """Two layers of float32 under autocast, with and without gradients, whole and shared."""
    peers, found = Peers(), []
    up, down = layer_of(kind, 256, 64, 1, torch.float32), layer_of(kind, 40, 256, 3, torch.float32)
    one = ColumnParallelSparseLinear.from_layer(up, peers)
    other = RowParallelSparseLinear.from_layer(down, peers)
    gathered = ColumnParallelSparseLinear.from_layer(up, peers, gather_output=True)
    for first, second in ((up, down), (one, other)):
        x = integers((3, 64), 5, 0.1).requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16):
            y = second(first(x))
            with torch.no_grad():
                quiet = second(first(x)), (up if first is up else gathered)(x)
        assert {each.dtype for each in (y, *quiet)} == {torch.bfloat16}
        y.sum().backward()
        assert x.grad is not None
        found += [y.detach(), *quiet, x.grad]
    return found


def gradient_of_gradient(rank: int) -> list[BaseException | None]:
    """What stops a gradient of a gradient through each exchange."""
    peers, found = Peers(), []
    up = dense_layer(256, 64, 1, torch.float64).requires_grad_(True)
    down = dense_layer(40, 256, 3, torch.float64).requires_grad_(True)
    column, gathered = (
        ColumnParallelSparseLinear.from_layer(up, peers, gather_output=gather)
        for gather in (False, True)
    )
    row, split = (
        RowParallelSparseLinear.from_layer(down, peers, input_is_split=is_split)
        for is_split in (True, False)
    )
    for chain in (lambda x: row(column(x)), lambda x: split(gathered(x)), gathered):
        x = torch.ones(2, 64, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad(chain(x).pow(2).sum(), x, create_graph=True)
        found.append(raised(lambda grad=grad: grad.sum().backward()))
    return found


def told_apart(rank: int) -> list[BaseException | None]:
    """What ranks are told that make other `Peers`, or one of a group of others; none waits."""
    other = dist.new_group([1])
    found = [
        raised(lambda: Peers(peer_reads=rank == 0)),
        raised(lambda: Peers(capacity_bytes=4096 if rank else 8192)),
        raised(lambda: Peers(other)) if rank == 0 else None,
    ]
    peers = Peers()  # the next ones still meet
    peers._shared = SymmetricMemory(torch.empty(0), (0, 0), rank, 4096, 1000, None)
    peers.device = torch.device("cuda", 0)
    row = RowParallelSparseLinear.from_layer(sparse_layer(8, 128, 1, torch.bfloat16), peers)
    column = ColumnParallelSparseLinear.from_layer(
        sparse_layer(128, 64, 1, torch.bfloat16), peers, gather_output=True
    )
    for layer in (row, column):
        found.append(raised(lambda layer=layer: layer(torch.ones(1, 64, dtype=torch.bfloat16))))
    return found
