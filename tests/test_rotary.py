"""Rotary embeddings read back from vLLM's own modules, and keys followed far beyond the calibration text."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from oscar_vllm.calibration import transforms
from oscar_vllm.calibration.build import build_recipe
from oscar_vllm.calibration.criterion import Criterion, restored_parts
from oscar_vllm.calibration.drift import POINTS, SPREAD_SHARE, drift, spread_covariance, spread_out
from oscar_vllm.calibration.layer import LayerCalibration
from oscar_vllm.calibration.rotary import Rotary, RotaryWatch
from oscar_vllm.calibration.sample import AttentionSample
from oscar_vllm.calibration.statistics import LayerStatistics
from oscar_vllm.calibration.transforms import geometric_mean_transform
from oscar_vllm.geometry import ModelGeometry

D, H, G, T, LONGEST = 64, 1, 2, 256, 32768
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
KINDS: dict[str, dict[str, Any]] = {
    "halves": {},
    "pairs": {"is_neox_style": False},
    "a quarter of the channels": {"partial_rotary_factor": 0.25},
    "llama3 scaling": LLAMA3,
    "yarn scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
}


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def rope(dtype: torch.dtype = torch.float32, **parameters: Any) -> torch.nn.Module:
    neox = parameters.pop("is_neox_style", True)
    parameters = {"rope_type": "default", "rope_theta": 500_000.0, **parameters}
    return get_rope(D, LONGEST, is_neox_style=neox, rope_parameters=parameters, dtype=dtype)


def turned(module: Any, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rows [T, D] through vLLM's own rotary embedding."""
    result: torch.Tensor = module.forward_native(position, rows.clone(), rows.clone())[1]
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_turned_row_is_the_row_further_on(kind: str, dtype: torch.dtype) -> None:
    rotary = Rotary.of(rope(dtype, **KINDS[kind]))
    exact = rope(torch.float32, **KINDS[kind])
    assert rotary is not None
    rows, position = torch.randn(50, D, generator=torch.Generator().manual_seed(0)), torch.arange(50)
    for further in (1, 700, 20_000):
        here = rotary.turn(turned(exact, rows, position), torch.full((1,), further))
        # A table in BF16 knows the fastest angles to 1e-6: two hundredths of a turn at the far end.
        allowed = 1e-2 if dtype == torch.float32 else 0.15
        torch.testing.assert_close(here.float(), turned(exact, rows, position + further), rtol=0, atol=allowed)
    assert rotary.positions >= LONGEST


def test_a_table_that_is_no_rotation_is_told() -> None:
    class Other(torch.nn.Module):
        cos_sin_cache = torch.randn(2048, D, generator=torch.Generator().manual_seed(0))

    assert Rotary.of(Other()) is None
    assert Rotary.of(torch.nn.Linear(2, 2)) is None
    assert Rotary.of(None) is None


def test_a_layer_is_known_by_the_embedding_it_called() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = rope(), rope(rope_theta=10_000.0)

    model = Model()
    watch = RotaryWatch(model)
    q = torch.randn(3, D)
    model.other(torch.arange(3), q, q.clone())
    assert watch.take() is model.other
    assert watch.take() is None, "a layer that turns nothing"
    model.one(torch.arange(3), q, q.clone())
    assert watch.take() is model.one
    watch.close()
    model.one(torch.arange(3), q, q.clone())
    assert watch.take() is None


def test_drift_costs_a_row_nothing_along_the_first_axis() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(2, H, D, 3 * D, generator=generator, dtype=torch.float64)
    along = torch.randn(H, 1, D, generator=generator, dtype=torch.float64)
    stored, read = geometric_mean_transform(*(part @ part.mT for part in parts), drift=along * torch.rand(9, 1))
    assert (stored.double() @ read.double().mT - torch.eye(D)).abs().max() < 1e-5
    moved = along.float() @ stored
    torch.testing.assert_close(moved, moved[..., :1].expand_as(moved), rtol=1e-4, atol=1e-5)
    assert moved.abs().max() > 0.1


