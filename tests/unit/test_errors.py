from __future__ import annotations

import pickle

import pytest

import hopsparse
from hopsparse import errors

KINDS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.HopsparseError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_message_has_three_parts(kind: type[errors.HopsparseError]) -> None:
    error = kind("a 3-D tensor", need="a matrix", hint="x.flatten(1)")
    assert str(error) == "a 3-D tensor. Required: a matrix. Try: x.flatten(1)."


@pytest.mark.parametrize("kind", KINDS)
def test_error_crosses_a_process_boundary(kind: type[errors.HopsparseError]) -> None:
    error = pickle.loads(pickle.dumps(kind("a", need="b", hint="c")))
    assert type(error) is kind
    assert (error.got, error.need, error.hint) == ("a", "b", "c")


def test_tree_at_the_top_of_the_file_names_every_error() -> None:
    assert all(kind.__name__ in (errors.__doc__ or "") for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_is_a_public_name(kind: type[errors.HopsparseError]) -> None:
    assert getattr(hopsparse, kind.__name__) is kind
