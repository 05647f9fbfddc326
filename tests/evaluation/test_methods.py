from typing import Any

import pytest
import torch
from tiny_model import GEOMETRY

from oscar_vllm.calibration.statistics import LayerStatistics
from oscar_vllm.calibration.transforms import hadamard, rotation
from oscar_vllm.evaluation.baselines import naive_recipe, published_recipe
from oscar_vllm.evaluation.methods import METHODS, EvaluationError, choose, windows_of


def test_the_reference_is_always_there_and_the_table_has_one_order() -> None:
    assert [method.name for method in choose("ours, naive")] == ["bf16", "naive", "ours"]


def test_all_that_runs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: False)
    names = [method.name for method in choose(None)]
    assert names == [name for name in METHODS if METHODS[name].cache_dtype is None]
    with pytest.raises(EvaluationError, match=r'The method "fp8" needs a GPU .*; leave it out\.$'):
        choose("ours,fp8")


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EvaluationError, match=r'There is no method "quarrot"; the methods are bf16, .*ours'):
        choose("quarrot")


@pytest.mark.parametrize(
    ("name", "bits"),
    [("bf16", 16), ("fp8", 8), ("naive", 2.5), ("ours", 2.5), ("ours/no-windows", 2.5), ("kivi", 3)],
)
def test_bits(name: str, bits: float) -> None:
    assert METHODS[name].bits(GEOMETRY) == bits


def test_windows_and_engines() -> None:
    assert windows_of(METHODS["ours"]) == (64, 256)
    assert windows_of(METHODS["kivi/no-windows"]) == (0, 0)
    config: Any = METHODS["quarot/no-windows"].engine_options()["additional_config"]
    assert (config["oscar"]["sink"], config["oscar"]["recent"]) == (0, 0)
    assert METHODS["naive"].engine_options() == METHODS["ours"].engine_options()
    assert METHODS["bf16"].engine_options() == {}
    assert METHODS["fp8"].engine_options() == {"kv_cache_dtype": "fp8"}


def test_naive_changes_nothing_but_the_bits() -> None:
    recipe = naive_recipe(GEOMETRY, "a model")
    eye = torch.eye(64).expand(2, 2, 64, 64)
    assert all(torch.equal(matrix, eye) for matrix in (recipe.key, recipe.query, recipe.value, recipe.output))
    assert recipe.key_mean.abs().max() == 0
    assert (recipe.key_clip == 1).all()
    assert recipe.metadata.rounds == 0


def test_published_has_one_rotation_a_layer_from_all_heads() -> None:
    generator = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(2):
        layer = LayerStatistics(2, 64)
        mix = torch.randn(64, 64, generator=generator)
        tokens = [torch.randn(100, heads, 64, generator=generator) @ mix for heads in (4, 2, 2, 4)]
        layer.update(*tokens)
        layers.append(layer)
    recipe = published_recipe(layers, GEOMETRY, model="a model", text_hash="", tokens=100)
    assert recipe.metadata.tokens == 100
    for index, layer in enumerate(layers):
        assert torch.equal(recipe.key[index, 0], recipe.key[index, 1])
        covariance = layer.query_gram.sum(0) / (2 * layer.rows)
        torch.testing.assert_close(recipe.key[index, 0], rotation(covariance), rtol=0, atol=1e-5)
        # Every channel of the rotated queries has the same energy.
        energy = (recipe.key[index, 0].double().mT @ covariance @ recipe.key[index, 0].double()).diagonal()
        torch.testing.assert_close(energy, energy.mean().expand(64), rtol=1e-4, atol=0)
    assert not torch.equal(recipe.key[0], recipe.key[1])
    assert not torch.equal(recipe.value[0, 0], hadamard(64).float())
    assert (recipe.key_clip == torch.tensor(0.96)).all()
    assert (recipe.value_clip == torch.tensor(0.92)).all()
    assert not recipe.metadata.centered
