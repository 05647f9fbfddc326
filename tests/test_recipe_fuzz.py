"""Whatever the bytes of a recipe file are: a recipe, or one RecipeError."""

import json
import math
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oscar_vllm.recipe import ModelGeometry, OscarRecipe, RecipeError, RecipeMetadata
from oscar_vllm.recipe_format import TENSORS, tensor_shapes

GOLDEN_BYTES = (Path(__file__).parent / "data" / "recipe_v1.safetensors").read_bytes()
HEADER_END = 8 + int.from_bytes(GOLDEN_BYTES[:8], "little")
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load_or_refuse(path: Path, content: bytes) -> None:
    """Nothing but a whole recipe or one sentence may come out."""
    path.write_bytes(content)
    sentence = "Loaded without an error."
    try:
        OscarRecipe.load(path)
    except RecipeError as error:
        sentence = str(error).removeprefix(f"{path}: ")
    assert re.fullmatch(r"[^\n]{20,500}\.", sentence)


def with_header(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + GOLDEN_BYTES[HEADER_END:]


@FUZZ
@given(position=st.integers(0, len(GOLDEN_BYTES) - 1), patch=st.binary(min_size=1, max_size=8))
def test_fuzzed_bytes(tmp_path: Path, position: int, patch: bytes) -> None:
    load_or_refuse(tmp_path / "r", GOLDEN_BYTES[:position] + patch + GOLDEN_BYTES[position + len(patch) :])


def test_a_file_larger_than_any_recipe_is_not_read(tmp_path: Path) -> None:
    """Not a byte of its eight gigabytes is on the disk, and reading it would fill the memory."""
    geometry = ModelGeometry(
        model_type="llama",
        num_layers=1024,
        num_heads=8,
        num_kv_heads=8,
        head_size=256,
        hidden_size=2048,
        rope_type="default",
        rope_theta=1e4,
    )
    header = json.loads(GOLDEN_BYTES[8:HEADER_END])
    header["__metadata__"] |= {"geometry": geometry.model_dump_json(), "geometry_hash": geometry.hash()}
    end = 0
    for name, shape in tensor_shapes(geometry).items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    path = tmp_path / "large"
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(RecipeError, match=r"bytes, more than the 4,294,967,296 of any recipe; make it again"):
        OscarRecipe.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KiB


@pytest.mark.parametrize("size", [2**20 + 1, 2**62], ids=["above the limit", "absurd"])
def test_a_header_larger_than_any_recipes_is_not_parsed(tmp_path: Path, size: int) -> None:
    path = tmp_path / "r"
    with path.open("wb") as stream:
        stream.write(size.to_bytes(8, "little") + b"{")
        stream.truncate(2**22)
    with pytest.raises(RecipeError, match=r"header's length is wrong"):
        OscarRecipe.load(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@FUZZ
@given(name=st.sampled_from([*TENSORS, "__metadata__", "other"]), entry=JSON, offsets=st.lists(st.integers(0, 2**64)))
def test_fuzzed_header(tmp_path: Path, name: str, entry: Any, offsets: list[int]) -> None:
    for forged in (
        entry,
        {"dtype": "F32", "shape": [2, 2], "data_offsets": offsets},
        {"dtype": "F32", "shape": offsets},
    ):
        header = json.loads(GOLDEN_BYTES[8:HEADER_END])
        header[name] = forged
        load_or_refuse(tmp_path / "r", with_header(header))


@FUZZ
@given(field=st.sampled_from([*RecipeMetadata.model_fields, "other"]), value=JSON | st.text())
def test_fuzzed_metadata(tmp_path: Path, field: str, value: Any) -> None:
    header = json.loads(GOLDEN_BYTES[8:HEADER_END])
    header["__metadata__"][field] = value if isinstance(value, str) else json.dumps(value)
    load_or_refuse(tmp_path / "r", with_header(header))


@FUZZ
@given(field=st.sampled_from([*ModelGeometry.model_fields, "other"]), value=JSON)
def test_fuzzed_geometry(tmp_path: Path, field: str, value: Any) -> None:
    header = json.loads(GOLDEN_BYTES[8:HEADER_END])
    geometry = json.loads(header["__metadata__"]["geometry"])
    header["__metadata__"]["geometry"] = json.dumps(geometry | {field: value})
    load_or_refuse(tmp_path / "r", with_header(header))
