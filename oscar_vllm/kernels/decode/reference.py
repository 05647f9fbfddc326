"""PyTorch twin of decode attention: INT2 history and window cache as two segments, merged by log-sum-exp."""

from typing import NamedTuple

import torch

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS
from oscar_vllm.kernels.context.reference import unpack_pages, window_valid
from oscar_vllm.kernels.merge.reference import map_back, merge_partials
from oscar_vllm.kernels.transform.reference import transform_queries_reference
from oscar_vllm.kernels.views import CacheView, LayerRecipe

TILE_ELEMENTS = 1 << 24
"""Unpacked elements of K and V that one step over the history may hold: bounds memory, not by the context."""


class DecodePlan(NamedTuple):
    """What every layer of a step shares: which query tokens and which cached positions there are."""

    active: torch.Tensor
    """[R, N] bool, query tokens that exist (N = max_query_len)."""
    row: torch.Tensor
    """[R, N] int64 row of each query token, in range also where it does not exist."""
    end: int
    """Longest request, up to whole pages."""
    blocks: torch.Tensor
    """[R, end / PAGE_TOKENS] int64 history blocks, 0 past a request's last."""
    unread: torch.Tensor
    """[R, end] bool, positions that no query token reads from INT2."""
    hidden: torch.Tensor
    """[R, N, end] bool, positions that a query token does not read from INT2: not seen, or held by its window."""
    window_blocks: torch.Tensor
    """[R, W] int64 window blocks that cover sink, recent and this step's own tokens."""
    window_unread: torch.Tensor
    """[R, W * WINDOW_TOKENS] bool, rows of those blocks that no query token reads."""
    window_hidden: torch.Tensor
    """[R, N, W * WINDOW_TOKENS] bool, rows of those blocks that a query token does not read."""


