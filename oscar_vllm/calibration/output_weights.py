"""The output projection of a model's attention layers, seen as what an error of the attention output costs."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

logger = logging.getLogger("vllm.oscar")


def find_projection(modules: Mapping[str, torch.nn.Module], attention: str, width: int) -> torch.nn.Module | None:
    """The row-parallel linear layer beside the attention layer of that name that takes its output, or None.

    Args:
        modules: all modules of the model by name.
        attention: the attention layer's name ("model.layers.0.self_attn.attn").
        width: channels of the output on this rank, query heads times head size.
    """
    from vllm.model_executor.layers.linear import RowParallelLinear

    parent = attention.rpartition(".")[0]
    beside = (module for name, module in modules.items() if name.rpartition(".")[0] == parent)
    found = [m for m in beside if isinstance(m, RowParallelLinear) and m.input_size_per_partition == width]
    return found[0] if len(found) == 1 else None


def projection_gram(projection: Any, kv_heads: int, head_size: int, dtype: torch.dtype) -> torch.Tensor:
    """[H, D, D] float64, sum of W_o W_oᵀ over the query heads of each KV head: an output error e costs e M eᵀ.

    The weight is read by projecting the identity, so that any quantization and any packing will do.

    Raises:
        Exception: whatever the layer raises for such an input.
    """
    width = projection.input_size_per_partition
    group = width // (kv_heads * head_size)
    device = next(projection.parameters()).device
    gram = torch.zeros(kv_heads, head_size, head_size, dtype=torch.float64, device=device)
    for head in range(kv_heads * group):
        eye = torch.zeros(head_size, width, dtype=dtype, device=device)
        eye[:, head * head_size : (head + 1) * head_size] = torch.eye(head_size, dtype=dtype, device=device)
        weight = projection.quant_method.apply(projection, eye).double()  # [D, hidden]
        gram[head // group] += weight @ weight.mT
    return gram


def output_gram(
    modules: Mapping[str, torch.nn.Module],
    attention: str,
    kv_heads: int,
    heads: int,
    head_size: int,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """``projection_gram`` of an attention layer, or None where the model hides it or its numbers are not finite."""
    projection = find_projection(modules, attention, heads * head_size)
    if projection is None:
        return None
    try:
        with torch.inference_mode():
            gram = projection_gram(projection, kv_heads, head_size, dtype)
    except Exception as error:  # a quantization's kernel may refuse the input for reasons of its own
        logger.info("The output projection of %s cannot be read (%s).", attention, error)
        return None
    return gram if bool(torch.isfinite(gram).all()) else None
