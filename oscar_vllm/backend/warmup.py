"""Compile what a request's first chunk behind a context needs before the server takes requests.

vLLM's own warm-up runs a first chunk and decodes, never a context; without this the first prefix hit would wait for the
compiler.
"""

import torch

from oscar_vllm.backend.context_plan import plan_prefill
from oscar_vllm.backend.flash import flash_attention
from oscar_vllm.backend.prefill_cuda import prefill_cuda
from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS
from oscar_vllm.kernels.decode import MAX_QUERY_TOKENS, attend
from oscar_vllm.kernels.views import CacheView, LayerRecipe
from oscar_vllm.kernels.write import write

_TOKENS = (16, 1024)
"""New tokens of a small and of a large chunk: the query transform has a kernel for each."""


_warm: set[tuple[object, ...]] = set()
"""Shapes that are done: layers of one shape share their kernels."""


def warm_up(recipe: LayerRecipe, num_heads: int, dtype: torch.dtype, scale: float, sink: int, recent: int) -> None:
    """Run every kernel of a layer once on caches of its own, in the shapes that prefills with a context have."""
    heads, dim = recipe.key_mean.shape
    device = recipe.key_mean.device
    shape = (heads, num_heads, dim, dtype, recipe.rounds, recipe.moments, device)
    if shape in _warm:
        return
    _warm.add(shape)
    history = torch.zeros(2, heads, PAGE_TOKENS, dim // 2 + 8, dtype=torch.uint8, device=device)
    window = torch.zeros(2, heads, WINDOW_TOKENS, 2 * dim, dtype=dtype, device=device)
    for new in _TOKENS:
        context = PAGE_TOKENS
        length = context + new
        view = CacheView(
            history=history,
            window=window,
            block_table=torch.ones(1, -(-length // PAGE_TOKENS), dtype=torch.int32, device=device),
            window_table=torch.zeros(1, -(-length // WINDOW_TOKENS), dtype=torch.int32, device=device),
            seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
            query_start=torch.tensor([0, new], dtype=torch.int32, device=device),
            sink=sink,
            recent=recent,
        )
        query = torch.zeros(new, num_heads, dim, dtype=dtype, device=device)
        key = torch.zeros(new, heads, dim, dtype=dtype, device=device)
        out = torch.empty_like(query)
        slots = torch.full((new,), -1, dtype=torch.int64, device=device)
        write(key, key, history, window, slots, slots, recipe)
        # Two tiles, so that running results are combined as well.
        plan = plan_prefill(0, [0, new], [length], context // 2, device)
        tile = torch.empty(context // 2, heads, dim, dtype=dtype, device=device)
        rows = torch.empty_like(query)
        workspace = [tile, torch.empty_like(tile), rows, torch.empty_like(rows), torch.empty_like(rows)]
        prefill_cuda(query, key, key, view, plan, recipe, scale, out, workspace, flash_attention(dim))
        if new == min(_TOKENS):
            piece = view._replace(query_start=torch.tensor([0, MAX_QUERY_TOKENS], dtype=torch.int32, device=device))
            rows = query[:MAX_QUERY_TOKENS]
            attend(rows, piece, recipe, scale, max_query_len=MAX_QUERY_TOKENS, out=out[:MAX_QUERY_TOKENS])
    torch.cuda.synchronize(device)
