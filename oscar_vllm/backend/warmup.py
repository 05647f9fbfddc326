"""Compile a layer's kernels before the server takes requests, all at once.

vLLM's own warm-up compiles one kernel after another, and only those of decodes: it never runs a context, so the first
prefix hit would wait for the compiler.
"""

from collections.abc import Collection
from typing import Any

import torch
from vllm.utils.torch_utils import set_default_torch_dtype

from oscar_vllm.backend.context_plan import plan_prefill
from oscar_vllm.backend.extend_plan import SHORT_QUERY, plan_extends
from oscar_vllm.backend.flash import flash_attention
from oscar_vllm.backend.prefill_cuda import prefill_cuda
from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS
from oscar_vllm.kernels.decode import MAX_QUERY_TOKENS, attend, decode_step
from oscar_vllm.kernels.launch import compile_together
from oscar_vllm.kernels.merge.triton import graph_batch
from oscar_vllm.kernels.views import CacheView, LayerRecipe
from oscar_vllm.kernels.write import write

_FEW_TOKENS = 16
_MANY_ROWS = 2**15
"""Query rows (tokens times heads) that are many on any GPU: few and many have kernels of their own."""


_warm: set[tuple[object, ...]] = set()
"""Shapes that are done: layers of one shape share their kernels."""


def has_contexts(vllm_config: Any) -> bool:
    """Whether a step may prefill behind a context or beside decodes; where none does, there is nothing to compile here.

    Calibration starts such an engine: one request at a time, each in one chunk.
    """
    scheduler = vllm_config.scheduler_config
    return bool(
        scheduler.max_num_seqs > 1
        or vllm_config.cache_config.enable_prefix_caching
        or scheduler.long_prefill_token_threshold
        or scheduler.max_num_batched_tokens < vllm_config.model_config.max_model_len
    )


