"""Calibration of a real model through vLLM's prefill."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from oscar_vllm.calibration.build import build_recipe
from oscar_vllm.calibration.collect import CalibrationError, Collected, collect
from oscar_vllm.calibration.run import add_means
from oscar_vllm.calibration.sample import SAMPLES
from oscar_vllm.calibration.text import default_text
from oscar_vllm.recipe import OscarRecipe

from .conftest import in_process

TOKENS = 600  # a whole prompt and a short one
BEHIND_SINKS = TOKENS - 32 - 5


@pytest.fixture(scope="module")
def collected(model: str) -> Collected:
    with in_process():
        return collect(model, text=default_text(), tokens=TOKENS, max_model_len=513, max_num_batched_tokens=513)


def test_every_layer_is_seen_whole(collected: Collected) -> None:
    geometry = collected.geometry
    assert len(collected.layers) == geometry.num_layers
    for layer in collected.layers:
        assert layer.statistics.tokens == BEHIND_SINKS
        assert layer.statistics.rows == BEHIND_SINKS * geometry.group
        assert len(layer.samples) == SAMPLES
        for sample in layer.samples:
            assert sample.key.shape == (geometry.num_kv_heads, 512, geometry.head_size)
            assert sample.query.shape[:2] == (geometry.num_kv_heads, geometry.group)
            assert sample.scale == pytest.approx(geometry.head_size**-0.5)
        first, second = layer.samples[:2]
        assert not torch.equal(first.key, second.key)
        assert layer.rotary is not None
        assert layer.rotary.positions == 8192
        # Read from a table in BF16.
        torch.testing.assert_close(
            layer.rotary.angle, 100_000.0 ** -(torch.arange(32).double() / 32), rtol=5e-3, atol=0
        )


def test_output_weights_are_those_of_the_checkpoint(collected: Collected, model: str) -> None:
    """Read by projecting the identity, as vLLM packs weights on the CPU and quantizes them elsewhere."""
    geometry = collected.geometry
    H, D = geometry.num_kv_heads, geometry.head_size
    with safe_open(Path(model) / "model.safetensors", framework="pt") as stream:
        for index in (0, geometry.num_layers - 1):
            weight = stream.get_tensor(f"model.layers.{index}.self_attn.o_proj.weight").double()
            by_head = weight.unflatten(1, (H, geometry.group, D))
            expected = torch.einsum("chgd,chge->hde", by_head, by_head)
            found = collected.layers[index].output_weight
            assert found is not None
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2 * expected.abs().max().item())


def test_keys_beat_the_published_method_in_every_layer_and_values_in_all(collected: Collected) -> None:
    recipe = build_recipe(collected.layers, collected.geometry, model="m", text_hash="", tokens=TOKENS)
    found = recipe.metadata.diagnostics
    assert found is not None
    layers = range(collected.geometry.num_layers)
    assert min(found.key.search_gain(layer) for layer in layers) > 1.5
    # A rotation may suit the values of a layer better than the balance does; not those of most.
    gains = [found.value.search_gain(layer) for layer in layers]
    assert sum(gain > 1.0 for gain in gains) > 0.9 * len(gains)
    assert torch.tensor(gains).log().mean().exp() > 1.15
    conditions = torch.tensor([found.key.condition, found.value.condition])
    assert conditions.max() < 32


def test_means_alone(collected: Collected, model: str, tmp_path: Path) -> None:
    plain = OscarRecipe.hadamard(collected.geometry, model)
    options: dict[str, Any] = {"max_model_len": 513, "max_num_batched_tokens": 513}
    with in_process():
        centered = add_means(plain, model, text=default_text(), tokens=TOKENS, out=tmp_path / "r", **options)
    assert OscarRecipe.load(tmp_path / "r").content_hash() == centered.content_hash()
    assert centered.metadata.centered
    assert centered.metadata.tokens == TOKENS
    assert torch.equal(centered.key, plain.key)
    for index, layer in enumerate(collected.layers):
        torch.testing.assert_close(centered.key_mean[index], layer.statistics.key_mean.float(), rtol=0.05, atol=0.05)
    assert centered.key_mean.norm(dim=-1).min() > 0


def test_a_text_that_is_too_short(model: str) -> None:
    with (
        in_process(),
        pytest.raises(CalibrationError, match=r"^The calibration text has \d+ tokens and 1280 are needed \(1024 of"),
    ):
        collect(model, text="too short", tokens=256)


def test_an_interrupted_calibration_goes_on_to_the_same_sums(model: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("oscar_vllm.calibration.collect.CHECKPOINT_SECONDS", 0.0)
    options: dict[str, Any] = {"sample": False, "max_model_len": 257, "max_num_batched_tokens": 257}
    prompts = 0

    def interrupt(step: str, done: int, total: int) -> None:
        nonlocal prompts
        prompts += step == "calibrating"
        if prompts == 3:
            raise KeyboardInterrupt

    with in_process():
        with pytest.raises(KeyboardInterrupt):
            collect(model, text=default_text(), tokens=900, resume=tmp_path, progress=interrupt, **options)
        prompts = 0
        resumed = collect(
            model,
            text=default_text(),
            tokens=900,
            resume=tmp_path,
            progress=lambda step, done, total: interrupt(step, done, total) if done <= 512 else None,
            **options,
        )
        whole = collect(model, text=default_text(), tokens=900, **options)
    assert prompts == 0  # the first 512 tokens were not computed again
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["state.json", "tokens-768"]
    for mine, other in zip(resumed.layers, whole.layers, strict=True):
        assert mine.statistics.tokens == 900 - 3 * 16 - 8
        for name in ("query_gram", "output_gram", "key_gram", "value_gram", "key_sum", "value_sum", "output_sum"):
            assert torch.equal(getattr(mine.statistics, name), getattr(other.statistics, name)), name
