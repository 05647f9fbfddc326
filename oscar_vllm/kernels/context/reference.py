"""PyTorch twin of the context kernel: cached tokens as plain rows, from the window where valid, else from INT2."""

import torch

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout, unpack_codes
from oscar_vllm.kernels.views import CacheView


def window_valid(view: CacheView, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which positions of each request the window cache holds.

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


def unpack_pages(pages: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """INT2 pages as codes and meta.

    Args:
        pages: [N, H, page bytes] uint8.
        dim: head size D.

    Returns:
        codes [2, N, H, PAGE_TOKENS, D] float32 (K, V), and scale and minimum, each [2, N, H, PAGE_TOKENS] float32.
    """
    layout = PageLayout(dim)
    codes, meta = pages.split([layout.key_meta, layout.page_bytes - layout.key_meta], -1)
    codes = codes.unflatten(-1, (2, PAGE_TOKENS, layout.code_bytes)).permute(2, 0, 1, 3, 4)
    meta = meta.contiguous().view(torch.float16).unflatten(-1, (2, PAGE_TOKENS, 2)).permute(2, 0, 1, 3, 4).float()
    return unpack_codes(codes), meta[..., 0], meta[..., 1]


def gather_reference(view: CacheView, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of positions ``start .. stop - 1`` of every request of the view, in transformed space.

    Positions at or past a request's length are zero. ``start`` and ``stop`` are multiples of PAGE_TOKENS, or ``stop``
    is the last position wanted.

    Returns:
        keys and values, each [R, H, stop - start, D] float32.
    """
    dim = view.window.shape[-1] // 2
    first, last = start // PAGE_TOKENS, -(-stop // PAGE_TOKENS)
    columns = torch.arange(first, last, device=view.history.device)
    held = columns * PAGE_TOKENS < view.seq_lens[:, None]
    blocks = torch.where(held, view.block_table[:, first:last], 0).long()
    codes, scale, minimum = unpack_pages(view.history.flatten(2)[blocks].flatten(0, 1), dim)
    rows = torch.addcmul(minimum.unsqueeze(-1), codes, scale.unsqueeze(-1))
    requests, heads = blocks.shape[0], rows.shape[2]
    rows = rows.view(2, requests, last - first, heads, PAGE_TOKENS, dim).transpose(2, 3).flatten(3, 4)
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
