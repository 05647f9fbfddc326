"""The PyTorch twins against the definitions they implement, in float64."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from kernels.caches import attend_float64, random_case, random_recipe
from twin_caches import INF, NAN, attention, cache_of, poisoned, relative

import oscar_vllm.kernels.decode.reference as decode
from oscar_vllm.cache.layout import PageLayout
from oscar_vllm.kernels.context.reference import gather_reference
from oscar_vllm.kernels.decode.reference import attend_reference
from oscar_vllm.kernels.merge.reference import map_back, merge_partials
from oscar_vllm.kernels.write.reference import write_reference

pytestmark = pytest.mark.usefixtures("one_seed_and_thread")


# Writing


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


def check_attend(case: Any, limit: float = 2e-5) -> None:
    """attend_reference of a random batch against float64 over the rows that the reading rule selects."""
    out = torch.full(case.query.shape, 7.0)
    lse = torch.full(case.query.shape[:2], 7.0)
    attend_reference(case.query, case.view, case.recipe, case.scale, max_query_len=case.max_query_len, out=out, lse=lse)
    expected, total = attend_float64(case)
    starts = case.view.query_start.tolist()
    for rows in (slice(start, stop) for start, stop in pairwise(starts) if stop > start):
        assert relative(out[rows], expected[rows]) < limit
        torch.testing.assert_close(lse[rows].double(), total[rows], rtol=1e-5, atol=1e-5)
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
