"""Published rotations become recipes, and files that are none are refused in one sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_vllm.calibration.transforms import hadamard, rotation
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.hub import HubError, fetch
from oscar_vllm.recipe import OscarRecipe, RecipeError
from oscar_vllm.recipe_import import import_recipe, read_rotations
from oscar_vllm.recipe_published import KEY_FILE, PUBLISHED, VALUE_FILE, import_published

L, H, D = 3, 2, 16
GEOMETRY = ModelGeometry(
    model_type="qwen3",
    num_layers=L,
    num_heads=4,
    num_kv_heads=H,
    head_size=D,
    hidden_size=64,
    rope_type="default",
    rope_theta=1e6,
)


def rotations(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return rotation(torch.randn(*shape, D, D, generator=generator, dtype=torch.float64))


def zoo(matrices: Any) -> dict[str, Any]:
    """A file of format 1 as the authors write it."""
    layers = {i: {"layer_id": i, "rotation": matrix} for i, matrix in enumerate(matrices)}
    return {"format_version": 1, "objective": "qqt_r_h_pbr", "source_grouping": "layer", "layers": layers}


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((L,), zoo), ((L, H), zoo), ((L,), torch.Tensor.clone), ((L, H), torch.Tensor.clone)],
    ids=["per layer", "per head", "tensor per layer", "tensor per head"],
)
def test_layouts(tmp_path: Path, shape: tuple[int, ...], layout: Callable[[torch.Tensor], Any]) -> None:
    keys, values = rotations(*shape), rotations(*shape, seed=1)
    files = saved(tmp_path / "k.pt", layout(keys)), saved(tmp_path / "v.pt", layout(values))
    recipe = import_recipe(*files, GEOMETRY, model="org/m", value_clip=0.96)
    for name, expected in (("key", keys), ("query", keys), ("value", values), ("output", values.mT)):
        expected = expected if len(shape) == 2 else expected[:, None].expand(L, H, D, D)
        torch.testing.assert_close(getattr(recipe, name), expected, rtol=0, atol=1e-6)
    assert not recipe.metadata.centered
    assert (recipe.metadata.method, recipe.metadata.model, recipe.metadata.tokens) == ("oscar-imported", "org/m", 0)
    assert recipe.key_clip.unique().tolist() == pytest.approx([0.96])
    assert recipe.value_clip.unique().tolist() == pytest.approx([0.96])
    recipe.save(tmp_path / "r")
    assert OscarRecipe.load(tmp_path / "r").content_hash() == recipe.content_hash()


def test_rotations_stored_in_bfloat16_are_made_exact(tmp_path: Path) -> None:
    given = rotations(L).bfloat16()
    read = read_rotations(saved(tmp_path / "k.pt", zoo(given)), GEOMETRY).double()
    assert (read.mT @ read - torch.eye(D)).abs().max() < 1e-6
    torch.testing.assert_close(read[:, 0], given.double(), rtol=0, atol=1e-2)


def test_layers_may_be_named_by_text_and_come_in_any_order(tmp_path: Path) -> None:
    matrices = rotations(L)
    content = zoo(matrices)
    content["layers"] = {str(i): {"rotation": matrices[i]} for i in (2, 0, 1)}
    read = read_rotations(saved(tmp_path / "k.pt", content), GEOMETRY)
    torch.testing.assert_close(read[:, 1], matrices, rtol=0, atol=1e-6)


class Trap:
    """What a malicious pickle holds."""

    def __reduce__(self) -> Any:
        return (Path.write_text, (Path("trapped"), "x"))


def without(content: dict[str, Any], layer: int) -> dict[str, Any]:
    return content | {"layers": {i: entry for i, entry in content["layers"].items() if i != layer}}


def changed(layer: int, matrix: Any) -> dict[str, Any]:
    content = zoo(rotations(L))
    content["layers"][layer]["rotation"] = matrix
    return content


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (without(zoo(rotations(L)), 1), "has no layer 1 and the model has 3 layers; give the rotations of this model."),
        (zoo(rotations(L + 1)), "has 4 layers and the model has 3 layers; give the rotations of this model."),
        (torch.zeros(D, D), "has no layer 0 and the model has 3 layers; give the rotations of this model."),
        (zoo(rotations(L)) | {"format_version": 2}, "has RotationZoo format 2; only format 1 is read."),
        ({"weight": torch.ones(2)}, "is not a RotationZoo file (it has no layers); give one of format 1."),
        ([1, 2], "is not a RotationZoo file (it has no layers); give one of format 1."),
        (
            changed(2, torch.eye(8)),
            "has a rotation of shape [8, 8] in layer 2 instead of [16, 16] or [2, 16, 16]; give the rotations of this "
            "model.",
        ),
        (
            changed(2, torch.eye(D).expand(3, D, D)),
            "has a rotation of shape [3, 16, 16] in layer 2 instead of [16, 16] or [2, 16, 16]; give the rotations of "
            "this model.",
        ),
        (
            changed(1, 1.05 * torch.eye(D)),
            "has a matrix in layer 1 that is no rotation (RᵀR differs from I by up to 0.1); download it again.",
        ),
        (
            changed(1, torch.full((D, D), torch.nan)),
            "has a matrix in layer 1 that is no rotation (RᵀR differs from I by up to nan); download it again.",
        ),
        (changed(0, "a string"), "has no matrix of real numbers in layer 0; download it again."),
        (changed(0, torch.eye(D).long()), "has no matrix of real numbers in layer 0; download it again."),
        (
            {"format_version": 1, "layers": {"first": torch.eye(D)}},
            "has a layer called 'first'; layers are numbers.",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_files_that_do_not_hold(tmp_path: Path, content: Any, sentence: str) -> None:
    path = saved(tmp_path / "k.pt", content)
    with pytest.raises(RecipeError) as caught:
        read_rotations(path, GEOMETRY)
    assert str(caught.value) == f"{path} {sentence}"


def test_a_file_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"k.pt is not a file of tensors that can be read safely \(.*; download it"):
        read_rotations(saved(tmp_path / "k.pt", zoo([Trap()] * L)), GEOMETRY)
    assert not (tmp_path / "trapped").exists()


def test_a_tensor_cannot_claim_more_layers_than_the_model_has(tmp_path: Path) -> None:
    """All of a hundred million layers lie in the same bytes of a file of a few kilobytes."""
    path = saved(tmp_path / "k.pt", torch.eye(D).expand(100_000_000, D, D))
    assert path.stat().st_size < 10_000
    sentence = rf"{path} has 100000000 layers and the model has {L}; give the rotations of this model\.$"
    with pytest.raises(RecipeError, match=sentence):
        read_rotations(path, GEOMETRY)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04" + bytes(64)], ids=["empty", "text", "broken zip"])
def test_files_that_are_no_tensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "k.pt"
    path.write_bytes(content)
    with pytest.raises(
        RecipeError, match=r"k.pt is not a file of tensors that can be read safely \(.*; download it"
    ) as e:
        read_rotations(path, GEOMETRY)
    assert "\n" not in str(e.value)
    with pytest.raises(RecipeError, match=r"none.pt is not there; give the path of a rotation file.$"):
        read_rotations(tmp_path / "none.pt", GEOMETRY)


def test_places_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def hub(repository: str, file: str, revision: str | None = None) -> str:
        calls.append((repository, file, revision))
        return str(tmp_path / "there")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    assert fetch("org/zoo@v1:Qwen3-8B/k.pt") == tmp_path / "there"
    assert fetch("org/zoo:k.pt") == tmp_path / "there"
    assert fetch(str(tmp_path)) == tmp_path
    assert calls == [("org/zoo", "Qwen3-8B/k.pt", "v1"), ("org/zoo", "k.pt", None)]
    with pytest.raises(HubError) as caught:
        fetch("nowhere.pt")
    assert str(caught.value) == "nowhere.pt is neither a file nor ORG/NAME[@REVISION]:FILE on the Hugging Face hub."

    def down(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.hf_hub_download", down)
    with pytest.raises(HubError) as caught:
        fetch("org/zoo@v1:k.pt")
    assert str(caught.value) == (
        "k.pt of org/zoo@v1 cannot be had from the Hugging Face hub (ConnectionError); check the network and the name, "
        "or download the file yourself and give its path."
    )


@pytest.mark.parametrize("model", sorted(PUBLISHED))
def test_published_rotations_of_a_known_model(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (KEY_FILE, VALUE_FILE):
        saved(tmp_path / file, zoo(hadamard(D).float().expand(L, D, D)))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, file, **__: str(tmp_path / Path(file).name))
    assert import_published(model, GEOMETRY, tmp_path / "cache" / "r.safetensors")
    recipe = OscarRecipe.load(tmp_path / "cache" / "r.safetensors")
    assert recipe.metadata.model == model
    assert recipe.value_clip.unique().tolist() == pytest.approx([PUBLISHED[model].value_clip])


def test_no_published_rotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError

    monkeypatch.setattr("huggingface_hub.hf_hub_download", down)
    for model in ("org/unknown", "Qwen/Qwen3-8B"):
        assert not import_published(model, GEOMETRY, tmp_path / "r")
    assert not (tmp_path / "r").exists()
