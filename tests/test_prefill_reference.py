"""Prefill on the CPU against float64 attention: chunks read themselves exactly and their context from the caches."""

from typing import Any

import pytest
import torch
from kernels.caches import random_recipe
from twin_caches import NAN, attention, cache_of, poisoned, relative

from oscar_vllm.backend import prefill
from oscar_vllm.kernels.context.reference import gather_reference
from oscar_vllm.kernels.views import CacheView, LayerRecipe
from oscar_vllm.kernels.write.reference import write_reference

pytestmark = pytest.mark.usefixtures("one_seed_and_thread")


def prefill_of(
    length: int, new: int, recipe: LayerRecipe, *, heads: int, group: int, sink: int, recent: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, CacheView]:
    """Raw query of the last ``new`` tokens and raw key, value of all, written into caches token by token."""
    dim = recipe.key.shape[-1]
    key = torch.randn(length, heads, dim) + recipe.key_mean
    value = torch.randn(length, heads, dim) + recipe.value_mean
    query = torch.randn(new, heads * group, dim)
    pages, windows = -(-length // 128), -(-length // 16)
    history, _ = poisoned(pages + 1, heads, dim)
    window = torch.full((windows + 1, heads, 16, 2 * dim), NAN)
    positions = torch.arange(length)
    inside = (positions < sink) | (positions >= length - new - recent)
    blocks = torch.zeros(windows, dtype=torch.bool).index_fill(0, positions[inside] // 16, True)
    table = [index + 1 if real else 0 for index, real in enumerate(blocks.tolist())]
    window_slots = torch.tensor(table)[positions // 16] * 16 + positions % 16
    write_reference(key, value, history, window, positions + 128, window_slots, recipe)
    view = cache_of(history, window, length, window_blocks=table, new=new, sink=sink, recent=recent)
    return query, key, value, torch.empty(query.shape), view


@pytest.mark.parametrize("new", [1, 2, 17, 128, 131])
@pytest.mark.parametrize("group", [1, 3], ids="G{}".format)
def test_a_first_chunk_is_exact(new: int, group: int) -> None:
    recipe = random_recipe(2, 64, torch.Generator().manual_seed(3))
    query, key, value, out, view = prefill_of(new, new, recipe, heads=2, group=group, sink=64, recent=256)
    prefill.prefill_cpu(query, key, value, view, 0, recipe, 0.125, out)
    assert relative(out, attention(query, key, value, 0.125, 0)[0]) < 2e-6


@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0], ids="mean {}".format)
@pytest.mark.parametrize(("sink", "recent"), [(64, 256), (0, 0), (16, 32)], ids=lambda v: str(v))
@pytest.mark.parametrize(("length", "new"), [(140, 12), (700, 200), (1500, 9), (129, 128)], ids=lambda v: str(v))
def test_a_chunk_with_context_mixes_cached_rows_and_raw_ones(
    length: int, new: int, sink: int, recent: int, mean: float
) -> None:
    """Float64 attention over the cached rows, taken back to the model's space, and over the raw chunk.

    With a large key mean the scores of the two differ by far more than the softmax can forgive.
    """
    recipe = random_recipe(2, 64, torch.Generator().manual_seed(4))
    recipe = recipe._replace(key_mean=recipe.key_mean * mean)
    query, key, value, out, view = prefill_of(length, new, recipe, heads=2, group=3, sink=sink, recent=recent)
    context = length - new
    prefill.prefill_cpu(query, key[context:], value[context:], view, context, recipe, 0.125, out)
    stored_keys, stored_values = gather_reference(view, 0, context)
    # A stored key k T reads as k T (T^-T)^T = k, and a stored value through its own way back.
    keys = torch.einsum("htd,hed->the", stored_keys[0].double(), recipe.query.double()) + recipe.key_mean
    values = torch.einsum("htd,hde->the", stored_values[0].double(), recipe.output.double()) + recipe.value_mean
    expected, _ = attention(
        query, torch.cat([keys, key[context:].double()]), torch.cat([values, value[context:].double()]), 0.125, context
    )
    assert relative(out, expected) < (2e-5 if mean <= 1 else 2e-4)


@pytest.mark.parametrize("tile", [128, 256])
def test_the_context_is_read_in_tiles(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    recipe = random_recipe(1, 64, torch.Generator().manual_seed(5))
    query, key, value, whole, view = prefill_of(900, 33, recipe, heads=1, group=2, sink=64, recent=256)
    prefill.prefill_cpu(query, key[867:], value[867:], view, 867, recipe, 0.125, whole)
    monkeypatch.setattr(prefill, "CONTEXT_TILE", tile)
    tiles: list[int] = []

    def counting(view: CacheView, start: int, stop: int) -> Any:
        tiles.append(stop - start)
        return gather_reference(view, start, stop)

    monkeypatch.setattr(prefill, "gather_reference", counting)
    out = torch.empty_like(whole)
    prefill.prefill_cpu(query, key[867:], value[867:], view, 867, recipe, 0.125, out)
    assert max(tiles) == tile
    assert sum(tiles) == 867
    assert relative(out, whole) < 1e-6


def test_prefill_writes_the_models_own_type() -> None:
    recipe = random_recipe(1, 64, torch.Generator().manual_seed(6))
    query, key, value, out, view = prefill_of(300, 40, recipe, heads=1, group=2, sink=64, recent=256)
    query, key, value = query.bfloat16(), key[260:].bfloat16(), value[260:].bfloat16()
    prefill.prefill_cpu(query, key, value, view, 260, recipe, 0.125, out)
    rounded = torch.empty(out.shape, dtype=torch.bfloat16)
    prefill.prefill_cpu(query, key, value, view, 260, recipe, 0.125, rounded)
    assert torch.equal(rounded, out.bfloat16())
