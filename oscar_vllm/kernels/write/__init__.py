"""Write new tokens into both caches: the Triton kernel on CUDA, its PyTorch twin elsewhere."""

import torch

from oscar_vllm.kernels.views import LayerRecipe
from oscar_vllm.kernels.write.reference import write_reference


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
    recipe: LayerRecipe,
) -> None:
    """Center, transform, quantize and store new tokens; see :func:`write_reference` for shapes."""
    if key.is_cuda:
        from oscar_vllm.kernels.write.triton import write_triton

        write_triton(key, value, history, window, slots, window_slots, recipe)
    else:
        write_reference(key, value, history, window, slots, window_slots, recipe)
