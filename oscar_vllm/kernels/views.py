"""What every kernel takes: the two caches as a batch sees them, and one layer's share of the recipe."""

from typing import NamedTuple

import torch


class LayerRecipe(NamedTuple):
    """One layer's transforms on the compute device, H KV heads of D channels, all float32.

    Rows are transformed from the right: a key is stored as ``(k - key_mean) @ key``, a query is read as ``q @ query``
    (``query = key^-T``), a value is stored as ``(v - value_mean) @ value`` and an attention output mapped back by
    ``o @ output + value_mean`` (``output = value^-1``). For a rotation R these are R, R, R, R^T.
    """

    key: torch.Tensor
    """[H, D, D]"""
    query: torch.Tensor
    """[H, D, D]"""
    value: torch.Tensor
    """[H, D, D]"""
    output: torch.Tensor
    """[H, D, D]"""
    key_mean: torch.Tensor
    """[H, D]"""
    value_mean: torch.Tensor
    """[H, D]"""
    key_clip: torch.Tensor
    """[H], ratio in (0, 1]: a row is clamped to its |x| at sorted index min(int(ratio * D), D - 1)."""
    value_clip: torch.Tensor
    """[H]"""
    key_gain: torch.Tensor
    """[H], factor on the fitted step about the middle of the range (1 = none)."""
    value_gain: torch.Tensor
    """[H]"""
    rounds: int
    """Least-squares refits of scale and minimum to the codes (0 = as they start)."""
    moments: bool = False
    """Scale and minimum start from a row's mean and standard deviation, not from its range after the clip."""


class CacheView(NamedTuple):
    """The history and window caches with the tables of one batch of R requests.

    A token of a request is read from the window cache where that is valid, else from INT2. With ``length`` the tokens
    of the request after this step, ``new`` its query tokens in this step and ``computed = length - new``, query token
    ``i`` of a decode finds ``p <= computed + i`` valid in the window iff ``(p < sink or p >= computed + i - recent)``
    and its window table entry is not 0 (block 0 is vLLM's null block; worker tables keep ids of freed blocks, so a
    non-zero entry alone proves nothing). So a verified draft token reads what a step of its own would read. The chunk
    of a longer prefill reads its context as its first token does, ``i = 0``.
    """

    history: torch.Tensor
    """[blocks, H, PAGE_TOKENS, D/2 + 8] uint8; each [block, head] page is contiguous, other strides arbitrary."""
    window: torch.Tensor
    """[blocks, H, WINDOW_TOKENS, 2 * D] in the model's dtype, transformed K then V of a token; last dim contiguous."""
    block_table: torch.Tensor
    """[R, *] int32 history block ids; entries past a request's last block are stale."""
    window_table: torch.Tensor
    """[R, *] int32 window block ids; 0 = null; entries past a request's last block are stale."""
    seq_lens: torch.Tensor
    """[R] int32 tokens of each request after this step (0 = padding row)."""
    query_start: torch.Tensor
    """[R + 1] int32 offsets of each request's query tokens."""
    sink: int
    """Sink tokens, a multiple of WINDOW_TOKENS (0 = none)."""
    recent: int
    """Recent tokens, a multiple of WINDOW_TOKENS (0 = none)."""
