"""From what calibration collected to a recipe."""

from collections.abc import Callable, Sequence

import torch

from oscar_vllm.calibration.centering import attended_key_mean
from oscar_vllm.calibration.criterion import Criterion
from oscar_vllm.calibration.diagnostics import Side, diagnose
from oscar_vllm.calibration.drift import spread_out
from oscar_vllm.calibration.layer import LayerCalibration
from oscar_vllm.calibration.methods import Method, layer_transforms
from oscar_vllm.calibration.search import KEY_OVERSHOOT, MOMENTS, ROUNDS, Choice, Transform, search
from oscar_vllm.calibration.statistics import LayerStatistics
from oscar_vllm.calibration.threads import one_thread
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import KEY_CLIP, VALUE_CLIP, OscarRecipe, RecipeMetadata
from oscar_vllm.recipe_format import RecipeError


def build_recipe(
    layers: Sequence[LayerCalibration],
    geometry: ModelGeometry,
    *,
    model: str,
    text_hash: str,
    tokens: int,
    method: Method = "geometric-mean",
    center: bool = True,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> OscarRecipe:
    """The transforms of ``method`` per layer and KV head, and the quantizer that is best on the held-out samples.

    Args:
        layers: one per layer, in order. Those without samples get the published clips and no refit.
        model: id or path, kept for messages.
        text_hash: of the calibration text.
        tokens: of it that were prefilled for the statistics.
        center: subtract the calibrated means of keys and values (exact: softmax ignores a vector common to all keys,
            and attention weights sum to 1).
        device: where to compute.
        progress: called with (layers done, layers in all).

    Raises:
        RecipeError: no tokens, not one entry per layer, or activations that are not finite.
    """
    _check([layer.statistics for layer in layers], geometry)
    searched = all(layer.samples for layer in layers)
    keys: list[Side] = []
    values: list[Side] = []
    for layer in layers:
        with one_thread():
            key, value = _build_layer(layer, method, center, torch.device(device), searched)
        keys.append(key)
        values.append(value)
        if progress is not None:
            progress(len(keys), len(layers))
    metadata = RecipeMetadata(
        model=model,
        geometry=geometry,
        geometry_hash=geometry.hash(),
        method=method,
        centered=center,
        rounds=ROUNDS if searched else 0,
        start="moments" if searched and MOMENTS else "range",
        positions=_positions(layers) if searched and method == "geometric-mean" else 0,
        text_hash=text_hash,
        tokens=tokens,
        diagnostics=diagnose(keys, values, _sample_tokens(layers) if searched else 0),
    )
    return OscarRecipe(
        key=_stack([side.choice.transform.stored for side in keys]),
        query=_stack([side.choice.transform.restore.mT for side in keys]),
        value=_stack([side.choice.transform.stored for side in values]),
        output=_stack([side.choice.transform.restore for side in values]),
        key_mean=_stack([side.mean for side in keys]),
        value_mean=_stack([side.mean for side in values]),
        key_clip=_stack([side.choice.clip for side in keys]),
        value_clip=_stack([side.choice.clip for side in values]),
        key_gain=_stack([side.choice.gain for side in keys]),
        value_gain=_stack([side.choice.gain for side in values]),
        metadata=metadata,
    )


def _build_layer(
    layer: LayerCalibration, method: Method, center: bool, device: torch.device, searched: bool
) -> tuple[Side, Side]:
    statistics = layer.statistics.to(device)
    samples = [sample.to(device) for sample in layer.samples] if searched else []
    criteria = [Criterion(sample, layer.output_weight) for sample in samples]
    key_mean, value_mean = attended_key_mean(statistics.key_mean, criteria) * center, statistics.value_mean * center
    found = layer_transforms(statistics, layer.output_weight, method, key_mean, value_mean, samples, layer.rotary)
    if layer.rotary is not None:
        criteria = [Criterion(sample, layer.output_weight) for sample in spread_out(samples, layer.rotary)]
    if searched:
        key = search(
            [criterion.key_error for criterion in criteria],
            [criterion.key for criterion in criteria],
            key_mean.float(),
            found.key,
            published=found.published_key,
            published_clip=KEY_CLIP,
            overshoot=KEY_OVERSHOOT,
        )
        value = search(
            [criterion.value_error for criterion in criteria],
            [criterion.value for criterion in criteria],
            value_mean.float(),
            found.value,
            published=found.published_value,
            published_clip=VALUE_CLIP,
        )
    else:
        key, value = _published(found.key, KEY_CLIP), _published(found.value, VALUE_CLIP)
    return (
        Side(key_mean, statistics.key_covariance(key_mean), statistics.query_covariance, key),
        Side(value_mean, statistics.value_covariance(value_mean), statistics.output_covariance(value_mean), value),
    )


def _published(transform: Transform, clip: float) -> Choice:
    """A transform with the published clip, no refit and no gain; what it costs is not known."""
    heads = transform.stored.shape[0]
    one = torch.ones(heads, device=transform.stored.device)
    unknown = one * torch.nan
    return Choice(transform, one * clip, one, unknown, unknown)


def _check(statistics: Sequence[LayerStatistics], geometry: ModelGeometry) -> None:
    if len(statistics) != geometry.num_layers:
        raise RecipeError(
            f"Calibration saw {len(statistics)} attention layers and the model has {geometry.num_layers}."
        )
    for index, layer in enumerate(statistics):
        if layer.tokens == 0:
            raise RecipeError(f"Calibration saw no token in layer {index}; give a longer text.")
        if not all(torch.isfinite(part).all() for part in (layer.query_gram, layer.output_gram, layer.key_gram)):
            raise RecipeError(f"Calibration met a number that is not finite in layer {index}; check the model's dtype.")


def _positions(layers: Sequence[LayerCalibration]) -> int:
    """Over which the keys of every layer were followed."""
    return min(layer.rotary.positions if layer.rotary is not None else 0 for layer in layers)


def _sample_tokens(layers: Sequence[LayerCalibration]) -> int:
    return sum(sample.key.shape[1] for sample in layers[0].samples)


def _stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.float().cpu() for part in parts]).contiguous()
