"""The recipe file: round trips, the golden file, and one clear sentence for every way a file can be wrong."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oscar_vllm.calibration.transforms import hadamard, rotation
from oscar_vllm.recipe import ModelGeometry, OscarRecipe, RecipeError, RecipeMetadata
from oscar_vllm.recipe_format import TENSORS, tensor_shapes

GOLDEN = Path(__file__).parent / "data" / "recipe_v1.safetensors"
L, H, D = 2, 2, 4
GEOMETRY = ModelGeometry(
    model_type="llama",
    num_layers=L,
    num_heads=6,
    num_kv_heads=H,
    head_size=D,
    hidden_size=24,
    rope_type="default",
    rope_theta=10000.0,
)
AGAIN = "make it again with `oscar calibrate MODEL`."
OTHER_VERSION = f"and this release reads version 1; install the release it was made with or {AGAIN}"


def metadata(**changes: Any) -> RecipeMetadata:
    fields: dict[str, Any] = {
        "model": "org/tiny",
        "geometry": GEOMETRY,
        "geometry_hash": GEOMETRY.hash(),
        "method": "oscar",
        "centered": True,
        "rounds": 3,
        "text_hash": "0123456789abcdef",
        "tokens": 8000,
    }
    return RecipeMetadata(**fields | changes)


def golden_recipe() -> OscarRecipe:
    """Numbers a float32 holds exactly: the same on every machine, and different in every tensor, layer and head."""
    count = torch.arange(L * H * D, dtype=torch.float32).reshape(L, H, D)
    scale = (1.0 + count[..., :1]).unsqueeze(-1).exp2()
    key = hadamard(D).float() * scale  # powers of two, so that the inverse is exact too
    value = hadamard(D).float().flip(-1) / scale
    return OscarRecipe(
        key=key,
        query=key / scale**2,
        value=value,
        output=(value * scale**2).mT.contiguous(),
        key_mean=count / 8,
        value_mean=-count / 4,
        key_clip=1 - count[..., 0] / 64,
        value_clip=1 - count[..., 0] / 32,
        key_gain=1 + count[..., 0] / 64,
        value_gain=1 + count[..., 0] / 32,
        metadata=metadata(),
    )


def write(path: Path, changes: dict[str, torch.Tensor | None] | None = None, /, **header: str | None) -> Path:
    """The golden recipe with tensors or metadata replaced (None: left out), written past every check."""
    recipe = golden_recipe()
    tensors = {name: tensor.clone() for name, tensor in recipe.tensors().items()} | (changes or {})
    strings = recipe.metadata.to_strings() | header
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {name: text for name, text in strings.items() if text is not None})
    return path


def refusal(path: Path) -> str:
    """The sentence a file is refused with, less the path before it."""
    with pytest.raises(RecipeError) as caught:
        OscarRecipe.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert message.endswith(".")
    return message.removeprefix(f"{path}: ")


def assert_same(one: OscarRecipe, other: OscarRecipe) -> None:
    assert one.metadata == other.metadata
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name
    assert one.content_hash() == other.content_hash()


def test_round_trip_is_bit_equal(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    R = rotation(torch.randn(4, L, H, D, D, generator=generator, dtype=torch.float64))
    matrices, means = [R[0], R[0], R[1], R[1].mT], [R[2, :, :, 0], R[3, :, :, 0]]
    factors = torch.rand(4, L, H, generator=generator) * 0.5 + 0.5
    tensors = dict(zip(TENSORS, [*matrices, *means, *factors], strict=True))
    recipe = OscarRecipe(**tensors, metadata=metadata(rounds=0, method="anything"))
    recipe.save(tmp_path / "new folder" / "r.safetensors")
    assert_same(OscarRecipe.load(tmp_path / "new folder" / "r.safetensors"), recipe)


def test_golden_file_of_version_1_keeps_loading() -> None:
    recipe = OscarRecipe.load(GOLDEN)
    assert_same(recipe, golden_recipe())
    assert recipe.content_hash() == "d092e3b917506370"
    assert recipe.geometry.hash() == "0d72346e37601cfa"


def test_defaults_of_the_process_do_not_matter(tmp_path: Path) -> None:
    """An engine loads models under its own default dtype and device."""
    golden_recipe().save(tmp_path / "r")
    expected = OscarRecipe.hadamard(GEOMETRY)
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            assert_same(OscarRecipe.load(tmp_path / "r"), OscarRecipe.load(GOLDEN))
            assert_same(OscarRecipe.hadamard(GEOMETRY), expected)
    finally:
        torch.set_default_dtype(dtype)


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    golden_recipe().save(tmp_path / "r")
    tensors = load_file(tmp_path / "r")
    assert set(tensors) == set(TENSORS)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(GEOMETRY)
    assert all(t.dtype == torch.float32 for t in tensors.values())
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o666 & ~mask


def test_content_hash_sees_every_tensor_and_the_metadata(tmp_path: Path) -> None:
    recipe = golden_recipe()
    hashes = {recipe.content_hash()}
    for name, tensor in recipe.tensors().items():
        nudged = tensor.clone()
        nudged.view(-1)[-1] *= 0.9999
        hashes.add(OscarRecipe.load(write(tmp_path / name, {name: nudged})).content_hash())
    hashes.add(OscarRecipe.load(write(tmp_path / "rounds", rounds="4")).content_hash())
    hashes.add(OscarRecipe.load(write(tmp_path / "start", start="moments")).content_hash())
    hashes.add(OscarRecipe.load(write(tmp_path / "positions", positions="32768")).content_hash())
    assert len(hashes) == len(TENSORS) + 4


def test_layer_and_heads() -> None:
    recipe = golden_recipe()
    layer = recipe.layer(1, "cpu", slice(1, 2))
    assert layer.key.shape == (1, D, D)
    assert torch.equal(layer.value_mean, recipe.value_mean[1, 1:2])
    assert torch.equal(layer.output, recipe.output[1, 1:])
    assert all(part.is_contiguous() for part in layer if isinstance(part, torch.Tensor))
    assert (layer.rounds, layer.moments) == (3, False)
    assert recipe.layer(0).key_clip.shape == (H,)
    moments = OscarRecipe(**recipe.tensors(), metadata=metadata(start="moments"))
    assert moments.layer(0).moments


def test_hadamard_recipe(tmp_path: Path) -> None:
    recipe = OscarRecipe.hadamard(GEOMETRY)
    layer = recipe.layer(0)
    for matrix in (layer.key, layer.query, layer.value, layer.output):
        torch.testing.assert_close(matrix, hadamard(D).float().expand(H, D, D))
    assert not recipe.metadata.centered
    assert not layer.key_mean.any()
    assert layer.key_clip.tolist() == pytest.approx([0.96] * H)
    assert layer.value_clip.tolist() == pytest.approx([0.92] * H)
    recipe.save(tmp_path / "h")
    assert_same(OscarRecipe.load(tmp_path / "h"), recipe)
    with pytest.raises(
        RecipeError, match=r"^A head size of 80 is not a power of two, which the Hadamard rotation needs"
    ):
        OscarRecipe.hadamard(GEOMETRY.model_copy(update={"head_size": 80}))


def test_another_geometry_is_refused_by_name() -> None:
    other = GEOMETRY.model_copy(update={"num_layers": 3, "model_type": "qwen2"})
    recipe = golden_recipe()
    recipe.check_geometry(GEOMETRY)
    with pytest.raises(RecipeError) as caught:
        recipe.check_geometry(other)
    assert str(caught.value) == (
        "The recipe was made for org/tiny (llama, 2 layers, 6 query and 2 KV heads of 4, hidden size 24, "
        "rope default 10000) and does not fit this model (qwen2, 3 layers, 6 query and 2 KV heads of 4, "
        "hidden size 24, rope default 10000); make one with `oscar calibrate MODEL`."
    )


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


def test_an_interrupted_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    OscarRecipe.hadamard(GEOMETRY).save(path)
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RecipeError) as caught:
        golden_recipe().save(path)
    assert str(caught.value) == (
        f"The recipe cannot be written to {path} (No space left on device); choose another path."
    )
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
