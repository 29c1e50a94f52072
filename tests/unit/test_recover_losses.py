from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hopsparse.errors import ArgumentError
from hopsparse.measure.error import gamma
from hopsparse.recover import RecoverOptions, cache_bytes, open_machine, windows
from hopsparse.recover.capture import Head, Layout, UpToHead
from hopsparse.recover.logit_loss import FromHidden, FromTop, logit_loss
from hopsparse.recover.objectives import stream_distance
from hopsparse.recover.teacher import Cached, Live
from tests.helpers.tiny_recover import (
    LAYOUT,
    OPTIONS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    corpus,
    dense_weights,
    run,
    teacher_and_student,
)

POSITIONS, VOCAB = 7, 11


def numbers() -> tuple[Tensor, Head, Tensor, Head, Tensor]:
    """Student and teacher in float64, with heads of their own and a bias."""
    made = [torch.randn(POSITIONS, 5, dtype=torch.float64) for _ in range(2)]
    heads = [
        Head(torch.randn(VOCAB, 5, dtype=torch.float64), torch.randn(VOCAB, dtype=torch.float64))
        for _ in range(2)
    ]
    return made[0], heads[0], made[1], heads[1], torch.randint(VOCAB, (POSITIONS,))


def by_definition(hidden: Tensor, head: Head, target: Tensor, following: Tensor) -> Tensor:
    log_q = head(hidden).log_softmax(-1)
    kl = F.kl_div(log_q, target, reduction="sum", log_target=True)
    return (0.7 * kl + 0.3 * F.nll_loss(log_q, following, reduction="sum")) / POSITIONS


@pytest.mark.parametrize("chunk", [1, 3, POSITIONS])
def test_loss_and_gradient_are_those_of_the_definition(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hopsparse.recover.logit_loss._CHUNK_ENTRIES", chunk * VOCAB)
    mine, head, theirs, teacher, following = numbers()
    mine.requires_grad_(True)
    expected = by_definition(mine, head, teacher(theirs).log_softmax(-1), following)
    (slope,) = torch.autograd.grad(3 * expected, mine)
    loss = logit_loss(mine, head, FromHidden(theirs, teacher), following, 0.7, 0.3)
    (found,) = torch.autograd.grad(3 * loss, mine)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, slope)


@pytest.mark.parametrize("top", [1, 4, VOCAB - 1])
def test_gradient_with_a_remainder(top: int) -> None:
    mine, head, theirs, teacher, following = numbers()
    target = FromTop.of(theirs, teacher, top)
    assert torch.autograd.gradcheck(
        lambda hidden: logit_loss(hidden, head, target, following, 0.7, 0.3),
        mine.requires_grad_(True),
    )


def test_remainder_is_one_more_event() -> None:
    mine, head, theirs, teacher, following = numbers()
    log_q, p = head(mine).log_softmax(-1), teacher(theirs).softmax(-1)
    expected = 0.0
    for row in range(POSITIONS):
        order = p[row].argsort(descending=True)
        kept, others = order[:4], order[4:]
        expected += float((p[row][kept] * (p[row][kept].log() - log_q[row][kept])).sum())
        rest = p[row][others].sum()
        expected += float(rest * (rest.log() - log_q[row][others].exp().sum().log()))
    target = FromTop.of(theirs, teacher, 4)
    found = float(logit_loss(mine, head, target, following, 1.0, 0.0))
    assert found == pytest.approx(expected / POSITIONS, rel=1e-12)
    whole = float(logit_loss(mine, head, FromHidden(theirs, teacher), following, 1.0, 0.0))
    assert found < whole


