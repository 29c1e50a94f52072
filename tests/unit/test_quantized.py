"""Weights of 8 and 4 bits: exact codes, every format under every scheme, and damage found."""

from __future__ import annotations

import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hopsparse.errors import ArgumentError, CheckpointError, FormatError
from hopsparse.formats import (
    FORMATS,
    BlockPattern,
    Form,
    MatrixFacts,
    Quantized,
    Scheme,
    convert,
    parse_form,
    parse_scheme,
    read_matrices,
    restore_matrix,
    storage_for,
    write_matrices,
)
from hopsparse.formats.quantized import pack_nibbles, unpack_nibbles
from hopsparse.prune import magnitude
from hopsparse.quant import (
    expand_scales,
    quantize_matrix,
    round_weight,
    scale_dtype,
    to_codes,
    weight_scales,
)

SCHEMES = ("int8", "int8:64", "fp8", "fp8:32", "int4", "int4:32/int4", "int4:0/fp8")
PATTERNS = ("2:4", "6:8", "1:4", "4:8", "unstructured:0.5", "block:16x16", "dense")
DOCS = Path(__file__).parents[2] / "docs"
SHAPES = ((64, 64), (1, 40), (3, 100), (70, 33))


def random_weight(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def pruned(shape: tuple[int, int], form: str) -> Tensor:
    pattern = parse_form(form).pattern
    weight = random_weight(shape)
    return weight if pattern is None else magnitude(weight, pattern)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_small_integers_have_themselves_as_codes() -> None:
    """Scales of 1 and 1/2, as the largest entries of the rows are 127 and 63.5."""
    weight = torch.tensor([[127.0, 0.0, -3.0, 0.0], [0.0, 63.5, 0.0, 2.0]])
    matrix = quantize_matrix(weight, "2:4+int8")
    assert matrix.scales.tolist() == [[1.0], [0.5]]
    assert matrix.codes().to_dense().tolist() == [[127, 0, -3, 0], [0, 127, 0, 4]]
    assert torch.equal(matrix.to_dense(), weight)
    four = quantize_matrix(torch.tensor([[7.0, -8.0, 1.0]]), "dense+int4:32", torch.ones(1, 1))
    assert four.codes().to_dense().tolist() == [[7, -8, 1]]
    assert four.tensors["values"].tolist() == [0x87, 0x01]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_weight_on_the_grid_is_reproduced_exactly(
    shape: tuple[int, int], pattern: str, scheme: str
) -> None:
    if pattern == "block:16x16" and shape[0] < 16:
        shape = (33, 100)
    kind, weight = parse_scheme(scheme), pruned(shape, pattern)
    scales = weight_scales(weight, kind)
    rounded = round_weight(weight, kind, scales)
    matrix = quantize_matrix(rounded, f"{pattern}+{scheme}", scales)
    matrix.validate()
    assert torch.equal(bits(matrix.to_dense()), bits(rounded))
    codes = matrix.codes().to_dense().float()
    assert torch.equal(codes, to_codes(weight, expand_scales(scales, shape[1], kind), kind.weights))
    assert matrix.nnz == int((rounded != 0).sum())
    # Rounding the grid to 16 bits moves no number as far as half a step.
    for dtype in (torch.bfloat16, torch.float16):
        again = quantize_matrix(rounded.to(dtype), f"{pattern}+{scheme}", scales)
        assert torch.equal(bits(again.codes().to_dense()), bits(matrix.codes().to_dense()))
        assert again.to_dense().dtype == dtype
        assert torch.equal(again.to_dense(torch.float32), rounded)


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4:32"])
@pytest.mark.parametrize("fmt", sorted(FORMATS))
def test_every_format_holds_the_same_codes(fmt: str, scheme: str, tmp_path: Path) -> None:
    weight = pruned((33, 72), "2:4")
    matrix = quantize_matrix(weight, f"2:4+{scheme}", dtype=torch.bfloat16)
    there = convert(matrix, fmt)
    assert isinstance(there, Quantized)
    assert (there.codes_format, str(there.scheme)) == (fmt, scheme)
    assert there.dtype == torch.bfloat16
    there.validate()
    assert torch.equal(there.to_dense(torch.float32), matrix.to_dense(torch.float32))
    path = tmp_path / "w.safetensors"
    write_matrices(path, {"w": there})
    read = read_matrices(path, validate=True)["w"]
    assert repr(read) == repr(there)
    assert torch.equal(bits(read.to_dense()), bits(there.to_dense()))
    assert list(read.parts()) == list(MatrixFacts.of(there).part_specs())
    assert convert(convert(there, "nm"), fmt).nbytes == there.nbytes


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n", [2, 1])
def test_every_group_is_still_2_of_4(scheme: str, n: int) -> None:
    """Rounding makes zeros, never new entries; a group that rounds to zero is fine."""
    weight = pruned((64, 96), f"{n}:4")
    weight[:, :32] *= 1e-6
    matrix = quantize_matrix(weight, f"{n}:4+{scheme}")
    dense = matrix.to_dense()
    assert not bool(dense[weight == 0].any())
    assert int((dense != 0).view(64, -1, 4).sum(-1).max()) <= n


@pytest.mark.parametrize("scheme", ["int8", "fp8", "int4"])
def test_zero_rows_and_negative_zero(scheme: str) -> None:
    weight = random_weight((4, 8))
    weight[1] = 0.0
    weight[2] = -0.0
    matrix = quantize_matrix(weight, f"dense+{scheme}")
    assert matrix.scales[1:3].float().tolist() == [[1.0], [1.0]]
    assert not bits(matrix.to_dense()[1:3]).any()
    assert not bits(matrix.codes().to_dense()[1:3]).any()


def test_rounding_to_minus_zero_gives_plus_zero() -> None:
    weight = torch.tensor([[448.0, -1e-9], [7.0, -1e-9]])
    for scheme in ("int8", "fp8", "int4"):
        assert not bits(quantize_matrix(weight, f"dense+{scheme}").to_dense()[:, 1]).any()


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (3, 5), (0,)])
def test_nibbles_pack_low_first_and_come_back(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert packed.shape == (-(-codes.numel() // 2),)
    assert torch.equal(unpack_nibbles(packed, shape), codes)
    for index, byte in enumerate(packed.tolist()):
        pair = codes.flatten().tolist()[2 * index : 2 * index + 2]
        assert byte == sum((code & 15) << (4 * place) for place, code in enumerate(pair))


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_documented_decoder_reads_what_is_packed(count: int) -> None:
    text = (DOCS / "formats.md").read_text()
    found = re.search(r"```python\n(def int4_codes.*?)```", text, re.DOTALL)
    assert found is not None
    namespace: dict[str, object] = {"np": np}
    exec(found[1], namespace)
    codes = torch.arange(-8, 8, dtype=torch.int8)[-count:] - 3
    decoded = namespace["int4_codes"](pack_nibbles(codes).numpy(), count)  # type: ignore[operator]
    assert decoded.tolist() == codes.tolist()


def bits_a_weight(form: Form, side: int = 4096) -> float:
    """From facts alone, with half of what `Unstructured` and blocks keep."""
    pattern, shape = form.pattern, (side, side)
    fmt = "dense" if pattern is None else storage_for(pattern, shape)
    attributes: dict[str, int | str] = {"pattern": str(pattern)} if fmt == "nm" else {}
    if fmt == "bitmask":
        attributes = {"nnz": side * side // 2}
    if isinstance(pattern, BlockPattern):
        attributes = {"block": "32x32", "blocks": side * side // 32 // 32 // 2}
    facts = MatrixFacts(fmt, shape, "bfloat16", attributes)
    if form.scheme is not None:
        own = {"codes": fmt, "scheme": str(form.scheme), "dtype": "bfloat16"}
        facts = MatrixFacts("quantized", shape, "bfloat16", own | attributes)
    stored = sum(prod(size) * dtype.itemsize for size, dtype in facts.part_specs().values())
    return 8 * stored / side**2


def test_the_documented_bits_are_those_of_the_parts() -> None:
    rows = re.findall(
        r"^\| `(\S+)` \| `(\w+)` \|((?: [\d.]+ \|)+)$", (DOCS / "quant.md").read_text(), re.M
    )
    assert len(rows) == 7
    for pattern, fmt, cells in rows:
        value = parse_form(pattern).pattern
        assert fmt == ("dense" if value is None else storage_for(value, (4096, 4096)))
        for scheme, said in zip(
            ("", "+int8", "+int4:128", "+int4:64", "+int4:32"), cells.split("|")[:-1], strict=True
        ):
            assert f"{bits_a_weight(parse_form(pattern + scheme)):.2f}" == said.strip()


def test_scales_are_stored_in_the_dtype_of_the_scheme() -> None:
    weight = random_weight((6, 100))
    for text, groups in (("int8", 1), ("int4:32", 4), ("fp8:64", 2)):
        scheme = parse_scheme(text)
        scales = quantize_matrix(weight, f"dense+{text}").scales
        assert (scales.shape, scales.dtype) == ((6, groups), scale_dtype(scheme))


def test_facts_tell_all_parts_before_anything_is_read() -> None:
    matrix = quantize_matrix(
        pruned((8, 64), "2:4"),
        "2:4+int4:32/int8:static",
        dtype=torch.bfloat16,
        input_scale=torch.tensor([0.25]),
    )
    facts = MatrixFacts.of(matrix)
    assert facts.to_json() == {
        "format": "quantized",
        "shape": [8, 64],
        "dtype": "bfloat16",
        "attributes": {
            "codes": "nm",
            "scheme": "int4:32/int8:static",
            "dtype": "bfloat16",
            "pattern": "2:4",
        },
    }
    specs = {name: (tuple(part.shape), part.dtype) for name, part in matrix.parts().items()}
    assert facts.part_specs() == specs
    assert facts.parts == ("values", "meta", "scales", "input_scale")
    assert (facts.stored_as, facts.scheme, facts.values_part) == (
        "nm",
        str(matrix.scheme),
        "values",
    )
    assert matrix.nbytes == sum(part.nbytes for part in matrix.parts().values())
    parts = dict(reversed(matrix.parts().items()))
    assert repr(restore_matrix(facts.to_json(), parts)) == repr(matrix)


def quantized(scheme: str = "int8") -> Quantized:
    return quantize_matrix(pruned((5, 9), "unstructured:0.5"), f"dense+{scheme}")


@pytest.mark.parametrize(
    ("scheme", "part", "value", "said"),
    [
        ("int8", "scales", 0.0, r"scales\[0, 0\] is 0.0"),
        ("int8", "scales", float("nan"), r"scales\[0, 0\] is nan"),
        ("int8", "scales", -1.0, r"scales\[0, 0\] is -1.0"),
        ("fp8", "values", float("nan"), "NaN among the values"),
    ],
)
def test_damaged_contents_are_named(scheme: str, part: str, value: float, said: str) -> None:
    matrix = quantized(scheme)
    matrix.tensors[part].view(-1)[0] = value
    with pytest.raises(FormatError, match=said):
        matrix.validate()


def test_bits_past_the_last_code_are_refused() -> None:
    matrix = quantized("int4")
    matrix.tensors["values"][-1] |= 0x10
    with pytest.raises(FormatError, match="the last byte of the values"):
        matrix.validate()


@pytest.mark.parametrize(
    "change",
    [
        {"codes": "quantized"},
        {"codes": 3},
        {"dtype": "int8"},
        {"dtype": "float32"},
        {"scheme": "int9"},
        {"scheme": "int8:static"},
        {"scheme": "int8/int8:static"},
    ],
    ids=str,
)
def test_facts_that_describe_no_quantized_matrix(change: dict[str, str | int]) -> None:
    matrix = quantize_matrix(random_weight((4, 8)), "dense+int8", dtype=torch.bfloat16)
    facts = MatrixFacts.of(matrix).to_json()
    facts["attributes"] |= change
    with pytest.raises((FormatError, ArgumentError)):
        restore_matrix(facts, matrix.parts())


def test_a_file_with_a_part_missing(tmp_path: Path) -> None:
    path, matrix = tmp_path / "w.safetensors", quantized()
    write_matrices(path, {"w": matrix.with_parts({"values": matrix.tensors["values"]})})
    with pytest.raises(CheckpointError, match="part 'scales' of the quantized matrix is missing"):
        read_matrices(path)


def test_what_cannot_be_quantised() -> None:
    weight = random_weight((4, 8))
    with pytest.raises(ArgumentError, match="form 2:4"):
        quantize_matrix(weight, "2:4")
    with pytest.raises(ArgumentError, match=r"torch.int8 \[4, 8\]"):
        quantize_matrix(weight.to(torch.int8), "dense+int8")
    with pytest.raises(ArgumentError, match="a weight of"):
        quantize_matrix(weight[0], "dense+int8")
    with pytest.raises(FormatError, match="nan at row 1, column 2"):
        quantize_matrix(
            weight.index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(torch.nan)),
            "dense+fp8",
        )
    with pytest.raises(FormatError, match="row 0, group 0"):
        quantize_matrix(torch.ones(4, 8), "2:4+int8")
    for scales in (torch.ones(4, 2), torch.ones(3, 1), torch.ones(4)):
        with pytest.raises(ArgumentError, match="scales of"):
            quantize_matrix(weight, "dense+int8", scales)
    for text in ("int8:static", "int4:48", "int5", "int8/"):
        with pytest.raises(ArgumentError):
            quantize_matrix(weight, f"dense+{text}")
    with pytest.raises(FormatError, match="no input scale"):
        quantize_matrix(weight, "dense+int8/int8:static")
    with pytest.raises(FormatError, match="an input scale"):
        quantize_matrix(weight, "dense+int8", input_scale=torch.ones(1))
    with pytest.raises(ArgumentError, match="without a scheme"):
        Quantized.from_dense(weight)
    with pytest.raises(FormatError, match="codes of torch.float32 under int8"):
        Quantized.of(
            FORMATS["csr"].from_dense(weight), torch.ones(4, 1), Scheme("int8"), weight.dtype
        )
