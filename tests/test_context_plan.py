"""Cutting the context of prefills into workspace-sized tiles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscar_vllm.backend.context_plan import WORKSPACE_BYTES, cut_context, plan_prefill, tile_tokens

CONTEXTS = st.lists(st.integers(0, 1000), max_size=12)


@given(CONTEXTS, st.integers(1, 300))
def test_every_context_token_is_read_once_in_order_and_tiles_are_full(contexts: list[int], size: int) -> None:
    tiles = cut_context(contexts, size)
    pieces = [piece for tile in tiles for piece in tile]
    read = [(request, start + i) for request, start, count in pieces for i in range(count)]
    assert read == [(request, i) for request, context in enumerate(contexts) for i in range(context)]
    sizes = [sum(count for _, _, count in tile) for tile in tiles]
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert all(0 < s <= size for s in sizes)
    assert all(len({request for request, _, _ in tile}) == len(tile) for tile in tiles)


@pytest.mark.parametrize(
    ("heads", "dim", "tokens"), [(8, 128, 65536), (1, 64, 1048576), (8, 256, 32768), (3, 64, 349440)]
)
def test_a_tile_fits_the_workspace_in_whole_pages(heads: int, dim: int, tokens: int) -> None:
    assert tile_tokens(heads, dim) == tokens
    assert tokens * heads * dim * 4 <= WORKSPACE_BYTES


def test_a_page_larger_than_the_workspace_is_one_tile() -> None:
    assert tile_tokens(4096, 256) == 128


def test_plan_of_three_prefills_behind_two_decodes() -> None:
    plan = plan_prefill(2, [3, 13, 33, 43], [110, 20, 260], 128, torch.device("cpu"))
    assert (plan.first_token, plan.tokens, plan.longest_query) == (3, 40, 20)
    assert plan.query_start.tolist() == [0, 10, 30, 40]
    first, second, third = plan.tiles
    assert (first.rows.tolist(), first.starts.tolist(), first.cu_tokens.tolist()) == (
        [2, 3, 4],
        [0, 0, 0],
        [0, 100, 100, 128],
    )
    assert (first.first_token, first.last_token, first.cu_query.tolist()) == (0, 40, [0, 10, 30, 40])
    assert (first.tokens, first.longest, first.longest_query) == (128, 100, 20)
    assert (second.rows.tolist(), second.starts.tolist(), second.cu_tokens.tolist()) == ([4], [28], [0, 128])
    assert (second.first_token, second.last_token, second.cu_query.tolist()) == (30, 40, [0, 10])
    assert (third.starts.tolist(), third.cu_tokens.tolist(), third.longest) == ([156], [0, 94], 94)


def test_padding_requests_and_first_chunks_make_no_tile() -> None:
    plan = plan_prefill(0, [0, 8, 8], [8, 0], 128, torch.device("cpu"))
    assert plan.tiles == []
    assert plan.longest_query == 8
