"""PyTorch twin of the query transform."""

import torch


def transform_queries_reference(query: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``query[:, h] @ matrix[h // G]``, G = Hq / H: query [T, Hq, D], matrix [H, D, D] -> float32 [T, Hq, D]."""
    heads = matrix.shape[0]
    grouped = query.float().unflatten(1, (heads, query.shape[1] // heads))
    return torch.einsum("thgd,hde->thge", grouped, matrix).flatten(1, 2)
