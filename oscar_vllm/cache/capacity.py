"""How many tokens a block pool holds."""

from dataclasses import dataclass
from math import ceil

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS


@dataclass(frozen=True)
class Shares:
    """How many cache groups draw on the pool: vLLM gives each of them a block of its own, all of one size."""

    history_groups: int = 1
    """As many as there are window groups: more than one where the model has many more layers than its draft model."""
    draft_groups: int = 0
    draft_block_tokens: int = PAGE_TOKENS


ALONE = Shares()
"""No draft model."""


def group_layers(model: int, draft: int) -> int:
    """Layers of one cache group, as vLLM groups the layers of a model and its draft model (0: none)."""
    few, many = sorted((model, draft or model))
    return many if many < 1.5 * few else few


def request_blocks(tokens: int, sink: int, recent: int, shares: Shares = ALONE) -> int:
    """Pool blocks of one request of ``tokens`` tokens while it decodes: INT2 pages, sink and recent window blocks.

    A draft model's own cache is counted in.
    """
    window = sink // WINDOW_TOKENS + recent // WINDOW_TOKENS + (1 if recent else 0)
    own = ceil(tokens / PAGE_TOKENS) + min(window, ceil(tokens / WINDOW_TOKENS))
    return shares.history_groups * own + draft_blocks(tokens, shares)


def draft_blocks(tokens: int, shares: Shares) -> int:
    """Those of them that hold the draft model's cache."""
    return shares.draft_groups * ceil(tokens / shares.draft_block_tokens)


def tokens_that_fit(pool_blocks: int, tokens: int, sink: int, recent: int, shares: Shares = ALONE) -> int:
    """Cached tokens that ``pool_blocks`` blocks (one of them vLLM's null block) hold in requests of ``tokens`` each."""
    return int((pool_blocks - 1) / request_blocks(tokens, sink, recent, shares) * tokens)