def test_all_tokens_kept_is_the_whole_distribution_bit_by_bit() -> None:
    mine, head, theirs, teacher, following = numbers()
    mine.requires_grad_(True)
    found = []
    for target in (FromHidden(theirs, teacher), FromTop.of(theirs, teacher, 10**6)):
        loss = logit_loss(mine, head, target, following, 1.0, 0.0)
        found.append((loss.detach(), torch.autograd.grad(loss, mine)[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_teacher_that_is_sure_leaves_no_nan() -> None:
    """A remainder of exactly zero in fewer tokens than the vocabulary has."""
    head = Head(torch.eye(4) * 1000, None)
    hidden = torch.eye(4)[:2].requires_grad_(True)
    target = FromTop.of(hidden.detach(), head, 2)
    assert float(target.rest.sum()) == 0
    loss = logit_loss(hidden, head, target, torch.zeros(2, dtype=torch.int64), 1.0, 0.0)
    loss.backward()
    assert float(loss.detach()) == 0
    assert bool(hidden.grad.isfinite().all())  # type: ignore[union-attr]


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_training_with_a_whole_cache_is_training_without(one_thread: None) -> None:
    """On one thread: several divide rows between them, and a cache is made of other numbers of
    rows than a step has.
    """
    found = []
    for cached in (False, True):
        teacher, student = teacher_and_student()
        made = run(
            student,
            teacher,
            batch_windows=1,
            cache_teacher=cached,
            cache_top=VOCABULARY,
            position_fraction=0.5,
            hidden=0.5,
            cross_entropy=0.1,
        )
        found.append((made.trajectory.curve, dense_weights(student)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(weight, found[1][1][name]) for name, weight in found[0][1].items())


def test_bytes_of_the_cache_are_those_promised() -> None:
    teacher, _ = teacher_and_student()
    options = replace(OPTIONS, hidden=1.0, cache_top=3)
    with open_machine(options) as machine:
        live = Live.of(teacher, LAYOUT, corpus(), options, machine)
        kept = Cached(live, range(7), options)
        assert kept.nbytes == cache_bytes(7, TOKENS, 3, WIDTH, 2)
        limited = replace(options, cache_limit=kept.nbytes - 1)
        with pytest.raises(ArgumentError, match="a cache of the teacher of 12.9 kB for 7 windows"):
            Cached(live, range(7), limited)


def test_a_made_teacher_is_dropped_when_the_cache_is_full() -> None:
    import gc
    import weakref

    teacher, student = teacher_and_student()
    alive = [weakref.ref(teacher)]
    box = [teacher]
    del teacher
    seen: list[bool] = []

    def tell(*_: object) -> None:
        gc.collect()
        seen.append(alive[0]() is None)

    run(student, box.pop, cache_teacher=True, steps=1, tell=tell)
    assert seen == [True]


def test_hidden_distance_weighs_tokens_equally() -> None:
    theirs = torch.tensor([[[100.0, 0.0], [0.0, 1.0]]])
    mine = torch.tensor([[[100.0, 0.0], [0.0, 2.0]]])
    assert float(stream_distance(mine, theirs)) == 0.5


def test_the_head_sees_no_token_and_streams_are_those_of_the_model() -> None:
    teacher, _ = teacher_and_student()
    ids = corpus().batch([0, 1, 6])
    streams = UpToHead(teacher, "head", LAYOUT.blocks)(ids)
    assert torch.equal(teacher.head(streams.last), teacher(ids))
    first = teacher.get_submodule("blocks.0")(teacher.embedding(ids))
    assert torch.equal(streams.hidden[0], first)
    assert [tuple(each.shape) for each in streams.hidden] == [(3, TOKENS, WIDTH)] * 2


def test_layouts_that_do_not_fit() -> None:
    teacher, student = teacher_and_student()
    with pytest.raises(ArgumentError, match="no module 'lm_head' in a TinyModel"):
        Head.of(teacher, Layout((), "lm_head"))
    with pytest.raises(ArgumentError, match="a Block at 'blocks.0' as the head"):
        Head.of(teacher, Layout((), "blocks.0"))
    teacher.add_module("spare", torch.nn.Identity())
    with pytest.raises(ArgumentError, match="called its head 1 times and 1 of 2 blocks"):
        UpToHead(teacher, "head", ("blocks.0", "spare"))(corpus().batch([0]))
    with pytest.raises(ArgumentError, match="hidden_blocks with 2 in a model of 2 blocks"):
        run(student, teacher, hidden=1.0, hidden_blocks=(2,))
    assert LAYOUT.chosen((-1, 1)) == ("blocks.1",)


def test_order_depends_on_seed_and_step_alone() -> None:
    options = RecoverOptions(batch_windows=4, seed=3)
    steps = [windows.step_windows(step, 6, options) for step in range(3)]
    # Two passes over six windows.
    assert sorted(steps[0] + steps[1] + steps[2]) == sorted(list(range(6)) * 2)
    assert sorted(steps[0] + steps[1][:2]) == list(range(6))
    assert steps[2] == windows.step_windows(2, 6, options)
    assert steps != [windows.step_windows(s, 6, replace(options, seed=4)) for s in range(3)]


def test_processes_share_a_step_without_overlap() -> None:
    options = RecoverOptions(batch_windows=8, accumulation=2)
    whole = windows.step_windows(5, 100, options)
    found: dict[int, int] = {}
    for rank in range(2):
        parts = windows.step_parts(5, 100, options, rank, 2)
        assert [len(part.slots) for part in parts] == [2, 2]
        for part in parts:
            found |= dict(zip(part.slots, part.indices, strict=True))
    assert [found[slot] for slot in range(8)] == whole
    with pytest.raises(ArgumentError, match=r"8 windows a step for 3 processes.*batch_windows=12"):
        windows.check_split(options, 3)


def test_positions_are_drawn_for_a_place_in_the_batch() -> None:
    options = RecoverOptions(position_fraction=0.25)
    both = windows.drawn_positions(3, [0, 1], 33, options)
    alone = windows.drawn_positions(3, [1], 33, options)
    assert both is not None
    assert alone is not None
    assert torch.equal(both[1], alone[0])
    assert not torch.equal(both[0], both[1])
    assert len(alone[0]) == 8
    assert int(alone[0].max()) < 32
    assert windows.drawn_positions(3, [0], 33, RecoverOptions()) is None


def test_accumulated_parts_have_the_gradient_of_the_whole_step() -> None:
    """One step of plain descent, whole and in two parts, to the rounding of their sums."""
    moved = []
    for accumulation in (1, 2):
        teacher, student = teacher_and_student()
        before = dense_weights(student)["blocks.1.down"]
        run(
            student,
            teacher,
            windows=corpus(held_out=0),
            steps=1,
            lr=1.0,
            clip=0.0,
            accumulation=accumulation,
            make_optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0),
        )
        moved.append(before.double() - dense_weights(student)["blocks.1.down"].double())
    # Each gradient sums one product a token and a few dozen roundings on the way there.
    bound = gamma(2 * TOKENS * (VOCABULARY + 6 * WIDTH), torch.float32)
    scale = float(moved[0].abs().max())
    assert scale > 0
    assert float((moved[0] - moved[1]).abs().max()) <= bound * scale
