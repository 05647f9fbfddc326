"""One decode step of a layer, cache write included, as each attention implementation serves it.

Every contender takes a :class:`Shape` and returns the calls to time, one for each copy of its buffers, which hold
random values; :class:`UnavailableError` says why one cannot run here.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

from oscar_vllm.bench.timing import graph_microseconds, sets_for
from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.calibration.search import MOMENTS, ROUNDS
from oscar_vllm.kernels.views import CacheView, LayerRecipe

Calls = list[Callable[[], None]]
SINK, RECENT = 64, 256
FLASH_BLOCK = 16


class UnavailableError(Exception):
    """The contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Shape:
    """A decode batch: ``batch`` requests of ``length`` tokens, the new one included."""

    query_heads: int
    heads: int
    dim: int
    batch: int
    length: int

    @property
    def flash_bytes(self) -> int:
        """Bytes of K and V at 16 bits: what exact attention must read."""
        return self.batch * self.length * self.heads * 4 * self.dim

    @property
    def oscar_bytes(self) -> int:
        """Bytes of the 16-bit windows and the INT2 history between them: what OSCAR must read."""
        windows = min(SINK + RECENT, self.length)
        token = PageLayout(self.dim).token_bytes
        return self.batch * self.heads * (windows * 4 * self.dim + (self.length - windows) * token)


def _table(batch: int, blocks: int) -> torch.Tensor:
    """[batch, blocks] int32 block ids in random order, none of them 0."""
    order = torch.randperm(batch * blocks, device="cuda", dtype=torch.int32)
    return order.view(batch, blocks) + 1


