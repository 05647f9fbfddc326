"""The window group's KV-cache spec and block manager: real blocks for sink and recent tokens, null blocks between.

Both live here because importing this module registers them with vLLM, and unpickling a spec must do that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from oscar_vllm.cache.layout import WINDOW_TOKENS, PageLayout

REFRESHED_HIT = 32 * 1024
"""Longest hit that leaves the last ``recent`` tokens of its prompt to be computed again, for their unquantized copies.

Those few hundred tokens attend to the context before them, unpacked once a layer: little for up to this many tokens,
and a good part of the time to first token beyond.
"""


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
        """Most real blocks of one request: the sinks, and a recent window for each step alive and for the next one.

        Each window reaches ``lookahead_tokens`` further and may begin inside a block.
        """
        recent = cdiv(self.recent_tokens + self.lookahead_tokens, self.block_size) + 1
        return self.sink_tokens // self.block_size + (self.steps_in_flight + 1) * recent

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        blocks = cdiv(vllm_config.model_config.max_model_len, self.block_size)
        return min(blocks, self.max_real_blocks) * self.page_size_bytes


def window_spec(
    *,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    sink: int,
    recent: int,
    lookahead: int,
    steps_in_flight: int,
) -> OscarWindowSpec:
    """The window spec of a layer, padded to the INT2 page so that both groups share vLLM's one block pool."""
    page_bytes = num_kv_heads * PageLayout(head_size).page_bytes
    if 2 * head_size * dtype.itemsize * WINDOW_TOKENS * num_kv_heads > page_bytes:
        raise ValueError(
            f"OSCAR keeps its window in 16-bit floats and the model computes in {dtype}: serve it with --dtype bfloat16"
        )
    return OscarWindowSpec(
        block_size=WINDOW_TOKENS,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        sink_tokens=sink,
        recent_tokens=recent,
        lookahead_tokens=lookahead,
        steps_in_flight=steps_in_flight,
        page_size_padded=page_bytes,
    )


class OscarWindowManager(SingleTypeKVCacheManager):
    """Holds a request's window blocks in one table over all its tokens, indexed by position // block_size.

    A block is real iff it is a sink block or reaches into the last ``recent`` tokens at the time it is allocated; it
    turns null when the recent window has moved past it. Only sink blocks enter the prefix cache: recent blocks would
    crowd the pool's eviction order, so a hit ends before its prompt's recent tokens or reads them from INT2.
    """

    def __init__(self, kv_cache_spec: OscarWindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.sink_blocks = kv_cache_spec.sink_tokens // self.block_size
        self.recent = kv_cache_spec.recent_tokens
        self.max_real_blocks = kv_cache_spec.max_real_blocks
        self._scanned: dict[str, int] = {}
        """First block of each request that remove_skipped_blocks has not seen yet."""

    def _first_recent(self, tokens: int) -> int:
        return max(0, tokens - self.recent) // self.block_size

    def _real(self, start: int, end: int, tokens: int) -> list[bool]:
        """Which of the blocks ``start .. end - 1`` of a request of ``tokens`` tokens are real."""
        first_recent = self._first_recent(tokens)
        return [index < self.sink_blocks or index >= first_recent for index in range(start, end)]

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[Any],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        table = self.req_to_blocks.get(request_id, ())
        start = max(len(table), total_computed_tokens // self.block_size)
        end = cdiv(num_tokens, self.block_size)
        blocks = sum(self._real(start, end, num_tokens_main_model))
        if apply_admission_cap:
            # A chunked prefill passes through more blocks than its last step holds; those it holds or hits are among
            # the most it can hold, so a hit never asks for more of the pool than the same prompt without one.
            there = sum(not block.is_null for blocks_there in (table, new_computed_blocks) for block in blocks_there)
            blocks = max(blocks, min(end - start, self.max_real_blocks - there))
        return blocks + self._get_num_evictable_blocks(new_computed_blocks)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[Any],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        table = self.req_to_blocks[request_id]
        assert not table
        length = num_local_computed_tokens // self.block_size
        hit = list(new_computed_blocks)[:length]
        if hit:
            self.block_pool.touch(hit)
        table.extend(hit)
        table.extend([self._null_block] * (length - len(hit)))
        self.num_cached_block[request_id] = length

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        record_for_zeroing: bool = True,
    ) -> None:
        # A connector brings INT2 pages only; those tokens are read from them.
        table = self.req_to_blocks[request_id]
        length = (num_local_computed_tokens + num_external_computed_tokens) // self.block_size
        table.extend([self._null_block] * (length - len(table)))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        table = self.req_to_blocks[request_id]
        real = self._real(len(table), cdiv(num_tokens, self.block_size), num_tokens_main_model)
        if not real:
            return []
        fresh = iter(self.block_pool.get_new_blocks(sum(real)))
        blocks = [next(fresh) if is_real else self._null_block for is_real in real]
        table.extend(blocks)
        if self._record_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in blocks if not block.is_null)
        return blocks

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        table = self.req_to_blocks.get(request_id)
        if not table:
            return
        first = max(self.sink_blocks, self._scanned.get(request_id, 0))
        last = min(self._first_recent(processed_computed_tokens), len(table))
        if last <= first:
            return
        self._scanned[request_id] = last
        passed = [block for block in table[first:last] if not block.is_null]
        table[first:last] = [self._null_block] * (last - first)
        if passed:
            self.block_pool.free_blocks(reversed(passed))

    def pop_blocks_for_free(self, request_id: str) -> list[Any]:
        self._scanned.pop(request_id, None)
        return [block for block in super().pop_blocks_for_free(request_id) if not block.is_null]

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: OscarWindowSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        reachable_boundaries: Sequence[int] = (),
        dcp_world_size: int = 1,
        final_segment_end_block: int | None = None,
    ) -> list[bool]:
        sink_blocks = kv_cache_spec.sink_tokens // kv_cache_spec.block_size
        return [index < sink_blocks for index in range(start_block, end_block)]

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: OscarWindowSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[Any], ...], int]:
        """The longest hit: any length, as INT2 serves every token, provided that its sink blocks are cached.

        Up to REFRESHED_HIT it ends before the recent window of the whole prompt, so that the window is computed again
        and what the prompt is continued with reads it unquantized, as without a hit.
        """
        block_size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            block_size,
            supports_fine_grained_hash_lookup=False,
            alignment_tokens=alignment_tokens,
        )
        hit = max_length
        if hit <= REFRESHED_HIT:
            # Counted from the prompt's end, not from the hit's: vLLM asks again with what came out, which must stay.
            hit = min(hit, max(0, len(hashes) * block_size - kv_cache_spec.recent_tokens))
        hit -= hit % alignment_tokens
        length = hit // block_size
        tables: tuple[list[Any], ...] = tuple([block_pool.null_block] * length for _ in kv_cache_group_ids)
        for index in range(min(kv_cache_spec.sink_tokens // block_size, length)):
            cached = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            if not cached:
                return tuple([] for _ in kv_cache_group_ids), 0
            for table, block in zip(tables, cached, strict=True):
                table[index] = block
        return tables, hit


def register_spec() -> None:
    """Tell vLLM which manager serves the window spec."""
    # Without this vLLM takes its own table for filled and the built-in specs go missing.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(OscarWindowSpec, OscarWindowManager, uniform_type_base_spec=OscarWindowSpec)


register_spec()
