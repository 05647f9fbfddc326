"""One clear sentence for every way in which a recipe's file can be wrong."""

from pathlib import Path

import pytest
import torch
from golden_recipe import GOLDEN, golden_recipe, write
from safetensors.torch import save_file

from oscar_vllm.recipe import OscarRecipe, RecipeError
from oscar_vllm.recipe_format import TENSORS

AGAIN = "make it again with `oscar calibrate MODEL`."
OTHER_VERSION = f"and this release reads version 1; install the release it was made with or {AGAIN}"


def refusal(path: Path) -> str:
    """The sentence a file is refused with, less the path before it."""
    with pytest.raises(RecipeError) as caught:
        OscarRecipe.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert message.endswith(".")
    return message.removeprefix(f"{path}: ")


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == (
        "There is no such recipe; give another path or make it with `oscar calibrate MODEL`."
    )
    assert refusal(tmp_path) == "The recipe cannot be read (Is a directory); check the path."


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "r"
    path.write_bytes(GOLDEN.read_bytes()[:keep])
    assert refusal(path).startswith("The file is not a whole safetensors file (")
    assert refusal(path).endswith(f"; copy it or {AGAIN}")


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 2**21], ids=hex)
def test_lying_header_length_costs_no_memory(tmp_path: Path, length: int) -> None:
    path = tmp_path / "r"
    with path.open("wb") as stream:
        stream.write(length.to_bytes(8, "little") + b"{}")
        stream.truncate(2**22)
    assert (
        refusal(path) == f"The file is not a whole safetensors file (the header's length is wrong); copy it or {AGAIN}"
    )


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(200), b"{}" * 50, b"\x80\x02}" + bytes(99)])
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "r"
    path.write_bytes(content)
    assert refusal(path).startswith("The file is not a whole safetensors file (")


def test_another_safetensors_file(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.ones(2)}, tmp_path / "r")
    assert refusal(tmp_path / "r") == f"The file is not an OSCAR recipe; {AGAIN[:-1]} or give another file."


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"format": "gguf"}, f"The file is not an OSCAR recipe; {AGAIN[:-1]} or give another file."),
        (
            {"format_version": "2", "novelty": "1"},
            f"The recipe has format version 2 {OTHER_VERSION}",
        ),
        (
            {"format_version": None},
            f"The recipe has format version None {OTHER_VERSION}",
        ),
        (
            {"page_format_version": "9"},
            f"The recipe was made for page format 9 and this release writes 1; {AGAIN}",
        ),
        ({"tokens": None}, f"The recipe's metadata do not hold (tokens: Field required); {AGAIN}"),
        ({"colour": "red"}, f"The recipe's metadata do not hold (colour: Extra inputs are not permitted); {AGAIN}"),
        (
            {"rounds": "-1"},
            f"The recipe's metadata do not hold (rounds: Input should be greater than or equal to 0); {AGAIN}",
        ),
        ({"geometry_hash": "0" * 16}, f"The recipe's geometry hash is not that of its geometry; {AGAIN}"),
    ],
    ids=str,
)
def test_metadata_that_do_not_hold(tmp_path: Path, header: dict[str, str | None], sentence: str) -> None:
    assert refusal(write(tmp_path / "r", **header)) == sentence


@pytest.mark.parametrize(
    "geometry", ["", "{", "[]", "null", "1e999", "[" * 5000, '{"num_layers": 1}', '{"num_layers": ' + "9" * 5000 + "}"]
)
def test_geometry_that_does_not_parse(tmp_path: Path, geometry: str) -> None:
    assert refusal(write(tmp_path / "r", geometry=geometry)).startswith("The recipe's metadata do not hold (")


@pytest.mark.parametrize("name", TENSORS)
def test_missing_tensor(tmp_path: Path, name: str) -> None:
    assert refusal(write(tmp_path / "r", {name: None})) == f"The recipe lacks the tensor {name}; {AGAIN}"


def test_extra_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "r", {"bonus": torch.ones(1)})
    assert refusal(path) == f"The recipe has an unknown tensor bonus; {AGAIN}"


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_shape_or_dtype(tmp_path: Path, name: str) -> None:
    good = golden_recipe().tensors()[name]
    shape = list(good.shape)
    path = write(tmp_path / "r", {name: good[:1].clone()})
    assert refusal(path) == f"The recipe's {name} has shape {[1, *shape[1:]]} instead of {shape} in float32; {AGAIN}"
    path = write(tmp_path / "r", {name: good.half()})
    assert refusal(path) == f"The recipe's {name} has another dtype instead of {shape} in float32; {AGAIN}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", TENSORS)
def test_numbers_that_are_not_finite(tmp_path: Path, name: str, value: float) -> None:
    bad = golden_recipe().tensors()[name].clone()
    bad[1, 0] = value
    sentence = f"The recipe's {name} holds a number that is not finite (layer 1, KV head 0); {AGAIN}"
    assert refusal(write(tmp_path / "r", {name: bad})) == sentence


@pytest.mark.parametrize("name", ["key", "query", "value", "output"])
def test_matrices_that_do_not_undo_each_other(tmp_path: Path, name: str) -> None:
    left, right = ("key", "query") if name in ("key", "query") else ("value", "output")
    sentence = f"The recipe's {left} and {right} matrices do not undo each other (layer 1, KV head 1); {AGAIN}"
    for change in (lambda m: m * 1.01, lambda m: m.flip(-1), torch.zeros_like, lambda m: m * 1e38):
        bad = golden_recipe().tensors()[name].clone()
        bad[1, 1] = change(bad[1, 1])
        if bad.isfinite().all():
            assert refusal(write(tmp_path / "r", {name: bad})) == sentence
    close = golden_recipe().tensors()[name] * (1 + 1e-4)
    OscarRecipe.load(write(tmp_path / "r", {name: close}))


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("key_clip", 0.0, "(0, 1]"),
        ("key_clip", 1.01, "(0, 1]"),
        ("value_clip", -0.5, "(0, 1]"),
        ("key_gain", 0.49, "[0.5, 2]"),
        ("value_gain", 2.1, "[0.5, 2]"),
    ],
)
def test_numbers_out_of_range(tmp_path: Path, name: str, value: float, what: str) -> None:
    bad = golden_recipe().tensors()[name].clone()
    bad[0, 1] = value
    sentence = f"The recipe's {name} is outside {what} (layer 0, KV head 1); {AGAIN}"
    assert refusal(write(tmp_path / "r", {name: bad})) == sentence


def test_means_of_an_uncentered_recipe(tmp_path: Path) -> None:
    sentence = "The recipe's key_mean is not zero although the recipe says it is not centered (layer 0, KV head 0); "
    assert refusal(write(tmp_path / "r", centered="false")) == sentence + AGAIN
