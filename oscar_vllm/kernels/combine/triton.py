# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Two attention results over disjoint keys become one, in place, by log-sum-exp."""

import torch
import triton
import triton.language as tl

from oscar_vllm.kernels.launch import Launch, cdiv, next_power_of_2
from oscar_vllm.kernels.views import LayerRecipe

TILE_HEADS = 16


@triton.jit
def _finite(lse):
    """FlashAttention marks rows without keys by either infinity."""
    return tl.where(tl.abs(lse) == float("inf"), float("-inf"), lse)


# Slices of the rows move the pointers of the log-sum-exps: one compiled kernel must take them all.
@triton.jit(do_not_specialize=["lse_head", "part_lse_head"], do_not_specialize_on_alignment=["lse", "part_lse"])
def _combine_kernel(
    out, lse, part, part_lse, query, key_mean, value_mean, scale,
    out_token, out_head, part_token, part_head, query_token, query_head, lse_head, part_lse_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CENTERED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    live = head < HEADS
    channel = tl.arange(0, D)
    first = _finite(tl.load(lse + head * lse_head + token, mask=live, other=float("-inf")))
    second = _finite(tl.load(part_lse + head * part_lse_head + token, mask=live, other=float("-inf")))
    has_first = first > float("-inf")
    has_second = second > float("-inf")
    at = out + token * out_token + (head * out_head)[:, None] + channel[None, :]
    at_part = part + token * part_token + (head * part_head)[:, None] + channel[None, :]
    kept = tl.load(at, mask=has_first[:, None], other=0.0).to(tl.float32)
    added = tl.load(at_part, mask=has_second[:, None], other=0.0).to(tl.float32)
    if CENTERED:
        mean = (head // GROUP * D)[:, None] + channel[None, :]
        wanted = has_second[:, None]
        q = tl.load(
            query + token * query_token + (head * query_head)[:, None] + channel[None, :], mask=wanted, other=0.0
        )
        second += scale * tl.sum(q.to(tl.float32) * tl.load(key_mean + mean, mask=wanted, other=0.0), 1)
        added += tl.load(value_mean + mean, mask=wanted, other=0.0)
    top = tl.maximum(first, second)
    weight = tl.where(has_first, tl.exp(first - top), 0.0)
    part_weight = tl.where(has_second, tl.exp(second - top), 0.0)
    total = weight + part_weight
    result = (kept * weight[:, None] + added * part_weight[:, None]) / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None])
    tl.store(lse + head * lse_head + token, top + tl.log(total), mask=live & (total != 0))


_combine = Launch(_combine_kernel)


def combine_triton(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    query: torch.Tensor | None = None,
    recipe: LayerRecipe | None = None,
    scale: float = 1.0,
) -> None:
    """Add ``part`` to ``out`` by log-sum-exp; arguments as in :func:`combine_reference`.

    Every [T, Hq, D] tensor needs a contiguous last dimension and so does every [Hq, T] one.
    """
    tokens, heads, dim = out.shape
    if part.shape != out.shape or lse.shape != (heads, tokens) or part_lse.shape != lse.shape:
        shapes = ", ".join(str(tuple(x.shape)) for x in (out, lse, part, part_lse))
        raise ValueError(f"out, lse, part and part_lse disagree: {shapes}")
    if tokens == 0:
        return
    q = out if query is None else query
    means = (lse, lse) if recipe is None else (recipe.key_mean.contiguous(), recipe.value_mean.contiguous())
    group = 1 if recipe is None else heads // recipe.key_mean.shape[0]
    tile = min(TILE_HEADS, next_power_of_2(heads))
    _combine(
        (tokens, cdiv(heads, tile), 1),
        out, lse, part, part_lse, q, *means, scale,
        out.stride(0), out.stride(1), part.stride(0), part.stride(1), q.stride(0), q.stride(1),
        lse.stride(0), part_lse.stride(0),
        heads, group, dim, recipe is not None, tile, num_warps=4,
    )  # fmt: skip
