"""PyTorch twin of the write kernel: center, transform, clip, quantize, pack, store; and the window rows."""

import torch

from oscar_vllm.cache.layout import (
    FP16_MAX,
    LEVELS,
    MAX_VALUE_SCALE,
    PAGE_TOKENS,
    WINDOW_TOKENS,
    PageLayout,
    pack_codes,
)
from oscar_vllm.kernels.views import LayerRecipe


def transform_rows(x: torch.Tensor, matrix: torch.Tensor, mean: torch.Tensor | None = None) -> torch.Tensor:
    """``(x - mean[h]) @ matrix[h]`` in float32: x [T, H, D], matrix [H, D, D], mean [H, D] -> [T, H, D]."""
    rows = x.float() if mean is None else x.float() - mean
    return torch.bmm(rows.transpose(0, 1), matrix).transpose(0, 1)


def clip_rows(x: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """Clamp every row of x [T, H, D] to its own ``sorted |x|[min(int(ratio[h] * D), D - 1)]``; ratio [H]."""
    last = x.shape[-1] - 1
    index = (ratio.double() * x.shape[-1]).long().clamp(max=last)
    if bool((index == last).all()):
        return x
    largest = x.abs().topk(x.shape[-1] - int(index.min()), dim=-1).values  # descending
    threshold = largest.gather(-1, (last - index)[None, :, None].expand(x.shape[0], -1, 1))
    return torch.minimum(torch.maximum(x, -threshold), threshold)


def _assign(x: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    step = torch.where(scale > 0, scale, 1.0)
    codes = ((x - minimum) / step + 0.5).floor().clamp(0, LEVELS - 1)
    return torch.where(scale > 0, codes, 0.0)


STEP, OUTLYING = 0.95, 9.0
"""In standard deviations of a row: the step that its levels start with (0.996 is best for a Gaussian; the refit gets
there sooner from below), and the range from which on a few elements stand so far out that the range is the better
start."""


def _moments(x: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum about the mean of every row, or those of its range where that is wide."""
    mean = x.mean(-1, keepdim=True)
    deviation = (x - mean).square().mean(-1, keepdim=True).sqrt()
    # A deviation that overflowed or underflowed says nothing.
    close = ((LEVELS - 1) * scale < OUTLYING * deviation) & torch.isfinite(deviation)
    step = STEP * deviation
    return torch.where(close, step, scale), torch.where(close, mean - (LEVELS - 1) / 2 * step, minimum)


def quantize(
    x: torch.Tensor,
    clip: torch.Tensor,
    gain: torch.Tensor,
    rounds: int,
    most: torch.Tensor | None = None,
    moments: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two-bit codes of transformed rows (DESIGN: clip, range or moments, least-squares refit, gain about the middle).

    Args:
        x: [T, H, D] float32 rows.
        clip: [H] clip ratios.
        gain: [H] factor on the final step, about the middle of the four levels.
        rounds: least-squares refits of scale and minimum to the codes.
        most: [H] largest scale (FP16's largest number by default): a row that needs more keeps the middle of its levels
            and saturates on both sides.
        moments: start from the mean and the standard deviation of a row: nearer to where the refit ends than the range
            (rotated rows are nearly Gaussian), so that two rounds do what takes four from the range.

    Returns:
        codes [T, H, D] float32 in 0..3, scale [T, H] fp16, minimum [T, H] fp16. A row that is not finite gets NaN scale
        and minimum and codes 0, so that it reads as NaN and nothing else does.
    """
    x = clip_rows(x, clip)
    minimum, maximum = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = (maximum - minimum) / (LEVELS - 1)
    if moments:
        scale, minimum = _moments(x, scale, minimum)
    for _ in range(rounds):
        codes = _assign(x, scale, minimum)
        centered = codes - codes.mean(-1, keepdim=True)
        fitted = (centered * x).sum(-1, keepdim=True) / (centered * centered).sum(-1, keepdim=True)
        keep = ~(fitted > 0)  # no variance in the codes gives NaN, which is not > 0 either
        offset = x.mean(-1, keepdim=True) - fitted * codes.mean(-1, keepdim=True)
        scale, minimum = torch.where(keep, scale, fitted), torch.where(keep, minimum, offset)
    finite = torch.isfinite(scale) & torch.isfinite(minimum)
    narrowed = (FP16_MAX if most is None else most[:, None]) / gain[:, None]
    wide = scale > narrowed
    minimum = torch.where(wide, minimum + (LEVELS - 1) / 2 * (scale - narrowed), minimum)
    scale = torch.where(wide, narrowed, scale)
    codes = _assign(x, scale, minimum)
    middle = minimum + (LEVELS - 1) / 2 * scale
    scale = scale * gain[:, None]
    minimum = middle - (LEVELS - 1) / 2 * scale
    nan = torch.full_like(scale, torch.nan)
    scale = torch.where(finite, scale.clamp(max=FP16_MAX), nan)
    minimum = torch.where(finite, minimum.clamp(-FP16_MAX, FP16_MAX), nan)
    codes = torch.where(finite, codes, 0.0)
    return codes, scale.squeeze(-1).half(), minimum.squeeze(-1).half()


def dequantize(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    """codes [..., D] and fp16 scale, minimum [...] -> float32 rows [..., D]."""
    return codes * scale.float().unsqueeze(-1) + minimum.float().unsqueeze(-1)


def write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
    recipe: LayerRecipe,
) -> None:
    """Write new tokens into both caches.

    Args:
        key: [T, H, D] raw post-RoPE keys.
        value: [T, H, D] raw values.
        history: [blocks, H, PAGE_TOKENS, D/2 + 8] uint8 pages.
        window: [blocks, H, WINDOW_TOKENS, 2 * D] rows of the model's dtype, K then V.
        slots: [T] int64 history slots (block * PAGE_TOKENS + row); padding (-1) and block 0 are skipped.
        window_slots: [T] int64 window slots (block * WINDOW_TOKENS + row); padding and block 0 are skipped.
        recipe: the layer's transforms.
    """
    heads, dim = key.shape[1:]
    layout = PageLayout(dim)
    live = slots >= PAGE_TOKENS
    windowed = live & (window_slots >= WINDOW_TOKENS)
    if not bool(live.all()):
        key, value, slots = key[live], value[live], slots[live]
        window_slots, windowed = window_slots[live], windowed[live]
    if slots.numel() == 0:
        return
    rows = torch.stack(
        [
            transform_rows(key, recipe.key, recipe.key_mean),
            transform_rows(value, recipe.value, recipe.value_mean),
        ],
        1,
    )  # [T, 2, H, D]
    codes, scale, minimum = quantize(
        rows.flatten(1, 2),
        torch.cat([recipe.key_clip, recipe.value_clip]),
        torch.cat([recipe.key_gain, recipe.value_gain]),
        recipe.rounds,
        torch.cat([torch.full_like(recipe.key_clip, FP16_MAX), torch.full_like(recipe.value_clip, MAX_VALUE_SCALE)]),
        recipe.moments,
    )
    packed = pack_codes(codes).unflatten(1, (2, heads))
    meta = torch.stack([scale, minimum], -1).view(torch.uint8).unflatten(1, (2, heads))
    pages = history.flatten(2)  # [blocks, H, page bytes]: a head's page is contiguous
    block = (slots // PAGE_TOKENS)[:, None, None]
    token = (slots % PAGE_TOKENS)[:, None, None]
    head = torch.arange(heads, device=key.device)[None, :, None]
    code = torch.arange(layout.code_bytes, device=key.device)
    byte = torch.arange(meta.shape[-1], device=key.device)
    for part, (codes_at, meta_at) in enumerate(
        ((layout.key_codes, layout.key_meta), (layout.value_codes, layout.value_meta))
    ):
        pages[block, head, codes_at + token * layout.code_bytes + code] = packed[:, part]
        pages[block, head, meta_at + token * meta.shape[-1] + byte] = meta[:, part]
    if bool(windowed.any()):
        slot = window_slots[windowed]
        both = torch.cat([rows[windowed, 0], rows[windowed, 1]], -1).to(window.dtype)
        window[slot // WINDOW_TOKENS, :, slot % WINDOW_TOKENS] = both