def _fresh(shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """BF16 query, key and value of the new tokens."""
    fused = torch.randn(shape.batch, shape.query_heads + 2 * shape.heads, shape.dim, device="cuda").bfloat16()
    query, key, value = torch.split(fused, [shape.query_heads, shape.heads, shape.heads], 1)
    return query.contiguous(), key, value


def random_recipe(heads: int, dim: int, rounds: int, clip: float = 1.0, moments: bool = False) -> LayerRecipe:
    """Random orthogonal transforms with means."""
    rotation = torch.linalg.qr(torch.randn(2, heads, dim, dim, device="cuda"))[0].contiguous()
    mean = torch.randn(2, heads, dim, device="cuda")
    ratio, gain = torch.full((heads,), clip, device="cuda"), torch.full((heads,), 1.05, device="cuda")
    inverse = rotation[1].mT.contiguous()
    return LayerRecipe(
        rotation[0], rotation[0], rotation[1], inverse, mean[0], mean[1], ratio, ratio, gain, gain, rounds, moments
    )


def oscar_view(shape: Shape) -> CacheView:
    """Caches of random rows, windows as vLLM's manager leaves them (null between sink and recent)."""
    pages, slots = -(-shape.length // PAGE_TOKENS), -(-shape.length // WINDOW_TOKENS)
    layout = PageLayout(shape.dim)
    history = torch.randint(
        0, 256, (shape.batch * pages + 1, shape.heads, layout.page_bytes), dtype=torch.uint8, device="cuda"
    )
    meta = history[..., layout.key_meta :]
    meta.view(torch.float16).normal_()
    first_recent = max(0, shape.length - 1 - RECENT) // WINDOW_TOKENS
    column = torch.arange(slots, device="cuda")
    real = (column < SINK // WINDOW_TOKENS) | (column >= first_recent)
    window_table = torch.zeros(shape.batch, slots, dtype=torch.int32, device="cuda")
    window_table[:, real] = _table(shape.batch, int(real.sum()))
    blocks = shape.batch * int(real.sum()) + 1
    window = torch.randn(blocks, shape.heads, WINDOW_TOKENS, 2 * shape.dim, device="cuda").bfloat16()
    return CacheView(
        history.view(-1, shape.heads, PAGE_TOKENS, layout.token_bytes),
        window,
        _table(shape.batch, pages),
        window_table,
        torch.full((shape.batch,), shape.length, dtype=torch.int32, device="cuda"),
        torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda"),
        SINK,
        RECENT,
    )


def oscar(shape: Shape) -> Calls:
    """Write of the new token, query transform, windows, history, merge and the map back.

    The quantizer is the one that ``oscar calibrate`` chooses.
    """
    from oscar_vllm.kernels.decode.triton import decode_step_triton

    common = random_recipe(shape.heads, shape.dim, ROUNDS, moments=MOMENTS)

    def one() -> Callable[[], None]:
        view, recipe = oscar_view(shape), deepcopy(common)  # as every layer has matrices of its own
        query, key, value = _fresh(shape)
        out = torch.empty_like(query)
        last = shape.length - 1
        slots = view.block_table[:, last // PAGE_TOKENS].long() * PAGE_TOKENS + last % PAGE_TOKENS
        window_slots = view.window_table[:, last // WINDOW_TOKENS].long() * WINDOW_TOKENS + last % WINDOW_TOKENS
        scale = shape.dim**-0.5

        def call() -> None:
            decode_step_triton(query, key, value, view, slots, window_slots, recipe, scale, max_query_len=1, out=out)

        return call

    return [one() for _ in range(sets_for(shape.oscar_bytes))]


def flash(shape: Shape, fp8: bool) -> Calls:
    """vLLM's FlashAttention-3 with its cache write, split plan made before the graph as vLLM does.

    With an FP8 cache the query is cast too, as vLLM does.
    """
    try:
        from vllm import _custom_ops as ops
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
    except ImportError as error:
        raise UnavailableError("vLLM not installed") from error
    if torch.cuda.get_device_capability()[0] != 9:
        raise UnavailableError("FlashAttention-3 needs a Hopper GPU")
    kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
    blocks = -(-shape.length // FLASH_BLOCK)
    lengths = torch.full((shape.batch,), shape.length, dtype=torch.int32, device="cuda")
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda")
    one_scale = torch.ones(1, device="cuda")
    descale = torch.ones(shape.batch, shape.heads, device="cuda") if fp8 else None

    def one() -> Callable[[], None]:
        size = (2, shape.batch * blocks + 1, FLASH_BLOCK, shape.heads, shape.dim)
        cache = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()
        cache = cache.to(kind)
        table = _table(shape.batch, blocks)
        query, key, value = _fresh(shape)
        out = torch.empty_like(query)
        last = shape.length - 1
        slots = table[:, last // FLASH_BLOCK].long() * FLASH_BLOCK + last % FLASH_BLOCK
        plan = get_scheduler_metadata(
            batch_size=shape.batch,
            max_seqlen_q=1,
            max_seqlen_k=shape.length,
            num_heads_q=shape.query_heads,
            num_heads_kv=shape.heads,
            headdim=shape.dim,
            cache_seqlens=lengths,
            qkv_dtype=kind,
            cu_seqlens_q=starts,
            page_size=FLASH_BLOCK,
            causal=True,
        )

        def call() -> None:
            written = cache.view(torch.uint8) if fp8 else cache
            name = "fp8" if fp8 else "auto"
            ops.reshape_and_cache_flash(key, value, written[0], written[1], slots, name, one_scale, one_scale)
            flash_attn_varlen_func(
                q=query.to(kind),
                k=cache[0],
                v=cache[1],
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=lengths,
                max_seqlen_k=shape.length,
                softmax_scale=shape.dim**-0.5,
                causal=True,
                block_table=table,
                fa_version=3,
                scheduler_metadata=plan,
                q_descale=descale,
                k_descale=descale,
                v_descale=descale,
            )

        return call

    return [one() for _ in range(sets_for(shape.flash_bytes // (2 if fp8 else 1)))]


def split_k_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: Any, scale: float, *, partial: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """xformers' Triton split-K attention, called past its dispatcher.

    The dispatcher refuses wherever xformers' C++ extensions do not load, which this operator does not use.

    Args:
        query, key, value: [1, tokens, H, G, D] as xformers takes them.
        bias: xformers' mask.
        scale: softmax scale.
        partial: also return the log-sum-exp, and the output in float32.

    Returns:
        Output [1, tokens, H, G, D] and natural log-sum-exp [1, H, G, tokens], or None without ``partial``.
    """
    from xformers.ops import fmha

    inputs = fmha.Inputs(query=query, key=key, value=value, attn_bias=bias, scale=scale, is_partial=partial)
    inputs.validate_inputs()
    inputs.normalize_bmhk()
    out, context = fmha.triton_splitk.FwOp.apply(inputs, needs_gradient=partial)
    return out, context.lse if partial else None


def xformers_split_k(shape: Shape) -> Calls:
    """xformers' Triton split-K decode over a contiguous BF16 cache (no cache write: it has none)."""
    try:
        from xformers.ops import fmha
    except ImportError as error:
        raise UnavailableError("xformers not installed") from error
    group = shape.query_heads // shape.heads
    bias: Any = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[1] * shape.batch, kv_padding=shape.length, kv_seqlen=[shape.length] * shape.batch, device="cuda"
    )

    def one() -> Callable[[], None]:
        size = (1, shape.batch * shape.length, shape.heads, 1, shape.dim)
        key, value = (torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
        key, value = (x.expand(-1, -1, -1, group, -1) for x in (key, value))
        query = _fresh(shape)[0].view(1, shape.batch, shape.heads, group, shape.dim)

        def call() -> None:
            split_k_attention(query, key, value, bias, shape.dim**-0.5, partial=False)

        return call

    calls = [one() for _ in range(sets_for(shape.flash_bytes))]
    try:
        graph_microseconds(calls[:1], replays=1)
    except Exception as error:  # whatever its Triton code meets in a Triton newer or older than its own
        raise UnavailableError(f"xformers' kernel does not run here ({type(error).__name__})") from error
    return calls
