"""Attention over requests of any lengths on a GPU, with its log-sum-exp: vLLM's FlashAttention, else xformers'."""

import functools
import importlib.util
from typing import Protocol

import torch


class Flash(Protocol):
    """Attention of N requests, of query [T, Hq, D] over key and value [S, H, D], written to out [T, Hq, D].

    ``cu_query`` and ``cu_keys`` are [N + 1] int32 offsets on the device, ``longest_query`` and ``longest_keys`` bounds
    of the lengths between them. With ``causal`` both are the same.

    Returns:
        [Hq, T] float32 natural log-sum-exp; either infinity for rows without keys.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_query: torch.Tensor,
        cu_keys: torch.Tensor,
        longest_query: int,
        longest_keys: int,
        scale: float,
        causal: bool,
        out: torch.Tensor,
    ) -> torch.Tensor: ...


def vllm_version(head_size: int) -> int | None:
    """The version of vLLM's FlashAttention that serves ``head_size`` on this GPU; None where none does."""
    try:
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    except ImportError:  # a build of vLLM without it
        return None
    version: int | None = get_flash_attn_version(head_size=head_size)
    return version


def is_available(head_size: int) -> bool:
    """Whether :func:`flash_attention` has something to give."""
    return vllm_version(head_size) is not None or importlib.util.find_spec("xformers") is not None


@functools.cache
def flash_attention(head_size: int) -> Flash:
    """What prefill attends with on this GPU.

    Raises:
        ImportError: neither vLLM's FlashAttention nor xformers is there.
    """
    version = vllm_version(head_size)
    return xformers_flash if version is None else functools.partial(vllm_flash, version)


def vllm_flash(
    version: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_query: torch.Tensor,
    cu_keys: torch.Tensor,
    longest_query: int,
    longest_keys: int,
    scale: float,
    causal: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """:class:`Flash` by the FlashAttention that vLLM brings, in ``version``."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func

    result: tuple[torch.Tensor, torch.Tensor] = flash_attn_varlen_func(
        q=query,
        k=key,
        v=value,
        cu_seqlens_q=cu_query,
        cu_seqlens_k=cu_keys,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_keys,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        out=out,
        fa_version=version,
    )
    return result[1]


def xformers_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_query: torch.Tensor,
    cu_keys: torch.Tensor,
    longest_query: int,
    longest_keys: int,
    scale: float,
    causal: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """:class:`Flash` by xformers' ``memory_efficient_attention``.

    Its operator over PyTorch's own FlashAttention is called past its dispatcher, which refuses all operators where
    xformers' C++ extensions, made for one version of torch, do not load; this one does not use them.
    """
    from xformers.ops import fmha

    def lengths(cu: torch.Tensor, longest: int, total: int) -> object:
        # Made from the offsets as they are: from_seqlens wants them on the host, and would copy them for every layer.
        # What it keeps of them there serves backward passes and comparisons of queries' with keys' only.
        return fmha.attn_bias._SeqLenInfo(seqstart=cu, max_seqlen=longest, min_seqlen=0, seqstart_py=[0, total])

    queries = lengths(cu_query, longest_query, query.shape[0])
    if causal:
        bias = fmha.attn_bias.BlockDiagonalCausalMask(q_seqinfo=queries, k_seqinfo=queries)
    else:
        bias = fmha.attn_bias.BlockDiagonalMask(
            q_seqinfo=queries, k_seqinfo=lengths(cu_keys, longest_keys, key.shape[0])
        )
    heads, group = key.shape[1], query.shape[1] // key.shape[1]
    # Query heads that share a KV head are an axis of their own, along which keys and values are not copied.
    shared = [x[None, :, :, None].expand(-1, -1, -1, group, -1) for x in (key, value)]
    inputs = fmha.Inputs(
        query.unflatten(1, (heads, group))[None], *shared, attn_bias=bias, scale=scale, is_partial=True
    )
    inputs.validate_inputs()
    result, context = fmha.flash.FwOp.apply(inputs, needs_gradient=True)  # which asks for the log-sum-exp
    out.copy_(result[0].flatten(1, 2))
    lse: torch.Tensor = context.lse[0].flatten(0, 1)
    return lse
