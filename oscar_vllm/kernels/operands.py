"""A recipe's matrices in the form that tensor cores multiply, made once per recipe and dtype and kept.

Rows (queries, keys, values) are exact in their 16-bit type, so only the float32 matrix is split, into two numbers of
that type: ``x @ M = x @ high + x @ low`` with float32 accumulation is good to 2^-17 of |x| |M| for BF16 and to 2^-22
for FP16. That is two products instead of the three that splitting both sides takes, and rows go from memory to the
tensor cores untouched. FP16 matrices are scaled by a power of two into that type's range.
"""

from functools import partial
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch

from oscar_vllm.cache.layout import FP16_MAX, MAX_VALUE_SCALE
from oscar_vllm.kernels.views import LayerRecipe


class SplitMatrices(NamedTuple):
    """N float32 matrices as sums of two 16-bit ones."""

    parts: torch.Tensor
    """[N, 2, D, D] of the rows' dtype, high then low, times a power of two."""
    inverse: torch.Tensor
    """[N] float32, that power's inverse."""


class WriteOperands(NamedTuple):
    """What the write kernel needs of a recipe; index 2 * head for keys, 2 * head + 1 for values."""

    matrix: torch.Tensor
    """[2 * H, 2, D, D] high and low parts, columns in :func:`shuffled_channels` order."""
    shift: torch.Tensor
    """[2 * H, 16, D] BF16 whose rows add up to ``-mean @ (high + low)``, the product to start from."""
    numbers: torch.Tensor
    """[2 * H, 4] float32: inverse of the matrix's power of two, clip, gain, largest scale before that inverse."""


def shuffled_channels(dim: int) -> torch.Tensor:
    """[D] channel of each column of the write kernel's products.

    A tensor core leaves columns 2q, 2q + 1 of every eight with lane q of four. With the columns in this order each
    lane ends up with D/4 consecutive channels, so that packing and most of every row sum stay inside a thread.
    """
    column = torch.arange(dim)
    return (column // 2) % 4 * (dim // 4) + column // 8 * 2 + column % 2


def split_matrices(matrix: torch.Tensor, dtype: torch.dtype) -> SplitMatrices:
    """``matrix`` [N, D, D] float32 for rows of ``dtype``."""
    # Types spelt out: engines load models under a default type of their own, which an integer power would take too.
    factor = torch.ones(matrix.shape[0], dtype=torch.float32, device=matrix.device)
    if dtype == torch.float16:
        factor = torch.ldexp(factor, (10 - torch.frexp(matrix.abs().amax((1, 2))).exponent).float())
    scaled = matrix * factor[:, None, None]
    high = scaled.to(dtype)
    low = (scaled - high.float()).to(dtype)
    return SplitMatrices(torch.stack([high, low], 1), 1 / factor)


def _make_write_operands(recipe: LayerRecipe, dtype: torch.dtype) -> WriteOperands:
    def both(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.stack([key, value], 1).flatten(0, 1).float()

    split = split_matrices(both(recipe.key, recipe.value), dtype)
    mean = both(recipe.key_mean, recipe.value_mean).double()
    # The same parts that the rows meet, so that what the split drops cancels together with the mean.
    rest = -torch.einsum("nd,npde->ne", mean, split.parts.double())
    shift = torch.zeros(rest.shape[0], 16, rest.shape[1], dtype=torch.bfloat16, device=rest.device)
    for i in range(3):
        shift[:, i] = rest.bfloat16()
        rest = rest - shift[:, i].double()
    order = shuffled_channels(rest.shape[1]).to(rest.device)
    clip, gain = both(recipe.key_clip, recipe.value_clip), both(recipe.key_gain, recipe.value_gain)
    most = both(torch.full_like(recipe.key_clip, FP16_MAX), torch.full_like(recipe.value_clip, MAX_VALUE_SCALE))
    numbers = torch.stack([split.inverse, clip, gain, most / split.inverse], -1)
    return WriteOperands(split.parts[..., order].contiguous(), shift[..., order].contiguous(), numbers.contiguous())


_kept: dict[tuple[int, str, torch.dtype], tuple[Any, ...]] = {}


def _versions(sources: tuple[torch.Tensor, ...]) -> list[int]:
    return [-1 if x.is_inference() else x._version for x in sources]


def _forget(kept: dict[Any, Any], key: Any, _: Any) -> None:
    kept.pop(key, None)


def _keep(name: str, sources: tuple[torch.Tensor, ...], dtype: torch.dtype, make: Any) -> Any:
    """``make()``, or what it made for the same unchanged sources before; forgotten when the first source dies."""
    key = (id(sources[0]), name, dtype)
    kept = _kept.get(key)
    if kept is not None:
        first, others, versions, made = kept
        if first() is sources[0] and all(map(is_, others, sources[1:])) and versions == _versions(sources):
            return made
    made = make()
    # What is made inside a capture belongs to the graph's memory and holds values only while it replays.
    if not (sources[0].is_cuda and torch.cuda.is_current_stream_capturing()):
        # Bound here: the module's names are gone when the last sources die with the interpreter.
        forget = partial(_forget, _kept, key)
        first = ref(sources[0], forget)
        _kept[key] = (first, sources[1:], _versions(sources), made)
    return made


def write_operands(recipe: LayerRecipe, dtype: torch.dtype) -> WriteOperands:
    """The recipe's operands for rows of ``dtype``; kept while the recipe's tensors live and stay unchanged."""
    r = recipe
    sources = (r.key, r.value, r.key_mean, r.value_mean, r.key_clip, r.value_clip, r.key_gain, r.value_gain)
    made: WriteOperands = _keep("write", sources, dtype, lambda: _make_write_operands(recipe, dtype))
    return made


def query_operands(matrix: torch.Tensor, dtype: torch.dtype) -> SplitMatrices:
    """The query matrices [H, D, D] for queries of ``dtype``; kept while the tensor lives and stays unchanged."""
    made: SplitMatrices = _keep("query", (matrix,), dtype, lambda: split_matrices(matrix, dtype))
    return made
