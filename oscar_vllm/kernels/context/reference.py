"""PyTorch twin of the context kernel: cached tokens as plain rows, from the window where valid, else from INT2."""

import torch

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout, unpack_codes
from oscar_vllm.kernels.views import CacheView


def window_valid(view: CacheView, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions of each request the window cache holds for its first query token.

    Args:
        view: the caches and tables of R requests.
        positions: [N] or [R, N] token positions.

    Returns:
        (valid [R, N] bool, block ids [R, N] int64 of the window, 0 where not valid).
    """
    length = view.seq_lens[:, None]
    computed = length - (view.query_start[1:] - view.query_start[:-1])[:, None]
    inside = (positions < view.sink) | (positions >= computed - view.recent)
    column = (positions // WINDOW_TOKENS).clamp(max=view.window_table.shape[1] - 1)
    blocks = view.window_table.gather(1, column.expand(view.window_table.shape[0], -1).long()).long()
    valid = inside & (positions < length) & (blocks != 0)
    return valid, torch.where(valid, blocks, 0)


def unpack_pages(
    history: torch.Tensor, blocks: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The INT2 rows of some pages of each request, as codes and meta.

    Args:
        history: [blocks, H, PAGE_TOKENS, D/2 + 8] uint8.
        blocks: [R, N] int64 block ids.
        dim: head size D.

    Returns:
        codes [2, R, H, T, D] float32 (K, V; T = N * PAGE_TOKENS), and scale and minimum, each [2, R, H, T] float32.
    """
    layout = PageLayout(dim)
    pages = history.flatten(2)[blocks]  # [R, N, H, page bytes]
    codes, meta = pages.split([layout.key_meta, layout.page_bytes - layout.key_meta], -1)
    # Bytes are put in order before they grow to floats.
    codes = codes.unflatten(-1, (2, PAGE_TOKENS, -1)).permute(3, 0, 2, 1, 4, 5).flatten(3, 4)
    meta = meta.unflatten(-1, (2, PAGE_TOKENS, -1)).permute(3, 0, 2, 1, 4, 5).flatten(3, 4).contiguous()
    scale, minimum = meta.view(torch.float16).float().unbind(-1)
    return unpack_codes(codes), scale, minimum


def gather_reference(view: CacheView, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of positions ``start .. stop - 1`` of every request of the view, in transformed space.

    Positions at or past a request's length are zero.

    Returns:
        keys and values, each [R, H, stop - start, D] float32.
    """
    dim = view.window.shape[-1] // 2
    first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
    columns = torch.arange(first, last, device=view.history.device)
    held = columns * PAGE_TOKENS < view.seq_lens[:, None]
    blocks = torch.where(held, view.block_table[:, first:last], 0).long()
    codes, scale, minimum = unpack_pages(view.history, blocks, dim)
    rows = torch.addcmul(minimum.unsqueeze(-1), codes, scale.unsqueeze(-1))
    offset = start - first * PAGE_TOKENS
    rows = rows[..., offset : offset + stop - start, :]
    positions = torch.arange(start, stop, device=blocks.device)
    rows.masked_fill_((positions >= view.seq_lens[:, None])[:, None, :, None], 0.0)
    valid, window_blocks = window_valid(view, positions)
    request, column = valid.nonzero(as_tuple=True)
    if request.numel():
        exact = view.window[window_blocks[request, column], :, positions[column] % WINDOW_TOKENS].float()
        rows[0, request, :, column], rows[1, request, :, column] = exact[..., :dim], exact[..., dim:]
    return rows[0], rows[1]
