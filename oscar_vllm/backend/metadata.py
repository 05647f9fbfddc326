"""Per-step attention metadata, for the history and the window group alike."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from oscar_vllm.backend.context_plan import PrefillPlan, plan_prefill, tile_tokens
from oscar_vllm.backend.extend_plan import ExtendPlan, count_short, plan_extends
from oscar_vllm.backend.startup_log import log_startup
from oscar_vllm.cache.layout import PAGE_TOKENS
from oscar_vllm.kernels.decode import MAX_QUERY_TOKENS
from oscar_vllm.kernels.decode.reference import DecodePlan


@dataclass
class OscarMetadata(AttentionMetadata):
    """One step's batch: decodes first, then prefills."""

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    max_decode_query_len: int
    """Most query tokens of a decode request."""
    query_start: torch.Tensor
    """[requests + 1] int32 on the device."""
    query_start_cpu: torch.Tensor
    """[requests + 1] int32; exact for prefills."""
    seq_lens: torch.Tensor
    """[requests] int32 on the device, tokens after this step."""
    block_table: torch.Tensor
    """[requests, *] int32 of the builder's own group."""
    slot_mapping: torch.Tensor
    """[tokens] int64 of the builder's own group."""
    plan: DecodePlan | None = None
    """What the layers share where PyTorch computes the attention; made by the first of them."""
    extends: ExtendPlan | None = None
    """On a GPU, the leading prefills that are short and have a context; None without any."""
    prefill: PrefillPlan | None = None
    """On a GPU, what the layers share of the other prefills; None without any, and for the window group."""


class OscarMetadataBuilder(AttentionMetadataBuilder[OscarMetadata]):
    """Splits a batch into decodes (up to MAX_QUERY_TOKENS under speculation) and prefills.

    Never waits for the device: exact lengths of decodes are read there, by the kernels, and the lengths of prefills
    are known on the host. So decodes of one query length each, padded by empty requests, replay from a full CUDA graph.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self.reorder_batch_threshold: int = min(self.reorder_batch_threshold or 1, MAX_QUERY_TOKENS)
        self.is_history = kv_cache_spec.block_size == PAGE_TOKENS
        self.tile_tokens = tile_tokens(kv_cache_spec.num_kv_heads, kv_cache_spec.head_size)
        if self.is_history and get_tensor_model_parallel_rank() == 0:
            # Beside a draft model with few layers the target's make several groups: the first of them speaks.
            layers = vllm_config.compilation_config.static_forward_context
            ours = (name for name in layers if hasattr(getattr(layers[name], "impl", None), "window_name"))
            if next(ours) in layer_names:
                log_startup(vllm_config)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> OscarMetadata:
        common = common_attn_metadata
        num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold
        )
        extends, prefill = None, None
        if num_prefills and self.device.type == "cuda":
            extends, prefill = self._plan_prefills(num_decodes, num_decodes + num_prefills, common)
        return OscarMetadata(
            num_decodes=num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefills=num_prefills,
            max_decode_query_len=min(common.max_query_len, self.reorder_batch_threshold),
            query_start=common.query_start_loc,
            query_start_cpu=common.query_start_loc_cpu,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            extends=extends,
            prefill=prefill,
        )

    def _plan_prefills(
        self, first: int, last: int, common: CommonAttentionMetadata
    ) -> tuple[ExtendPlan | None, PrefillPlan | None]:
        """Plans for requests ``first .. last - 1`` of the batch, whose lengths vLLM gives the host exactly."""
        assert common.seq_lens_cpu_upper_bound is not None
        starts = common.query_start_loc_cpu[first : last + 1].tolist()
        lengths = common.seq_lens_cpu_upper_bound[first:last].tolist()
        short = count_short(starts, lengths)
        extends = None
        if short:
            extends = plan_extends(first, starts[: short + 1], lengths[:short], common.block_table_tensor)
        prefill = None
        if self.is_history and short < len(lengths):
            prefill = plan_prefill(first + short, starts[short:], lengths[short:], self.tile_tokens, self.device)
        return extends, prefill
