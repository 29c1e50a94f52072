"""Gradients of attend_prefill in float64, and what those of a kernel may be off by."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hopsparse.measure.gradient_error import Scored, attention_gradient, when_stored
from hopsparse.ops import attend_prefill
from tests.helpers.prefill import Problem, seen_by

Given = tuple[Tensor, Tensor]
Found = tuple[Tensor, Tensor, Tensor]


def random_given(p: Problem) -> Given:
    """Gradients of the output, in its dtype, and of the LSE; queries without keys have none."""
    return torch.randn(p.q.shape).to(p.q.dtype), torch.randn(p.q.shape[:2])


def gradients(p: Problem, given: Given) -> tuple[Problem, Found]:
    """Of q, keys and values by autograd, where p lies; and p with what was attended."""
    leaves = [
        each.detach().clone().requires_grad_() for each in (p.q, p.cache.keys, p.cache.values)
    ]
    cache = replace(p.cache, keys=leaves[1], values=leaves[2])
    results = attend_prefill(leaves[0], p.starts, cache, *p.lists, block=p.block)
    found = torch.autograd.grad(results, leaves, [each.to(p.q.device) for each in given])
    return p, (found[0], found[1], found[2])


def exact_gradients(p: Problem, given: Given) -> tuple[Found, Found]:
    """Gradients of q and of the pools in float64, and the largest errors before they are stored.

    `p.sequences` are what its table names, on the CPU.
    """
    tokens, heads, dim = p.q.shape
    group = heads // p.cache.kv_heads
    size = p.cache.keys.shape
    exact = [torch.zeros(each, dtype=torch.float64) for each in (p.q.shape, size, size)]
    error = [each.clone() for each in exact]
    terms = tokens * group + max(int(keys.shape[1]) for keys, _ in p.sequences)
    for b, (keys, values) in enumerate(p.sequences):
        rows = slice(int(p.starts[b]), int(p.starts[b + 1]))
        token = torch.arange(keys.shape[1])
        pages = p.cache.table[b].long()[token // p.cache.page] if keys.shape[1] else token
        for head in range(heads if rows.stop > rows.start else 0):
            kv = head // group
            case = Scored(
                p.q[rows, head].double(),
                keys[kv].double(),
                values[kv].double(),
                seen_by(p, b, head),
                dim**-0.5,
            )
            own = (given[0][rows, head].double(), given[1][rows, head].double())
            for total, parts in zip(
                (exact, error), attention_gradient(case, *own, p.q.dtype, terms), strict=True
            ):
                total[0][rows, head] = parts[0]
                for pool, part in zip(total[1:], parts[1:], strict=True):
                    at = (pages, torch.full_like(pages, kv), token % p.cache.page)
                    pool.index_put_(at, part, accumulate=True)
    return (exact[0], exact[1], exact[2]), (error[0], error[1], error[2])


def assert_gradients(p: Problem, given: Given, found: Found) -> None:
    """All entries are within their bound, and those that nobody reads are zeros."""
    exact, error = exact_gradients(p, given)
    for name, mine, right, off in zip(("q", "keys", "values"), found, exact, error, strict=True):
        assert mine.dtype == p.q.dtype
        assert mine.is_contiguous()
        got = mine.cpu().double()
        bound = when_stored(right, off, p.q.dtype)
        assert ((got - right).abs() <= bound).all(), (name, ((got - right).abs() / bound).max())
        assert (got[(right == 0) & (off == 0)] == 0).all(), name