def decode_batches(vllm_config: Any) -> set[tuple[int, int]]:
    """(requests, query tokens of each) of the decode steps that an engine captures graphs of or may run without one."""
    most = vllm_config.scheduler_config.max_num_seqs
    speculation = vllm_config.speculative_config
    drafted = speculation.num_speculative_tokens if speculation else 0
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    batches = set()
    for new in {1, 1 + drafted}:
        batches |= {(graph_batch(requests), new) for requests in range(1, most + 1)}
        batches |= {(tokens // new, new) for tokens in captured if tokens >= new}
    return batches


def warm_up(
    recipe: LayerRecipe,
    num_heads: int,
    dtype: torch.dtype,
    scale: float,
    sink: int,
    recent: int,
    batches: Collection[tuple[int, int]],
) -> None:
    """Compile every kernel of a layer, and run those of prefills with a context once on caches of its own.

    Args:
        recipe: the layer's.
        num_heads: query heads of this rank.
        dtype: of queries, keys and values.
        scale: softmax scale.
        sink: tokens of the sink.
        recent: tokens of the recent window.
        batches: of decode steps, (requests, query tokens of each); compiled, for vLLM runs them itself.
    """
    heads, dim = recipe.key_mean.shape
    device = recipe.key_mean.device
    shape = (heads, num_heads, dim, dtype, recipe.rounds, recipe.moments, device)
    if shape in _warm:
        return
    _warm.add(shape)
    history = torch.zeros(2, heads, PAGE_TOKENS, dim // 2 + 8, dtype=torch.uint8, device=device)
    window = torch.zeros(2, heads, WINDOW_TOKENS, 2 * dim, dtype=dtype, device=device)

    def view(new: int, requests: int = 1) -> CacheView:
        """Requests of ``new`` tokens behind a page."""
        length = PAGE_TOKENS + new
        return CacheView(
            history=history,
            window=window,
            block_table=torch.ones(requests, -(-length // PAGE_TOKENS), dtype=torch.int32, device=device),
            window_table=torch.zeros(requests, -(-length // WINDOW_TOKENS), dtype=torch.int32, device=device),
            seq_lens=torch.full((requests,), length, dtype=torch.int32, device=device),
            query_start=torch.arange(requests + 1, dtype=torch.int32, device=device) * new,
            sink=sink,
            recent=recent,
        )

    # The write kernel counts the rows of keys and values, and calls half as many of them many.
    many_tokens = 1 + _MANY_ROWS // min(num_heads, 4 * heads)

    def contexts() -> None:
        for new in (_FEW_TOKENS, many_tokens):
            _prefill(view(new), num_heads, new, recipe, scale)
        _short(view(SHORT_QUERY), num_heads, recipe, scale)

    def everything() -> None:
        contexts()
        for requests, new in batches:
            _decode(view(new, requests), num_heads, new, recipe, scale)

    # vLLM loads weights with the model's dtype as the default, and matrices prepared under it, which would be kept,
    # are not what is prepared (and compiled for) when requests run.
    with set_default_torch_dtype(torch.float32):
        compile_together(everything)
        contexts()
    torch.cuda.synchronize(device)


def _prefill(view: CacheView, num_heads: int, new: int, recipe: LayerRecipe, scale: float) -> None:
    """A chunk of ``new`` tokens, written and attended to as prefills are."""
    heads, dim = recipe.key_mean.shape
    dtype, device = view.window.dtype, view.window.device
    query = torch.zeros(new, num_heads, dim, dtype=dtype, device=device)
    key = torch.zeros(new, heads, dim, dtype=dtype, device=device)
    slots = torch.full((new,), -1, dtype=torch.int64, device=device)
    write(key, key, view.history, view.window, slots, slots, recipe)
    # Two tiles, so that running results are combined as well.
    size = PAGE_TOKENS // 2
    plan = plan_prefill(0, [0, new], [PAGE_TOKENS + new], size, device)
    tiles = [torch.empty(size, heads, dim, dtype=dtype, device=device) for _ in range(2)]
    rows = [torch.empty_like(query) for _ in range(3)]
    out = torch.empty_like(query)
    prefill_cuda(query, key, key, view, plan, recipe, scale, out, tiles + rows, flash_attention(dim))


def _short(view: CacheView, num_heads: int, recipe: LayerRecipe, scale: float) -> None:
    """What the decode kernels take of a step with prefills: its decodes, and short rests of prompts in pieces."""
    dtype, device = view.window.dtype, view.window.device
    query = torch.zeros(SHORT_QUERY, num_heads, recipe.key_mean.shape[1], dtype=dtype, device=device)
    out = torch.empty_like(query)
    decode = view._replace(query_start=torch.tensor([0, 1], dtype=torch.int32, device=device))
    attend(query[:1], decode, recipe, scale, max_query_len=1, out=out[:1])
    for new in range(MAX_QUERY_TOKENS, SHORT_QUERY + 1, MAX_QUERY_TOKENS):
        plan = plan_extends(0, [0, new], [PAGE_TOKENS + new], view.block_table)
        pieces = view._replace(
            block_table=plan.block_table,
            window_table=view.window_table.repeat(plan.seq_lens.shape[0], 1),
            seq_lens=plan.seq_lens,
            query_start=plan.query_start,
        )
        attend(query[:new], pieces, recipe, scale, max_query_len=MAX_QUERY_TOKENS, out=out[:new])


def _decode(view: CacheView, num_heads: int, new: int, recipe: LayerRecipe, scale: float) -> None:
    """A step of decodes of ``new`` tokens each."""
    heads, dim = recipe.key_mean.shape
    dtype, device = view.window.dtype, view.window.device
    tokens = view.seq_lens.shape[0] * new
    query = torch.zeros(tokens, num_heads, dim, dtype=dtype, device=device)
    key = torch.zeros(tokens, heads, dim, dtype=dtype, device=device)
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    decode_step(query, key, key, view, slots, slots, recipe, scale, max_query_len=new, out=torch.empty_like(query))
