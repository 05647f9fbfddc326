"""The two KV-cache specs of a layer: INT2 history pages and blocks of the window cache."""

from dataclasses import dataclass, replace
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout


def history_spec(spec: AttentionSpec) -> AttentionSpec:
    """The layer's full-attention spec with INT2 pages in place of dense K and V.

    The dtype stays the model's: uint8 beside BF16 groups would make vLLM zero every new block.

    Raises:
        ValueError: the layer is not plain full attention.
    """
    if spec.state_content_bytes is not None:
        return spec
    if type(spec) is not FullAttentionSpec:
        raise ValueError(
            f"OSCAR serves full-attention layers only and this model has a {type(spec).__name__} layer; "
            "use another attention backend for it"
        )
    return replace(spec, state_content_bytes=PageLayout(spec.head_size).token_bytes)


@dataclass(frozen=True, kw_only=True)
class OscarWindowSpec(AttentionSpec):
    """Blocks of WINDOW_TOKENS unquantized tokens, real only for the sink and recent segments of a request.

    Not a SlidingWindowSpec: vLLM drops the leading table entries of those, and the sinks are there.
    """

    sink_tokens: int
    recent_tokens: int
    lookahead_tokens: int = 0
    """Speculative tokens a step may add beyond those it keeps."""
    steps_in_flight: int = 1
    """Steps whose window blocks may be alive together (2 under asynchronous scheduling)."""

    @property
    def prefix_cacheable(self) -> bool:
        return True

    @property
    def max_real_blocks(self) -> int:
        """Most real blocks of one request: the sinks, and a recent window for each step alive and for the next one."""
        recent = cdiv(self.recent_tokens, self.block_size) + 1
        lookahead = cdiv(self.lookahead_tokens, self.block_size)
        return self.sink_tokens // self.block_size + (self.steps_in_flight + 1) * recent + lookahead

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        blocks = cdiv(vllm_config.model_config.max_model_len, self.block_size)
        return min(blocks, self.max_real_blocks) * self.page_size_bytes


def window_spec(
    *,
    num_kv_heads: int,
    head_size: int,
    dtype: Any,
    sink: int,
    recent: int,
    lookahead: int,
    steps_in_flight: int,
) -> OscarWindowSpec:
    """The window spec of a layer, padded to the INT2 page so that both groups share vLLM's one block pool."""
    spec = OscarWindowSpec(
        block_size=WINDOW_TOKENS,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        sink_tokens=sink,
        recent_tokens=recent,
        lookahead_tokens=lookahead,
        steps_in_flight=steps_in_flight,
    )
    page_bytes = num_kv_heads * PageLayout(head_size).page_bytes
    if spec.unpadded_page_size_bytes > page_bytes:
        raise ValueError(
            f"OSCAR keeps its window in 16-bit floats and the model computes in {dtype}; serve it with --dtype bfloat16"
        )
    assert page_bytes % PAGE_TOKENS == 0
    return replace(spec, page_size_padded=page_bytes)
