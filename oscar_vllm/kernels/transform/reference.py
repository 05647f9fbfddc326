"""PyTorch twin of the query transform."""

import torch


def transform_queries_reference(query: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``query[:, h] @ matrix[h // G]``, G = Hq / H: query [T, Hq, D], matrix [H, D, D] -> float32 [T, Hq, D]."""
    tokens, query_heads, dim = query.shape
    heads = matrix.shape[0]
    group = query_heads // heads
    grouped = query.float().reshape(tokens, heads, group, dim).transpose(0, 1)
    product = torch.bmm(grouped.reshape(heads, tokens * group, dim), matrix)
    return product.view(heads, tokens, group, dim).transpose(0, 1).reshape(tokens, query_heads, dim)
