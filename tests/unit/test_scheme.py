import itertools

import pytest

from hopsparse import ArgumentError
from hopsparse.formats import Form, Scheme, parse_form, parse_pattern, parse_scheme
from hopsparse.formats.scheme import ACTIVATIONS, GROUPS, WEIGHTS

SCHEMES = [
    Scheme(weights, group, activations, static)
    for weights, group, activations, static in itertools.product(
        WEIGHTS, GROUPS, ACTIVATIONS, (False, True)
    )
    if not (static and activations == "none")
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_every_scheme_survives_its_own_text(scheme: Scheme) -> None:
    assert parse_scheme(str(scheme)) == scheme


def test_texts_of_schemes_differ() -> None:
    assert len({str(scheme) for scheme in SCHEMES}) == len(SCHEMES)


@pytest.mark.parametrize("pattern", [None, "2:4", "6:8", "unstructured:0.5", "block:16x32:0.25"])
@pytest.mark.parametrize("scheme", [None, "int8", "fp8/int4", "int4:32"])
def test_every_form_survives_its_own_text(pattern: str | None, scheme: str | None) -> None:
    form = Form(pattern and parse_pattern(pattern), scheme and parse_scheme(scheme))
    assert parse_form(str(form)) == form


@pytest.mark.parametrize(
    "text",
    ["", "int8:", "int8/", "int5", "int8:7", "int8/bf16", "int8/none:static", "fp8/fp8:dynamic"],
)
def test_what_is_no_scheme_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_scheme(text)


@pytest.mark.parametrize("text", ["", "+int8", "2:4+", "dense+dense", "2:4+int8+int8"])
def test_what_is_no_form_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        parse_form(text)
