"""The recipe and its file: round trips, the golden file, hashes."""

import os
import stat
from pathlib import Path

import pytest
import torch
from golden_recipe import GEOMETRY, GOLDEN, D, H, L, golden_recipe, metadata, write
from safetensors.torch import load_file

from oscar_vllm.calibration.transforms import hadamard, rotation
from oscar_vllm.recipe import OscarRecipe, RecipeError
from oscar_vllm.recipe_format import TENSORS, tensor_shapes


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
