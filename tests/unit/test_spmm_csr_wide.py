"""Many tokens by packed weights: the text of the kernels on the CPU, tiles, and what is chosen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hopsparse.compiler.wgmma_dense import dense_product
from hopsparse.errors import ArgumentError
from hopsparse.formats import CSR
from hopsparse.ops.spmm_csr import device, dispatch, op, wide_device
from hopsparse.ops.spmm_csr.ahead import prepare
from hopsparse.ops.spmm_csr.packed import Packed, pack
from hopsparse.ops.spmm_csr.plan import every_spec
from hopsparse.ops.spmm_csr.tiles import ROOMS
from hopsparse.ops.spmm_csr.wide import (
    CANDIDATES,
    PIECE_COLUMNS,
    Config,
    arrange_spec,
    wide_spec,
    wide_specs,
)
from hopsparse.ops.spmm_csr.wide_cost import choose, predict
from tests.helpers.tile_walk import A_AT
from tests.helpers.wide_on_cpu import Run, compiled

# A tile of each kind: one way, two, parts of k, tokens that are shared, and all of it.
RUN = (
    *(Config(32, 1, 1), Config(16, 2, 1), Config(16, 1, 2), Config(16, 1, 4)),
    *(Config(32, 1, 1, 2), Config(16, 2, 2, 2)),
)
SHAPE = (8192, 8192)


def weight(rows: int, k: int, density: float) -> Tensor:
    dense = torch.randint(-2, 3, (rows, k)).bfloat16()
    return dense * (torch.rand(rows, k) < density)


def packed(dense: Tensor) -> Packed:
    w = CSR.from_dense(dense)
    found = pack(w.indptr, w.indices, w.values, w.shape[1])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[Config, Run]:
    folder = tmp_path_factory.mktemp("wide")
    return {config: compiled(folder, config) for config in RUN}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", RUN, ids=lambda config: config.name)
@pytest.mark.parametrize(
    ("tokens", "rows", "k"),
    [(33, 128, 448), (16, 200, 64), (7, 70, 130), (37, 5, 333), (20, 192, 577)],
)
def test_the_text_of_the_kernel_multiplies(
    tokens: int, rows: int, k: int, config: Config, kernels: dict[Config, Run]
) -> None:
    torch.manual_seed(tokens)
    dense = weight(rows, k, 0.25)
    dense[:, 64:128] = 0  # a column of units without values
    x = torch.randint(-2, 3, (tokens, k)).bfloat16()
    bias = torch.randint(-4, 5, (rows,)).bfloat16()
    for added in (bias, None):
        want = x.float() @ dense.float().T + (0 if added is None else added.float())
        assert torch.equal(kernels[config](packed(dense), x, added), want.bfloat16())


@pytest.mark.timeout(600)
def test_full_units_have_the_largest_room(tmp_path: Path) -> None:
    dense = weight(130, 200, 1.0)
    dense[:64, :64] = 1
    run = compiled(tmp_path, RUN[0], room=4096)
    x = torch.randint(-2, 3, (40, 200)).bfloat16()
    assert torch.equal(run(packed(dense), x, None), (x.float() @ dense.float().T).bfloat16())


@pytest.mark.timeout(600)
def test_tokens_of_any_strides_are_laid(kernels: dict[Config, Run]) -> None:
    dense = weight(64, 72, 0.25)
    whole = torch.randint(-2, 3, (40, 160)).bfloat16()
    odd = torch.randint(-2, 3, (9 * 72 + 1,)).bfloat16()[1:].view(9, 72)
    for x in (whole[:, :72], whole[::2, 8:80], whole[:, 1:73], whole[:1, :72].expand(5, 72), odd):
        got = kernels[RUN[0]](packed(dense), x, None)
        assert torch.equal(got, (x.float() @ dense.float().T).bfloat16())


def test_pieces_are_laid_in_the_order_of_lanes() -> None:
    """The columns that follow each other, by where wgmma takes those of a lane from."""
    order = [0] * PIECE_COLUMNS
    for lane in range(4):
        for entry, (_, col) in enumerate(A_AT):
            # Of a lane's four columns, as packed.py has them: entries 0, 1, 4, 5 of its first row.
            if entry % 4 < 2:
                order[int(col[lane])] = 4 * lane + entry // 4 * 2 + entry % 2
    pairs = [order[2 * i] // 2 for i in range(8)]
    assert order == [2 * pair + i for pair in pairs for i in (0, 1)]
    assert pairs == [0, 2, 4, 6, 1, 3, 5, 7]


def test_names_and_shared_memory() -> None:
    specs = wide_specs()
    assert len({spec.name for spec in specs}) == len(specs) == 1 + 16 * 2 * 3
    assert set(specs) <= set(every_spec())
    for config in CANDIDATES:
        for room in ROOMS:
            spec = wide_spec(config, "float16", room)
            assert spec.smem_bytes <= 227 * 1024
            assert config.stages(room) >= 2
            assert spec.pdl
    # It waits for nothing: what comes behind it must not start before what came before it ended.
    assert not arrange_spec().pdl


@pytest.mark.parametrize("wrong", [(24, 1, 1), (272, 1, 1), (128, 2, 1), (64, 1, 3), (64, 0, 1)])
def test_tiles_that_do_not_exist_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ArgumentError):
        Config(*wrong)


def test_kernels_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ArgumentError, match="float32"):
        wide_spec(CANDIDATES[0], "float32", 1024)


def test_every_unit_is_in_a_step_of_a_part() -> None:
    for config in CANDIDATES:
        for units in (1, 2, 3, 63, 64, 65, 448):
            steps = config.steps(units)
            assert steps % 2 == 0
            assert steps * config.ways * config.parts >= units
            assert (steps - 2) * config.ways * config.parts < units


def test_a_product_in_registers_has_no_transposed_operand() -> None:
    text = dense_product("f16", 64, registers=True)
    assert "const u32 (&a)[4][4], const u64 (&b)[4]" in text
    assert text.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16") == 4
    assert text.count(", add, 1, 1, 0;") == 4


def test_what_is_chosen() -> None:
    for tokens in (33, 64, 65, 100, 200, 256, 300, 512):
        found = choose(SHAPE, tokens, 20_000_000, 132)
        assert found.us == min(
            predict(config, SHAPE, tokens, 20_000_000, 132).us for config in CANDIDATES
        )
        assert found.us > max(found.products_us, found.unpacking_us, found.bytes_us)
    # Few rows leave SMs idle, so that parts of k, or fewer tokens a block, share them.
    assert choose((1024, 8192), 256, 5_000_000, 132).config.parts == 4
    assert choose((16384, 4096), 64, 39_600_000, 132).config.tokens == 64


def test_who_multiplies_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(device, "multiply_tiles", lambda w, x, bias: asked.append("tiles"))
    monkeypatch.setattr(wide_device, "multiply_wide", lambda w, x, bias: asked.append("wide"))
    w = packed(weight(64, 64, 0.5))
    for tokens in (1, 32, 33, 512):
        dispatch._multiply_packed(w, torch.zeros(tokens, 64), None)
    assert asked == ["tiles", "tiles", "wide", "wide"]


def test_plans_say_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU of 132 SMs."""
    monkeypatch.setattr(op, "device_facts", lambda device: SimpleNamespace(sm_count=132))
    monkeypatch.setattr(op, "_gathers", lambda w, x: True)
    w = CSR.from_dense(weight(200, 320, 0.2))
    x = torch.zeros(512, 320).bfloat16()
    said = op.plan(w, x[:33]).why
    assert said.startswith("wide bfloat16, predicted to be faster than gathers; w is packed at")
    made = dispatch.packed_of(w.indptr, w.indices, w.values, 320)
    assert made is not None
    for tokens in (33, 300):
        found = choose((200, 320), tokens, made.nbytes, 132)
        name = wide_spec(found.config, "bfloat16", 1024).name
        said = op.plan(w, x[:tokens]).why
        assert said.startswith(f"{name}, predicted to take {found.us:.0f} us; w is packed once")
    assert op.plan(w, x[:32]).why.startswith("tiles bfloat16, 32 tokens")


def test_nothing_is_prepared_on_the_cpu() -> None:
    assert not prepare(CSR.from_dense(weight(64, 64, 0.5)), 100)
