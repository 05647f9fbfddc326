"""PyTorch twin of decode attention: INT2 history and window cache as two segments, merged by log-sum-exp."""

import torch

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS
from oscar_vllm.kernels.context.reference import unpack_pages, window_valid
from oscar_vllm.kernels.merge.reference import map_back, merge_partials
from oscar_vllm.kernels.transform.reference import transform_queries_reference
from oscar_vllm.kernels.views import CacheView, LayerRecipe

TILE_ELEMENTS = 1 << 24
"""Unpacked elements of K and V that one step over the history may hold: bounds memory, not by the context."""


def _softmax(scores: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and log-sum-exp over the last axis of scores where mask; rows without a key give 0 and -inf."""
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    probabilities = (scores - torch.where(torch.isneginf(lse), 0.0, lse).unsqueeze(-1)).exp()
    return probabilities, lse


def _history_segment(
    query: torch.Tensor, view: CacheView, limit: torch.Tensor, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the INT2 rows of positions ``start .. stop - 1`` that the window does not hold.

    query [R, H, N, G, D] transformed and scaled, limit [R, N] keys each query token sees; returns output
    [R, H, N, G, D] and log-sum-exp [R, H, N, G].
    """
    dim = query.shape[-1]
    positions = torch.arange(start, stop, device=query.device)
    valid, _ = window_valid(view, positions)
    from_history = (positions < view.seq_lens[:, None]) & ~valid
    mask = from_history[:, None] & (positions < limit.unsqueeze(-1))  # [R, N, T]
    columns = slice(start // PAGE_TOKENS, stop // PAGE_TOKENS)
    live = positions[::PAGE_TOKENS] < view.seq_lens[:, None]
    blocks = torch.where(live, view.block_table[:, columns], 0).long()
    requests, pages = blocks.shape
    codes, scale, minimum = unpack_pages(view.history.flatten(2)[blocks.flatten()], dim)
    heads = codes.shape[2]

    def by_head(x: torch.Tensor) -> torch.Tensor:  # [2, R * pages, H, P, ...] -> [2, R, H, T, ...]
        return x.unflatten(1, (requests, pages)).transpose(2, 3).flatten(3, 4)

    # Rows the mask drops may hold anything, NaN included: zero their meta so that 0 * garbage never arises.
    keep = from_history[None, :, None]
    scale = by_head(scale).masked_fill(~keep, 0.0)
    minimum = by_head(minimum).masked_fill(~keep, 0.0)
    codes = by_head(codes)
    flat = query.flatten(2, 3)  # [R, H, N * G, D]
    scores = (flat @ codes[0].transpose(-1, -2)) * scale[0].unsqueeze(2)
    scores = scores + flat.sum(-1, keepdim=True) * minimum[0].unsqueeze(2)
    scores = scores.unflatten(2, query.shape[2:4])
    probabilities, lse = _softmax(scores, mask[:, None, :, None].expand(-1, heads, -1, query.shape[3], -1))
    probabilities = probabilities.flatten(2, 3)
    output = (probabilities * scale[1].unsqueeze(2)) @ codes[1]
    output = output + probabilities @ minimum[1].unsqueeze(-1)
    return output.unflatten(2, query.shape[2:4]), lse


def _window_segment(
    query: torch.Tensor, view: CacheView, limit: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention over the positions that the window cache holds; shapes as in :func:`_history_segment`."""
    dim = query.shape[-1]
    new = view.query_start[1:] - view.query_start[:-1]
    sink_blocks = view.sink // WINDOW_TOKENS
    # The recent segment and this step's own tokens: a fixed number of blocks that covers every request.
    last = (view.seq_lens - 1).clamp(min=0) // WINDOW_TOKENS
    span = -(-(view.recent + int(new.max())) // WINDOW_TOKENS) + 1
    recent = last[:, None] - torch.arange(span - 1, -1, -1, device=query.device)
    sink = torch.arange(sink_blocks, device=query.device).expand(len(last), -1)
    column = torch.cat([sink, recent.masked_fill(recent < sink_blocks, -1)], 1)
    exists = (column >= 0) & (column <= last[:, None])
    column = column.clamp(min=0, max=view.window_table.shape[1] - 1)
    positions = column[..., None] * WINDOW_TOKENS + torch.arange(WINDOW_TOKENS, device=query.device)
    valid, _ = window_valid(view, positions.flatten(1))
    valid &= exists.repeat_interleave(WINDOW_TOKENS, 1)
    if not bool(valid.any()):
        return None
    mask = valid[:, None] & (positions.flatten(1)[:, None] < limit.unsqueeze(-1))  # [R, N, T]
    blocks = torch.where(exists, view.window_table.gather(1, column.long()), 0).long()
    rows = view.window[blocks].transpose(1, 2).flatten(2, 3).float()  # [R, H, T, 2 * D]
    rows = rows.masked_fill(~valid[:, None, :, None], 0.0)
    flat = query.flatten(2, 3)
    scores = (flat @ rows[..., :dim].transpose(-1, -2)).unflatten(2, query.shape[2:4])
    probabilities, lse = _softmax(scores, mask[:, None, :, None].expand_as(scores))
    output = probabilities.flatten(2, 3) @ rows[..., dim:]
    return output.unflatten(2, query.shape[2:4]), lse


def attend_reference(
    query: torch.Tensor,
    view: CacheView,
    recipe: LayerRecipe,
    scale: float,
    *,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of a batch of decodes over everything in the caches, this step's tokens included.

    Args:
        query: [T, Hq, D] raw post-RoPE queries, the tokens of R requests in order; token i of the n of a request sees
            positions below ``length - n + i + 1``.
        view: the caches and tables of the R requests; no request has more than ``max_query_len`` query tokens.
        recipe: the layer's transforms.
        scale: softmax scale.
        max_query_len: most query tokens of a request.
        out: [T, Hq, D], written in its own dtype (rows of no request are left alone).
        lse: [T, Hq] float32 natural log-sum-exp of the centered scores, written where given.
    """
    requests = view.seq_lens.shape[0]
    heads = recipe.key.shape[0]
    tokens, query_heads, dim = query.shape
    new = view.query_start[1:] - view.query_start[:-1]
    step = torch.arange(max_query_len, device=query.device)
    active = step < torch.where(view.seq_lens > 0, new, 0)[:, None]  # [R, N]
    index = (view.query_start[:-1, None] + step).clamp(max=tokens - 1)
    padded = transform_queries_reference(query, recipe.query)[index] * scale
    padded = padded.unflatten(2, (heads, -1)).transpose(1, 2)  # [R, H, N, G, D]
    limit = torch.where(active, (view.seq_lens - new)[:, None] + step + 1, 0)
    tile = max(1, TILE_ELEMENTS // (requests * heads * dim * 2 * PAGE_TOKENS)) * PAGE_TOKENS
    end = -(-int(view.seq_lens.max()) // PAGE_TOKENS) * PAGE_TOKENS
    parts = [_history_segment(padded, view, limit, at, min(at + tile, end)) for at in range(0, end, tile)]
    window = _window_segment(padded, view, limit)
    if window is not None:
        parts.append(window)
    if not parts:
        return
    output, total = merge_partials(parts)
    output = output.transpose(1, 2).reshape(requests, -1, query_heads, dim)[active]
    out[index[active]] = map_back(output, recipe).to(out.dtype)
    if lse is not None:
        lse[index[active]] = total.transpose(1, 2).reshape(requests, -1, query_heads)[active]