def test_what_drifts_across_the_first_axis_counts_to_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected error of rows that drift along two directions, of which one fits the axis that costs nothing."""
    generator = torch.Generator().manual_seed(2)
    parts = torch.randn(2, H, D, 3 * D, generator=generator, dtype=torch.float64)
    covariance, weight = (part @ part.mT / (3 * D) for part in parts)
    way = torch.linspace(0, 1, 33, dtype=torch.float64)[:, None]
    one, other = torch.randn(2, H, 1, D, generator=generator, dtype=torch.float64)
    path = 9 * one * way + 6 * other * way**2

    def error() -> torch.Tensor:
        stored, read = (x.double() for x in geometric_mean_transform(covariance, weight, drift=path))
        rows = stored.mT @ (covariance + path.mT @ path / len(way)) @ stored
        step = rows.diagonal(dim1=-2, dim2=-1).sum(-1) - rows.mean((-2, -1)) * D  # less what the minimum holds
        return step * (read.mT @ weight @ read).diagonal(dim1=-2, dim2=-1).sum(-1)

    found = error()
    monkeypatch.setattr(transforms, "DRIFT_ROUNDS", 0)
    assert (found < 0.9 * error()).all()


def biased(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [T, H * G, D], key, value [T, H, D] from position 0 of a layer whose key bias turns slowly."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(T, heads, D, generator=generator) for heads in (H * G, H, H))
    k[:, :, D // 2 - 1] += 300.0  # the slowest pair
    q[:, :, D // 2 - 1] += 3.0
    rotary, position = Rotary.of(rope()), torch.arange(T)
    assert rotary is not None
    return *(rotary.turn(x.transpose(0, 1), position).transpose(0, 1).float() for x in (q, k)), v


def test_a_bias_that_turns_away_does_not_drown_the_keys() -> None:
    """Calibrated on 256 positions, used up to 32,768: the second recipe knows how keys turn."""
    rotary, statistics = Rotary.of(rope()), LayerStatistics(H, D)
    assert rotary is not None
    q, k, v = biased(0)
    statistics.update(q, k, v, torch.randn_like(q))
    samples = [AttentionSample.take(*biased(seed), D**-0.5) for seed in (1, 2, 3)]
    geometry = ModelGeometry(
        model_type="llama", num_layers=1, num_heads=H * G, num_kv_heads=H, head_size=D, hidden_size=H * G * D,
        rope_type="default", rope_theta=500_000.0,
    )  # fmt: skip
    error = {}
    for known in (None, rotary):
        layer = LayerCalibration(statistics, samples, rotary=known)
        recipe = build_recipe([layer], geometry, model="m", text_hash="", tokens=T)
        assert recipe.metadata.positions == (0 if known is None else known.positions)
        one = recipe.layer(0)
        for where, text in (("near", samples), ("far", spread_out(samples, rotary)[-1:])):
            found = []
            for sample in text:
                parts = restored_parts(
                    sample.key.float(), one.key, one.query.mT, one.key_mean, 1.0, one.rounds, one.moments
                )
                found.append(Criterion(sample).key_error(*parts, torch.ones(1)).mean())
            error[known is not None, where] = torch.stack(found).mean()
    assert error[True, "far"] < 0.2 * error[False, "far"]
    assert error[True, "far"] < 2 * error[True, "near"]
    assert error[True, "near"] < 1.5 * error[False, "near"]


def test_samples_far_on_keep_their_attention() -> None:
    rotary, sample = Rotary.of(rope()), AttentionSample.take(*biased(1), D**-0.5)
    assert rotary is not None
    moved = spread_out([sample, sample], rotary)[1]
    assert (moved.key - sample.key).abs().max() > 1
    torch.testing.assert_close(Criterion(moved).weights, Criterion(sample).weights, rtol=0, atol=1e-3)


def test_drift_is_the_mean_turned_less_what_is_subtracted() -> None:
    rotary, sample = Rotary.of(rope()), AttentionSample.take(*biased(1), D**-0.5)
    assert rotary is not None
    mean = sample.key.mean(1)
    found = drift([sample], rotary, mean)
    assert found.shape == (H, POINTS, D)
    origin = rotary.turn(sample.key, -torch.arange(T))[:, T // 16 :].mean(1)
    torch.testing.assert_close(found[:, 0], origin - mean)
    last = rotary.turn(origin[:, None], torch.tensor([LONGEST - 1]))[:, 0]
    torch.testing.assert_close(found[:, -1], last - mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["halves", "pairs", "a quarter of the channels"])
def test_a_covariance_is_that_of_the_rows_wherever_they_stand(kind: str) -> None:
    rotary = Rotary.of(rope(**KINDS[kind]))
    assert rotary is not None
    rows = torch.randn(H, 300, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = rows @ torch.randn(D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    average = torch.zeros(H, D, D, dtype=torch.float64)
    places = torch.linspace(0, rotary.positions - 1, 33, dtype=torch.float64)
    for place in places:
        there = rotary.turn(rows, place[None])
        average += there.mT @ there / len(places)
    given = spread_covariance(rows.mT @ rows, rotary)
    torch.testing.assert_close(given, torch.lerp(rows.mT @ rows, average, SPREAD_SHARE), rtol=1e-9, atol=1e-6)
