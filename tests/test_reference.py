"""The PyTorch twins against the definitions they implement, in float64."""

from typing import Any

import pytest
import torch
from kernels.caches import random_case, random_recipe

import oscar_vllm.kernels.decode.reference as decode
from oscar_vllm.backend import prefill
from oscar_vllm.cache.layout import PageLayout
from oscar_vllm.kernels.context.reference import gather_reference
from oscar_vllm.kernels.decode.reference import attend_reference
from oscar_vllm.kernels.merge.reference import map_back, merge_partials
from oscar_vllm.kernels.views import CacheView, LayerRecipe
from oscar_vllm.kernels.write.reference import write_reference

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.usefixtures("one_seed_and_thread")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


# Writing


def poisoned(
    blocks: int, heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    history = torch.full((blocks, heads, 128, dim // 2 + 8), 0xFF, dtype=torch.uint8)
    return history, torch.full((blocks, heads, 16, 2 * dim), NAN, dtype=dtype)


def test_write_touches_its_own_bytes_and_no_others() -> None:
    heads, dim = 2, 64
    history, window = poisoned(6, heads, dim)
    recipe = random_recipe(heads, dim, torch.Generator().manual_seed(0))
    slots = torch.tensor([2 * 128 + 7, -1, 5, 5 * 128 + 127, 127, 3 * 128])
    window_slots = torch.tensor([4 * 16 + 3, 3 * 16, 2 * 16, 9, -1, 15])
    key, value = torch.randn(6, heads, dim), torch.randn(6, heads, dim)
    write_reference(key, value, history, window, slots, window_slots, recipe)
    layout = PageLayout(dim)
    changed = (history.flatten(2) != 0xFF).nonzero()
    allowed = set()
    for block, row in ((2, 7), (5, 127), (3, 0)):
        for start, size in (
            (layout.key_codes, 16),
            (layout.value_codes, 16),
            (layout.key_meta, 4),
            (layout.value_meta, 4),
        ):
            allowed |= {(block, h, start + row * size + b) for h in range(heads) for b in range(size)}
    assert {tuple(place) for place in changed.tolist()} <= allowed
    assert len(changed) > 0.8 * len(allowed)  # a code byte may be 0xFF by itself
    written = window.isfinite().any(-1).nonzero().tolist()
    assert written == [[4, 0, 3], [4, 1, 3]], "slots of the null block and padding are skipped"


def test_write_stores_the_centered_transformed_rows() -> None:
    heads, dim = 2, 64
    history, window = poisoned(4, heads, dim)
    recipe = random_recipe(heads, dim, torch.Generator().manual_seed(1))
    key, value = torch.randn(1, heads, dim), torch.randn(1, heads, dim)
    write_reference(key, value, history, window, torch.tensor([128]), torch.tensor([16]), recipe)
    for head in range(heads):
        k = (key[0, head].double() - recipe.key_mean[head].double()) @ recipe.key[head].double()
        v = (value[0, head].double() - recipe.value_mean[head].double()) @ recipe.value[head].double()
        assert relative(window[1, head, 0], torch.cat([k, v])) < 1e-6
    view = cache_of(history, window, 1, window_blocks=[0])
    keys, values = gather_reference(view, 0, 1)
    stored = torch.cat([window[1, :, :1, :dim], window[1, :, :1, dim:]], 1)
    read = torch.cat([keys[0], values[0]], 1)
    step = (stored.amax(-1) - stored.amin(-1)) / 3
    assert bool(((read - stored).abs() <= 0.505 * step[..., None]).all())


def test_write_of_padding_only_changes_nothing() -> None:
    history, window = poisoned(2, 1, 64)
    rows = torch.randn(3, 1, 64)
    recipe = random_recipe(1, 64, torch.Generator())
    write_reference(rows, rows, history, window, torch.full((3,), -1), torch.tensor([16, 17, 18]), recipe)
    assert bool((history == 0xFF).all())
    assert bool(window.isnan().all())


# Reading


def cache_of(
    history: torch.Tensor, window: torch.Tensor, length: int, *, window_blocks: list[int], new: int = 1, **sizes: int
) -> CacheView:
    """One request over blocks 1, 2, ... of the history."""
    pages = -(-length // 128)
    return CacheView(
        history=history,
        window=window,
        block_table=torch.arange(1, pages + 1, dtype=torch.int32)[None],
        window_table=torch.tensor([window_blocks], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        query_start=torch.tensor([0, new], dtype=torch.int32),
        sink=sizes.get("sink", 64),
        recent=sizes.get("recent", 256),
    )


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 causal attention: query [N, Hq, D] at positions offset.. over keys, values [T, H, D]; output and lse."""
    group = query.shape[1] // keys.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (query, keys, values))
    scores = q @ k.repeat_interleave(group, 0).mT * scale
    seen = torch.arange(keys.shape[0]) <= torch.arange(query.shape[0])[:, None] + offset
    scores = scores.masked_fill(~seen, -INF)
    output = scores.softmax(-1) @ v.repeat_interleave(group, 0)
    return output.transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def check_attend(case: Any, limit: float = 2e-5) -> None:
    """attend_reference of a random batch against float64 over the rows that the reading rule selects."""
    out = torch.full(case.query.shape, 7.0)
    lse = torch.full(case.query.shape[:2], 7.0)
    attend_reference(case.query, case.view, case.recipe, case.scale, max_query_len=case.max_query_len, out=out, lse=lse)
    starts = case.view.query_start.tolist()
    matrix = case.recipe.query.double().repeat_interleave(case.query.shape[1] // case.recipe.query.shape[0], 0)
    for request, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        rows = slice(starts[request], starts[request + 1])
        if rows.start == rows.stop:
            continue
        query = torch.einsum("nhd,hde->nhe", case.query[rows].double(), matrix)
        output, total = attention(query, keys, values, case.scale, keys.shape[0] - query.shape[0])
        group = query.shape[1] // keys.shape[1]
        back = case.recipe.output.double().repeat_interleave(group, 0)
        expected = torch.einsum("nhd,hde->nhe", output, back)
        expected += case.recipe.value_mean.double().repeat_interleave(group, 0)
        assert relative(out[rows], expected) < limit
        torch.testing.assert_close(lse[rows].double(), total, rtol=1e-5, atol=1e-5)
    assert bool((out[starts[-1] :] == 7.0).all()), "rows of no request are left alone"


@pytest.mark.parametrize("dim", [64, 128], ids="D{}".format)
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 65, 127, 128, 129, 319, 320, 321, 400, 1037])
def test_attend_at_odd_lengths(length: int, dim: int) -> None:
    check_attend(random_case([length], dim=dim, seed=length))


@pytest.mark.parametrize("heads", [1, 3], ids="H{}".format)
@pytest.mark.parametrize("group", [1, 3, 5, 7], ids="G{}".format)
def test_attend_with_head_groups(group: int, heads: int) -> None:
    check_attend(random_case([450, 70, 1], heads=heads, group=group, seed=group))


@pytest.mark.parametrize("new", range(1, 9), ids="{} new".format)
def test_attend_with_several_query_tokens_is_causal(new: int) -> None:
    check_attend(random_case([600, new, 129], new=new, heads=2, group=2, seed=new))
    check_attend(random_case([400, 350, 8, 0], new=[new, 1, min(new, 3), 0], seed=new, max_query_len=8))


@pytest.mark.parametrize("new", [1, 4], ids="{} new".format)
@pytest.mark.parametrize("missing", [0.0, 0.5, 1.0], ids="{} null".format)
@pytest.mark.parametrize(
    ("sink", "recent"), [(0, 0), (64, 256), (16, 32), (0, 48), (32, 0), (512, 512)], ids=lambda v: str(v)
)
def test_attend_with_windows(sink: int, recent: int, missing: float, new: int) -> None:
    check_attend(random_case([500, 33, 17, 260], new, sink=sink, recent=recent, missing=missing, seed=sink + recent))


@pytest.mark.parametrize("lengths", [[0], [0, 0], [0, 200, 0, 5, 0]], ids=str)
def test_attend_skips_padding_rows(lengths: list[int]) -> None:
    check_attend(random_case(lengths, heads=2, seed=3))


def test_attend_over_caches_with_gaps_between_blocks_and_heads() -> None:
    check_attend(random_case([300, 40], heads=2, strided=True, seed=4))


@pytest.mark.parametrize("tile", [1, 3 * 64 * 2 * 128 * 2 * 2], ids=["page by page", "two pages"])
def test_attend_in_tiles(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    monkeypatch.setattr(decode, "TILE_ELEMENTS", tile)
    check_attend(random_case([1000, 10, 513], new=2, heads=2, missing=0.3, seed=5))


def test_attend_reads_a_stale_entry_of_neither_table() -> None:
    """A worker keeps the ids of freed blocks: rows 64..127 are in no window of a request of 400 tokens."""
    case = random_case([400], sink=16, recent=32, seed=6)
    assert bool((case.view.window_table[0, 1:8] != 0).any()), "the batch has stale entries to step over"
    case.view.window_table[0, 2:20] = 1
    check_attend(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_attend_writes_the_type_of_its_output(dtype: torch.dtype) -> None:
    case = random_case([90], dtype=dtype, seed=7)
    exact = torch.empty(case.query.shape)
    rounded = torch.empty(case.query.shape, dtype=dtype)
    for out in (exact, rounded):
        attend_reference(case.query, case.view, case.recipe, case.scale, max_query_len=1, out=out)
    assert torch.equal(rounded[:1], exact[:1].to(dtype))


def test_a_nan_in_one_request_stays_there() -> None:
    case = random_case([200, 200], heads=2, seed=8)
    clean = torch.zeros(case.query.shape)
    attend_reference(case.query, case.view, case.recipe, case.scale, max_query_len=1, out=clean)
    case.view.window[case.view.window_table[0, 12], 1] = NAN
    out = torch.zeros(case.query.shape)
    attend_reference(case.query, case.view, case.recipe, case.scale, max_query_len=1, out=out)
    assert bool(out[0, 4:].isnan().all()), "a poisoned key poisons its own head"
    assert torch.equal(out[1], clean[1])
    assert torch.equal(out[0, :4], clean[0, :4])


@pytest.mark.parametrize("missing", [0.0, 0.4], ids="{} null".format)
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 128), (5, 700), (127, 129), (300, 301), (0, 700)], ids=lambda v: str(v)
)
def test_gather_reads_what_the_rule_selects(start: int, stop: int, missing: float) -> None:
    case = random_case([700, 400, 0, 129], new=[3, 1, 0, 8], heads=2, missing=missing, seed=start + stop)
    keys, values = gather_reference(case.view, start, stop)
    for request, length in enumerate(case.view.seq_lens.tolist()):
        for read, expected in ((keys, case.keys), (values, case.values)):
            inside = expected[request][start : min(stop, length)]
            rows = read[request].transpose(0, 1)
            torch.testing.assert_close(rows[: len(inside)].double(), inside, rtol=1e-6, atol=1e-6)
            assert not rows[len(inside) :].any(), "positions past the end are zero, whatever the memory holds"


# Merging


def test_merge_of_disjoint_sets_is_attention_over_their_union() -> None:
    query, keys, values = torch.randn(3, 2, 64).double(), torch.randn(90, 2, 64), torch.randn(90, 2, 64)
    parts = []
    for rows in (slice(0, 1), slice(1, 40), slice(40, 90)):
        parts.append(attention(query, keys[rows], values[rows], 0.3, 1000))
    output, lse = merge_partials(parts)
    expected, total = attention(query, keys, values, 0.3, 1000)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, total, rtol=1e-12, atol=1e-12)


def test_merge_ignores_what_an_empty_set_holds() -> None:
    part = (torch.randn(4, 8), torch.randn(4))
    empty = (torch.full((4, 8), NAN), torch.full((4,), -INF))
    output, lse = merge_partials([empty, part, empty])
    torch.testing.assert_close(output, part[0])
    torch.testing.assert_close(lse, part[1])


def test_merge_of_nothing_is_zero() -> None:
    empty = (torch.full((4, 8), NAN), torch.full((4,), -INF))
    output, lse = merge_partials([empty, empty])
    assert not output.any()
    assert bool((lse == -INF).all())


def test_merge_of_far_apart_sets_does_not_overflow() -> None:
    near, far = (torch.ones(1, 8), torch.tensor([1000.0])), (torch.full((1, 8), 5.0), torch.tensor([-1000.0]))
    output, lse = merge_partials([far, near])
    assert torch.equal(output, near[0])
    assert torch.equal(lse, near[1])


def test_merge_keeps_a_nan() -> None:
    output, _ = merge_partials([(torch.full((1, 8), NAN), torch.tensor([NAN])), (torch.ones(1, 8), torch.zeros(1))])
    assert bool(output.isnan().all()), "an error upstream is not hidden"


def test_map_back_undoes_the_value_transform() -> None:
    recipe = random_recipe(2, 64, torch.Generator().manual_seed(2))
    value = torch.randn(5, 2, 64).double()
    stored = torch.einsum("thd,hde->the", value - recipe.value_mean.double(), recipe.value.double())
    back = map_back(stored.float().repeat_interleave(3, 1), recipe)
    assert relative(back, value.repeat_interleave(3, 1)) < 1e-5


# Prefill


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
