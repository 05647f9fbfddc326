"""Whatever the bytes of a recipe file are: a recipe, or one RecipeError."""

import json
import re
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oscar_vllm.recipe import ModelGeometry, OscarRecipe, RecipeError, RecipeMetadata
from oscar_vllm.recipe_format import TENSORS

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
