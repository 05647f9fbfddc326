"""Decode attention over sink, history and recent: Triton kernels on CUDA, their PyTorch twin elsewhere."""

import torch

from oscar_vllm.kernels.decode.reference import DecodePlan, attend_reference
from oscar_vllm.kernels.views import CacheView, LayerRecipe

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