def plan_decode(view: CacheView, max_query_len: int, tokens: int) -> DecodePlan:
    """The plan of a step over ``view`` (its caches are not looked at) with ``tokens`` query rows."""
    device = view.seq_lens.device
    lengths = view.seq_lens.long()
    new = torch.where(lengths > 0, view.query_start[1:] - view.query_start[:-1], 0).long()
    step = torch.arange(max_query_len, device=device)
    active = step < new[:, None]
    row = (view.query_start[:-1, None].long() + step).clamp(max=tokens - 1)
    limit = torch.where(active, (lengths - new)[:, None] + step + 1, 0).unsqueeze(-1)

    def read_from_window(positions: torch.Tensor) -> torch.Tensor:
        """[R, N, P] of positions [P] or [R, P]: what the first token's window holds, as far as a token's reaches."""
        valid, _ = window_valid(view, positions)
        positions = positions.expand(valid.shape)[:, None]
        return valid[:, None] & ((positions < view.sink) | (positions >= limit - 1 - view.recent))

    pages = -(-int(lengths.max()) // PAGE_TOKENS)
    positions = torch.arange(pages * PAGE_TOKENS, device=device)
    blocks = torch.where(positions[::PAGE_TOKENS] < lengths[:, None], view.block_table[:, :pages], 0).long()
    sink_blocks = view.sink // WINDOW_TOKENS
    # The recent segment and this step's own tokens: a fixed number of blocks that covers every request.
    last = (lengths - 1).clamp(min=0) // WINDOW_TOKENS
    span = -(-(view.recent + max_query_len) // WINDOW_TOKENS) + 1
    recent = last[:, None] - torch.arange(span - 1, -1, -1, device=device)
    sink = torch.arange(sink_blocks, device=device).expand(len(last), -1)
    column = torch.cat([sink, recent.masked_fill(recent < sink_blocks, -1)], 1)
    exists = (column >= 0) & (column <= last[:, None])
    column = column.clamp(min=0, max=view.window_table.shape[1] - 1)
    window_positions = (column[..., None] * WINDOW_TOKENS + torch.arange(WINDOW_TOKENS, device=device)).flatten(1)
    hidden = read_from_window(positions) | (positions >= limit)
    window_hidden = ~read_from_window(window_positions) | (window_positions[:, None] >= limit)
    window_hidden |= ~exists.repeat_interleave(WINDOW_TOKENS, 1)[:, None]
    return DecodePlan(
        active=active,
        row=row,
        end=pages * PAGE_TOKENS,
        blocks=blocks,
        unread=hidden.all(1),
        hidden=hidden,
        window_blocks=torch.where(exists, view.window_table.gather(1, column), 0).long(),
        window_unread=window_hidden.all(1),
        window_hidden=window_hidden,
    )


def _softmax(scores: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and log-sum-exp over the last axis of scores [R, H, N, G, T] but for hidden [R, N, T].

    Rows without a key give probabilities 0 and log-sum-exp -inf. ``scores`` is overwritten.
    """
    scores.masked_fill_(hidden[:, None, :, None], -torch.inf)
    top = scores.amax(-1, keepdim=True)
    # A NaN in a row stays in that row's result.
    probabilities = scores.sub_(top.masked_fill(top.isneginf(), 0.0)).exp_()
    total = probabilities.sum(-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1)
    return probabilities.div_(total.masked_fill(total == 0, 1.0)), lse


def _history_segment(
    query: torch.Tensor, view: CacheView, plan: DecodePlan, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the INT2 rows among positions ``start .. stop - 1`` (whole pages).

    query [R, H, N, G, D] transformed and scaled; returns output [R, H, N, G, D] and log-sum-exp [R, H, N, G].
    """
    tokens = query.shape[2:4]
    blocks = plan.blocks[:, start // PAGE_TOKENS : stop // PAGE_TOKENS]
    codes, scale, minimum = unpack_pages(view.history, blocks, query.shape[-1])
    # Rows that are not read may hold anything, NaN included: zero their meta so that 0 * garbage never arises.
    unread = plan.unread[None, :, None, start:stop]
    scale.masked_fill_(unread, 0.0)
    minimum.masked_fill_(unread, 0.0)
    flat = query.flatten(2, 3)  # [R, H, N * G, D]
    scores = (flat @ codes[0].transpose(-1, -2)) * scale[0].unsqueeze(2)
    scores.addcmul_(flat.sum(-1, keepdim=True), minimum[0].unsqueeze(2))
    probabilities, lse = _softmax(scores.unflatten(2, tokens), plan.hidden[..., start:stop])
    probabilities = probabilities.flatten(2, 3)
    output = (probabilities * scale[1].unsqueeze(2)) @ codes[1]
    output += probabilities @ minimum[1].unsqueeze(-1)
    return output.unflatten(2, tokens), lse


def _window_segment(query: torch.Tensor, view: CacheView, plan: DecodePlan) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the rows that the window cache holds; shapes as in :func:`_history_segment`."""
    dim = query.shape[-1]
    rows = view.window[plan.window_blocks].transpose(1, 2).flatten(2, 3).float()  # [R, H, T, 2 * D]
    rows.masked_fill_(plan.window_unread[:, None, :, None], 0.0)
    flat = query.flatten(2, 3)
    scores = (flat @ rows[..., :dim].transpose(-1, -2)).unflatten(2, query.shape[2:4])
    probabilities, lse = _softmax(scores, plan.window_hidden)
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
    plan: DecodePlan | None = None,
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
        plan: :func:`plan_decode` of the same view, where a caller has it already for another layer.
    """
    requests, (tokens, query_heads, dim) = view.seq_lens.shape[0], query.shape
    if plan is None:
        plan = plan_decode(view, max_query_len, tokens)
    heads = recipe.key.shape[0]
    padded = transform_queries_reference(query, recipe.query)[plan.row] * scale
    padded = padded.unflatten(2, (heads, -1)).transpose(1, 2)  # [R, H, N, G, D]
    tile = max(1, TILE_ELEMENTS // (requests * heads * dim * 2 * PAGE_TOKENS)) * PAGE_TOKENS
    parts = [
        _history_segment(padded, view, plan, start, min(start + tile, plan.end)) for start in range(0, plan.end, tile)
    ]
    parts.append(_window_segment(padded, view, plan))
    output, total = merge_partials(parts)
    rows, kept = plan.row[plan.active], plan.active
    out[rows] = map_back(output.transpose(1, 2).reshape(requests, -1, query_heads, dim)[kept], recipe).to(out.dtype)
    if lse is not None:
        lse[rows] = total.transpose(1, 2).reshape(requests, -1, query_heads)[kept]
