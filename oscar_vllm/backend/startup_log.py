"""The start-up log block: what is served with which recipe, and what the memory holds."""

import logging
from typing import Any

from oscar_vllm.backend.drafting import draft_cache
from oscar_vllm.backend.recipes import load_recipe
from oscar_vllm.cache.capacity import ALONE, draft_blocks, request_blocks, tokens_that_fit
from oscar_vllm.cache.layout import FORMAT_VERSION, PageLayout, bits_per_element
from oscar_vllm.config import OscarConfig
from oscar_vllm.recipe import PROMPT_TOKENS, OscarRecipe

logger = logging.getLogger("vllm.oscar")

UNCENTERED = (
    "OSCAR recipe is not centered: keys and values keep their means, which two bits then have to carry; expect several "
    "times the divergence, and useless output from models with key biases (Qwen2). `oscar calibrate MODEL` makes a "
    "centered recipe, `oscar calibrate MODEL --means-only --recipe RECIPE` adds the means to this one."
)


def near_only(recipe: OscarRecipe, tokens: int) -> str | None:
    """What to warn of if a request may have ``tokens`` tokens and the recipe's means do not hold that far."""
    metadata = recipe.metadata
    known = max(metadata.positions, PROMPT_TOKENS)
    if not metadata.centered or metadata.geometry.rope_theta == 0 or tokens <= known:
        return None
    return (
        f"OSCAR recipe knows keys of the first {known:,} positions and requests may have {tokens:,}: further on, "
        "models with key biases (Qwen2) may answer nonsense. `oscar calibrate MODEL` makes a recipe for all positions "
        "of MODEL."
    )


def describe(vllm_config: Any, pool_blocks: int) -> list[str]:
    """The lines of the block for a pool of ``pool_blocks`` blocks."""
    config = OscarConfig.from_additional_config(vllm_config.additional_config)
    recipe = load_recipe(vllm_config)
    metadata, head_size = recipe.metadata, recipe.geometry.head_size
    tokens = vllm_config.model_config.max_model_len
    layout = PageLayout(head_size)
    bits = bits_per_element(head_size, tokens, config.sink + config.recent)
    draft = draft_cache(vllm_config)
    shares = draft.shares if draft else ALONE
    fit = tokens_that_fit(pool_blocks, tokens, config.sink, config.recent, shares)
    dense = draft.dense_tokens(pool_blocks) if draft else pool_blocks * layout.page_bytes // (2 * 2 * head_size)
    source = f"calibrated on {metadata.tokens:,} tokens" if metadata.tokens else "not calibrated"
    centered = "centered" if metadata.centered else "not centered"
    lines = [
        f"OSCAR recipe {recipe.content_hash()[:12]}: {metadata.method}, {source}, {centered}",
        f"OSCAR cache: sink {config.sink} | history INT2, page format {FORMAT_VERSION} | recent {config.recent}, "
        f"{bits:.2f} bits per element at {tokens:,} tokens",
        f"OSCAR memory: {fit:,} KV tokens in requests of {tokens:,}, {fit / dense:.1f} times what a 16-bit cache holds",
    ]
    if draft:
        part = draft_blocks(tokens, shares) / request_blocks(tokens, config.sink, config.recent, shares)
        lines.append(
            f"OSCAR draft model: {part:.0%} of that memory is its own cache of 16 bits, in blocks of "
            f"{draft.block_tokens} tokens"
        )
    return lines


def log_startup(vllm_config: Any) -> None:
    """Log the block once the worker knows its number of blocks."""
    blocks = vllm_config.cache_config.num_gpu_blocks
    if not blocks:
        return
    for line in describe(vllm_config, blocks):
        logger.info(line)
    recipe = load_recipe(vllm_config)
    if not recipe.metadata.centered:
        logger.warning(UNCENTERED)
    if far := near_only(recipe, vllm_config.model_config.max_model_len):
        logger.warning(far)
