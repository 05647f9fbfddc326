"""How many tokens a block pool holds."""

from math import ceil

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS


def request_blocks(tokens: int, sink: int, recent: int) -> int:
    """Pool blocks of one request of ``tokens`` tokens while it decodes: INT2 pages, sink and recent window blocks."""
    window = sink // WINDOW_TOKENS + recent // WINDOW_TOKENS + (1 if recent else 0)
    return ceil(tokens / PAGE_TOKENS) + min(window, ceil(tokens / WINDOW_TOKENS))


def tokens_that_fit(pool_blocks: int, tokens: int, sink: int, recent: int) -> int:
    """Cached tokens that ``pool_blocks`` blocks (one of them vLLM's null block) hold in requests of ``tokens`` each."""
    return int((pool_blocks - 1) / request_blocks(tokens, sink, recent) * tokens)
