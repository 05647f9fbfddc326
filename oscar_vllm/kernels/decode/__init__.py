"""Decode attention over sink, history and recent: Triton kernels on CUDA, their PyTorch twin elsewhere."""

import torch

from oscar_vllm.kernels.decode.reference import DecodePlan, attend_reference
from oscar_vllm.kernels.views import CacheView, LayerRecipe
from oscar_vllm.kernels.write import write

MAX_QUERY_TOKENS = 8
"""Most query tokens of one request that the decode kernels take; longer ones are prefills."""


def attend(
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
    """Attention of a batch of decodes over everything in the caches; see :func:`attend_reference` for shapes.

    ``plan`` is of use to the twin only; the kernels plan their splits on the device.
    """
    if query.is_cuda:
        from oscar_vllm.kernels.decode.triton import attend_triton

        attend_triton(query, view, recipe, scale, max_query_len=max_query_len, out=out, lse=lse)
    else:
        attend_reference(query, view, recipe, scale, max_query_len=max_query_len, out=out, lse=lse, plan=plan)


def decode_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    view: CacheView,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
    recipe: LayerRecipe,
    scale: float,
    *,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    plan: DecodePlan | None = None,
) -> None:
    """Write the new tokens of a batch that holds decodes only, then attend.

    On the GPU one launch writes and transforms the queries, where a write and :func:`attend` would be two. ``key``,
    ``value`` and the slots are as for :func:`oscar_vllm.kernels.write.write`, the rest as for :func:`attend`.
    """
    if query.is_cuda:
        from oscar_vllm.kernels.decode.triton import decode_step_triton

        decode_step_triton(
            query, key, value, view, slots, window_slots, recipe, scale, max_query_len=max_query_len, out=out, lse=lse
        )
    else:
        write(key, value, view.history, view.window, slots, window_slots, recipe)
        attend_reference(query, view, recipe, scale, max_query_len=max_query_len, out=out, lse=lse, plan=plan)
