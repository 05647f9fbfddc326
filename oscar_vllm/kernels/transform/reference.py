"""PyTorch twin of the query transform."""

import torch


def transform_queries_reference(query: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """``query[:, h] @ matrix[h // G]``: query [T, Hq, D], matrix [H, D, D] float32, G = Hq / H -> [T, Hq, D] float32."""
    tokens, _, dim = query.shape
    grouped = query.float().reshape(tokens, matrix.shape[0], -1, dim)
    return torch.einsum("thgd,hde->thge", grouped, matrix).flatten(1, 2)
