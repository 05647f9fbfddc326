"""Draft models: a backend and a 16-bit cache of their own, in the block pool that OSCAR's two caches share.

vLLM pads the pages of all cache groups to the largest. A draft model's page of 128 tokens in 16 bits would be several
times an INT2 page and most of the pool padding: its blocks hold as many tokens as fit into an INT2 page instead.
"""

from dataclasses import dataclass
from math import ceil
from typing import Any

from vllm.config.utils import replace
from vllm.platforms import current_platform

from oscar_vllm.cache.capacity import Shares, group_layers
from oscar_vllm.cache.layout import PAGE_TOKENS, PageLayout

METHODS = ("ngram", "ngram_gpu", "suffix", "draft_model")
"""Where drafts may come from: host code that keeps no cache, or a model of its own."""
DRAFT_PREFIX = "draft_model."
"""vLLM's, of the draft's layers."""


def draft_config(vllm_config: Any) -> Any:
    """The draft model's configuration; None without one."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or speculative.method != "draft_model":
        return None
    return speculative.draft_model_config


def is_of_draft(vllm_config: Any) -> bool:
    """Whether this is the configuration that vLLM builds the draft model with, made out of the target's."""
    draft = draft_config(vllm_config)
    return draft is not None and vllm_config.model_config is draft


def give_draft_its_backend(vllm_config: Any) -> None:
    """In place of the target's, which vLLM 0.33 lets it inherit: the one that was asked for, else vLLM's choice."""
    backend = vllm_config.speculative_config.attention_backend
    vllm_config.attention_config = replace(vllm_config.attention_config, backend=backend)


def _least_block() -> int:
    """The smallest block that vLLM's attention backends of this device take."""
    return 32 if current_platform.is_cpu() else 16


@dataclass(frozen=True)
class DraftCache:
    """How the draft model's cache lies beside the target's, which has INT2 pages of ``page_bytes`` a layer."""

    block_tokens: int
    """Tokens of the draft model that one block of the pool holds."""
    token_bytes: int
    """Of a token in a layer of the draft model, in 16 bits; of the target's ``model_token_bytes``."""
    layers: int
    model_token_bytes: int
    model_layers: int
    page_bytes: int

    @property
    def block_bytes(self) -> int:
        """Of a block of the draft model in one of its layers, without padding."""
        return self.block_tokens * self.token_bytes

    @property
    def shares(self) -> Shares:
        group = group_layers(self.model_layers, self.layers)
        return Shares(ceil(self.model_layers / group), ceil(self.layers / group), self.block_tokens)

    def dense_tokens(self, pool_blocks: int) -> int:
        """Tokens that the pool's memory would hold were the target's cache in 16 bits too."""
        pool = pool_blocks * group_layers(self.model_layers, self.layers) * max(self.page_bytes, self.block_bytes)
        return pool // (self.model_layers * self.model_token_bytes + self.layers * self.token_bytes)


def draft_cache(vllm_config: Any) -> DraftCache | None:
    """None without a draft model."""
    draft, model = draft_config(vllm_config), vllm_config.model_config
    if draft is None:
        return None
    draft_heads = draft.get_num_kv_heads(vllm_config.speculative_config.draft_parallel_config)
    heads, head_size = model.get_num_kv_heads(vllm_config.parallel_config), model.get_head_size()
    token_bytes = 2 * draft_heads * draft.get_head_size() * draft.dtype.itemsize
    page_bytes = heads * PageLayout(head_size).page_bytes
    tokens = PAGE_TOKENS
    while tokens > _least_block() and tokens * token_bytes > page_bytes:
        tokens //= 2
    return DraftCache(
        block_tokens=tokens,
        token_bytes=token_bytes,
        layers=draft.get_total_num_hidden_layers(),
        model_token_bytes=2 * heads * head_size * model.dtype.itemsize,
        model_layers=model.get_total_num_hidden_layers(),
        page_bytes=page_bytes,
    )


def make_room_for_draft(vllm_config: Any) -> None:
    """Give the draft model's layers their block size, and their place among the groups that vLLM will make of all."""
    cache = draft_cache(vllm_config)
    if cache is None:
        return
    # Read by the draft's layers when they are asked for their caches; the target's have sizes of their own.
    vllm_config.cache_config.block_size = cache.block_tokens
    if vllm_config.use_v2_model_runner:
        return
    # The V1 runner drafts with the block table of the first group, whichever it is: with the target's, drafts would
    # be written over other requests' pages.
    layers = vllm_config.compilation_config.static_forward_context
    for name in [name for name in layers if not name.startswith(DRAFT_PREFIX)]:
        layers[name] = layers.pop(name)


def speculation_problem(vllm_config: Any) -> str | None:
    """What of the speculation is not served, and what to do: one sentence; None if it is served."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return None
    if speculative.method not in METHODS:
        return (
            f"OSCAR verifies drafts of the methods {', '.join(METHODS)} and speculative_config asks for "
            f"{speculative.method}: name one of these as its method, or leave out --speculative-config"
        )
    cache = draft_cache(vllm_config)
    if cache is None:
        return None
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        # The ranks without the draft model would order the cache groups in another way.
        return "OSCAR serves draft models in one pipeline stage: leave out --pipeline-parallel-size, or the draft model"
    name = speculative.draft_model_config.model
    if getattr(speculative.attention_backend, "name", None) == "OSCAR":
        return (
            "OSCAR serves the target model only and speculative_config asks for it for the draft model: leave "
            "attention_backend out of speculative_config"
        )
    if (speculative.kv_cache_dtype or "auto") != "auto":
        return (
            f"OSCAR's pool holds a draft model's cache in 16 bits and speculative_config asks for "
            f"{speculative.kv_cache_dtype}: leave kv_cache_dtype out of speculative_config"
        )
    if cache.shares.draft_groups > 1:
        return (
            f"OSCAR takes drafts from a model with less than one and a half times the target's {cache.model_layers} "
            f"layers and {name} has {cache.layers}: name a smaller draft model"
        )
    if cache.block_bytes > cache.page_bytes and cache.block_bytes % cache.page_bytes == 0:
        # vLLM would make pages of several times 128 tokens of the target's, which the kernels do not address.
        return (
            f"OSCAR's pool cannot hold the draft model {name}, whose block of {cache.block_tokens} tokens takes "
            f"{cache.block_bytes // cache.page_bytes} times the target's INT2 page: name a smaller draft model"
        )
    return None
