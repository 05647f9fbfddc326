"""Prefill on a GPU: exact attention inside the chunk, cached context in bounded tiles, combined by log-sum-exp."""

from typing import Any

import torch

from oscar_vllm.backend.context_plan import ContextTile, PrefillPlan, tile_tokens
from oscar_vllm.backend.flash import Flash
from oscar_vllm.kernels.combine.triton import combine_triton
from oscar_vllm.kernels.context.triton import gather_context_triton
from oscar_vllm.kernels.transform.triton import transform_queries_triton
from oscar_vllm.kernels.views import CacheView, LayerRecipe


def workspace_shapes(tokens: int, num_heads: int, num_kv_heads: int, head_size: int) -> list[tuple[int, ...]]:
    """Shapes of what :func:`prefill_cuda` borrows for chunks of ``tokens`` query tokens, all in the model's dtype:
    keys and values of a context tile, transformed queries, the running result and one tile's result."""
    tile = (tile_tokens(num_kv_heads, head_size), num_kv_heads, head_size)
    rows = (tokens, num_heads, head_size)
    return [tile, tile, rows, rows, rows]


def borrow_workspace(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Scratch tensors that vLLM counts when it profiles memory and shares between layers; contents undefined."""
    from vllm.v1.worker.workspace import current_workspace_manager

    workspace: list[Any] = current_workspace_manager().get_simultaneous(*((shape, dtype) for shape in shapes))
    return workspace


def _attend_tile(
    tile: ContextTile,
    view: CacheView,
    transformed: torch.Tensor,
    tile_key: torch.Tensor,
    tile_value: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    flash: Flash,
) -> torch.Tensor:
    """Attention of the tile's query tokens over its context, in transformed space, into out; log-sum-exp [Hq, T]."""
    key, value = tile_key[: tile.tokens], tile_value[: tile.tokens]
    gather_context_triton(view, tile.starts, tile.cu_tokens, tile.rows, key, value, tile.longest)
    rows = slice(tile.first_token, tile.last_token)
    return flash(
        transformed[rows],
        key,
        value,
        tile.cu_query,
        tile.cu_tokens,
        tile.longest_query,
        tile.longest,
        scale,
        False,
        out[rows],
    )


def prefill_cuda(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    view: CacheView,
    plan: PrefillPlan,
    recipe: LayerRecipe,
    scale: float,
    out: torch.Tensor,
    workspace: list[torch.Tensor],
    flash: Flash,
) -> None:
    """All prefills of a step: causal attention inside each chunk, raw and exact, and to its cached context.

    Args:
        query: [T, Hq, D] raw queries of the prefills' chunks.
        key: [T, H, D] raw keys.
        value: [T, H, D] raw values.
        view: the caches and tables of the whole batch.
        plan: the step's plan; its offsets count from the first of these T tokens.
        recipe: the layer's transforms.
        scale: softmax scale.
        out: [T, Hq, D], written in its own dtype.
        workspace: tensors of :func:`workspace_shapes` for T tokens or more; unused without context.
        flash: the attention inside, of raw rows and of unpacked ones.
    """
    lse = flash(
        query, key, value, plan.query_start, plan.query_start, plan.longest_query, plan.longest_query, scale, True, out
    )
    if not plan.tiles:
        return
    begin, end = plan.tiles[0].first_token, plan.tiles[-1].last_token
    context = slice(begin, end)
    tile_key, tile_value, transformed, running, partial = workspace
    transform_queries_triton(query[context], recipe.query, transformed[context])
    if len(plan.tiles) == 1:  # as most steps have it: nothing to combine
        running_lse = _attend_tile(plan.tiles[0], view, transformed, tile_key, tile_value, scale, running, flash)
    else:
        running_lse = lse.new_full((lse.shape[0], end - begin), -torch.inf)
        for tile in plan.tiles:
            rows = slice(tile.first_token, tile.last_token)
            among = slice(tile.first_token - begin, tile.last_token - begin)
            partial_lse = _attend_tile(tile, view, transformed, tile_key, tile_value, scale, partial, flash)
            combine_triton(running[rows], running_lse[:, among], partial[rows], partial_lse)
    # The tiles are done with the transformed queries: their place takes the outputs mapped back.
    transform_queries_triton(running[context], recipe.output, transformed[context])
    combine_triton(out[context], lse[:, context], transformed[context], running_lse, query[context], recipe, scale)
