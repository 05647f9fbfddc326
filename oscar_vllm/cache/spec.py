"""The history group's KV-cache spec: INT2 pages in place of dense K and V."""

from dataclasses import replace

from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from oscar_vllm.cache.layout import PAGE_TOKENS, PageLayout


def history_spec(spec: AttentionSpec) -> AttentionSpec:
    """The layer's full-attention spec with INT2 pages in place of dense K and V.

    The dtype stays the model's: uint8 beside BF16 groups would make vLLM zero every new block. The page is 128 tokens
    whatever vLLM's block size is, which with a draft model is the draft's.

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
    return replace(spec, block_size=PAGE_TOKENS, state_content_bytes=PageLayout(spec.head_size).token_bytes)
