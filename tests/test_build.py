"""From collected layers to a recipe."""

from pathlib import Path

import pytest
import torch
from attention_cases import D, G, H, activations, attention, collect

from oscar_vllm.calibration.build import build_recipe
from oscar_vllm.calibration.layer import LayerCalibration, join_ranks
from oscar_vllm.calibration.methods import METHODS, Method
from oscar_vllm.calibration.sample import AttentionSample
from oscar_vllm.calibration.statistics import LayerStatistics
from oscar_vllm.calibration.transforms import hadamard, rotation
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import OscarRecipe, RecipeError

GEOMETRY = ModelGeometry(
    model_type="llama",
    num_layers=2,
    num_heads=H * G,
    num_kv_heads=H,
    head_size=D,
    hidden_size=H * G * D,
    rope_type="default",
    rope_theta=10000.0,
)


def layer(seed: int, sampled: bool = True, weighted: bool = True) -> LayerCalibration:
    q, k, v = activations(seed + 10, 128)
    weight = torch.randn(H, D, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return LayerCalibration(
        collect(activations(seed, 300)),
        [AttentionSample.take(q, k, v, D**-0.5)] if sampled else [],
        weight @ weight.mT if weighted else None,
    )


def build(layers: list[LayerCalibration], method: Method = "geometric-mean", center: bool = True) -> OscarRecipe:
    return build_recipe(layers, GEOMETRY, model="m", text_hash="abc", tokens=300, method=method, center=center)


@pytest.mark.parametrize("center", [True, False], ids=["centered", "uncentered"])
def test_published_recipe(center: bool) -> None:
    layers = [layer(seed, sampled=False) for seed in range(2)]
    recipe = build(layers, "oscar", center)
    assert recipe.metadata.method == "oscar"
    assert recipe.metadata.centered is center
    assert (recipe.metadata.tokens, recipe.metadata.text_hash, recipe.metadata.rounds) == (300, "abc", 0)
    one, statistics = recipe.layer(1), layers[1].statistics
    torch.testing.assert_close(one.key, rotation(statistics.query_covariance))
    torch.testing.assert_close(one.query, one.key)
    torch.testing.assert_close(one.output, one.value.mT)
    mean = statistics.value_mean if center else None
    torch.testing.assert_close(one.value, rotation(statistics.output_covariance(mean)))
    torch.testing.assert_close(one.key_mean, statistics.key_mean.float() * center)
    torch.testing.assert_close(one.value_mean, statistics.value_mean.float() * center)
    assert one.key_clip.tolist() == pytest.approx([0.96] * H)
    assert one.value_clip.tolist() == pytest.approx([0.92] * H)
    assert one.key_gain.tolist() == one.value_gain.tolist() == [1.0] * H


def test_rotations_per_layer_and_hadamard() -> None:
    layers = [layer(seed, sampled=False) for seed in range(2)]
    recipe = build(layers, "oscar-per-layer")
    expected = rotation(layers[1].statistics.query_covariance.mean(0))
    torch.testing.assert_close(recipe.key[1], expected.expand(H, D, D))
    torch.testing.assert_close(build(layers, "hadamard").value[0], hadamard(D).float().expand(H, D, D))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("weighted", [True, False], ids=["output weights", "no output weights"])
def test_searched_recipe_tells_what_it_chose(method: Method, weighted: bool, tmp_path: Path) -> None:
    recipe = build([layer(seed, weighted=weighted) for seed in range(2)], method)
    found = recipe.metadata.diagnostics
    assert (recipe.metadata.rounds, recipe.metadata.start) == (2, "moments")
    assert found is not None
    assert found.sample_tokens == 128
    for side, stored, restore in ((found.key, recipe.key, recipe.query.mT), (found.value, recipe.value, recipe.output)):
        assert [len(heads) for heads in side.transform] == [H, H]
        torch.testing.assert_close(torch.tensor(side.condition), torch.linalg.cond(stored), rtol=1e-2, atol=0)
        assert (stored.double() @ restore.double() - torch.eye(D)).abs().max() < 1e-6
        assert all(spectrum[0] == 1.0 for spectrum in side.spectrum)
        if method == "oscar":  # only its quantizer is another
            assert side.search_gain(0) > 1.0
    recipe.save(tmp_path / "r")
    loaded = OscarRecipe.load(tmp_path / "r")
    assert loaded.metadata == recipe.metadata
    bare = recipe.metadata.model_copy(update={"diagnostics": None})
    assert OscarRecipe(**recipe.tensors(), metadata=bare).content_hash() == recipe.content_hash()


@pytest.mark.parametrize("kind", ["dead head", "one direction", "constant key", "huge", "tiny"])
def test_degenerate_heads_give_a_valid_recipe(kind: str) -> None:
    q, k, v = activations(3, 200, torch.float32)
    if kind == "dead head":
        q[:, :G], k[:, 0], v[:, 0] = 0, 0, 0
    elif kind == "one direction":
        q[:, :G] = q[:, :G, :1] * q[0, 0]
        v[:, 0] = v[:, 0, :1] * v[0, 0]
    elif kind == "constant key":
        k[:, 0] = k[0, 0]
    else:
        q, k, v = (x * (1e3 if kind == "huge" else 1e-6) for x in (q, k, v))
    statistics = LayerStatistics(H, D)
    statistics.update(q, k, v, attention(q, k, v)[1])
    recipe = build([LayerCalibration(statistics, [AttentionSample.take(q, k, v, D**-0.5)])] * 2)
    for stored, restore in ((recipe.key, recipe.query.mT), (recipe.value, recipe.output)):
        assert (stored.double() @ restore.double() - torch.eye(D)).abs().max() < 1e-6
        assert torch.linalg.cond(stored.double()).max() <= 32 * (1 + 1e-4)


def test_ranks_join_to_the_recipe_of_one(tmp_path: Path) -> None:
    """Two KV heads on four ranks: each pair of ranks holds copies of a KV head and shares its query heads."""
    q, k, v = (x.repeat_interleave(2, 1) if i == 0 else x for i, x in enumerate(activations(0, 200)))  # 12 query heads
    o = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    weight = torch.eye(D, dtype=torch.float64)

    def part(queries: slice, heads: slice, share: float) -> LayerCalibration:
        statistics = LayerStatistics(heads.stop - heads.start, D)
        statistics.update(q[:, queries], k[:, heads], v[:, heads], o[:, queries])
        sample = AttentionSample.take(q[:, queries], k[:, heads], v[:, heads], 1.0)
        return LayerCalibration(statistics, [sample], share * weight.expand(heads.stop - heads.start, D, D))

    files = []
    for rank in range(4):
        state = part(slice(3 * rank, 3 * rank + 3), slice(rank // 2, rank // 2 + 1), 1.0).state_dict()
        files.append(str(tmp_path / f"{rank}.pt"))
        torch.save({"first_head": rank // 2, "layers": {0: state, 1: state}}, files[-1])
    joined, whole = join_ranks(files), part(slice(0, 12), slice(0, 2), 2.0)
    assert len(joined) == 2
    for name, expected in whole.state_dict().items():
        torch.testing.assert_close(joined[1].state_dict()[name], expected)
    mute = LayerCalibration(layer(0).statistics)
    with pytest.raises(ValueError, match=r"^The parts of a layer sampled different sequences; sample all ranks on one"):
        LayerCalibration.join_heads([layer(0), mute])


def test_statistics_that_cannot_make_a_recipe_are_refused() -> None:
    good = layer(0)
    with pytest.raises(RecipeError, match=r"^Calibration saw 1 attention layers and the model has 2.$"):
        build([good])
    with pytest.raises(RecipeError, match=r"^Calibration saw no token in layer 1; give a longer text.$"):
        build([good, LayerCalibration(LayerStatistics(H, D))])
    bad = collect(activations())
    bad.key_gram[0, 1, 1] = torch.nan
    with pytest.raises(RecipeError, match=r"^Calibration met a number that is not finite in layer 0;"):
        build([LayerCalibration(bad), good])
