"""The OSCAR attention backend: what vLLM asks of a backend, and one layer's attention."""

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from oscar_vllm.backend.context_plan import PrefillPlan
from oscar_vllm.backend.extend_plan import ExtendPlan
from oscar_vllm.backend.metadata import OscarMetadata, OscarMetadataBuilder
from oscar_vllm.backend.oracle import Oracle, oracle_for
from oscar_vllm.backend.prefill import prefill_cpu
from oscar_vllm.backend.ranks import first_kv_head
from oscar_vllm.backend.recipes import load_recipe
from oscar_vllm.backend.window_layer import LAYOUTS, SUFFIX, OscarWindowLayer
from oscar_vllm.cache.layout import PAGE_TOKENS
from oscar_vllm.cache.spec import history_spec
from oscar_vllm.config import OscarConfig
from oscar_vllm.kernels.decode import MAX_QUERY_TOKENS, attend, decode_step
from oscar_vllm.kernels.decode.reference import plan_decode
from oscar_vllm.kernels.views import CacheView, LayerRecipe
from oscar_vllm.kernels.write import write


class OscarBackend(AttentionBackend):
    """2-bit paged KV cache with unquantized sink and recent windows."""

    # So that decodes write their tokens in the launch that transforms their queries.
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return "OSCAR"

    @staticmethod
    def get_impl_cls() -> type["OscarImpl"]:
        return OscarImpl

    @staticmethod
    def get_builder_cls() -> type[OscarMetadataBuilder]:
        return OscarMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [PAGE_TOKENS]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64, 128, 256]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        # vLLM takes any multiple; a page here is exactly what the kernels address.
        return block_size is None or block_size == PAGE_TOKENS

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return LAYOUTS

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return history_spec(spec)


class OscarImpl(AttentionImpl[OscarMetadata]):
    """Attention of one layer over its history and window caches."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **unknown: Any,
    ) -> None:
        unsupported = {
            "alibi": alibi_slopes is not None,
            "sliding-window": sliding_window is not None,
            "logit soft-cap": bool(logits_soft_cap),
            f"{attn_type} attention": attn_type != AttentionType.DECODER,
            "shared-KV": kv_sharing_target_layer_name is not None,
            "attention-sink": sinks is not None,
            "/".join(unknown): any(option is not None for option in unknown.values()),
        }
        for feature, used in unsupported.items():
            if used:
                raise ValueError(f"OSCAR does not serve {feature} layers; use another attention backend for this model")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.vllm_config = get_current_vllm_config()
        self.config = OscarConfig.from_additional_config(self.vllm_config.additional_config)
        self.layers = self.vllm_config.compilation_config.static_forward_context
        self.window_name = ""
        self.recipe: LayerRecipe | None = None
        self.oracle: Oracle | None = None
        self.observer: Any = None
        """Calibration statistics to feed with this layer's queries, keys, values and outputs."""

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Find this layer's place, load its share of the recipe and set its window layer beside it."""
        name = next(name for name, layer in self.layers.items() if getattr(layer, "impl", None) is self)
        self.window_name = name + SUFFIX
        self.oracle = oracle_for(name)
        if self.window_name not in self.layers:  # called again on a weight reload
            self.layers[self.window_name] = OscarWindowLayer(self.layers[name], self.config, act_dtype)
        recipe = load_recipe(self.vllm_config)
        first = first_kv_head(recipe.geometry.num_kv_heads)
        heads = slice(first, first + self.num_kv_heads)
        self.recipe = recipe.layer(extract_layer_index(name), self.vllm_config.device_config.device, heads)
        if self.recipe.key_mean.is_cuda:
            from oscar_vllm.backend.warmup import decode_batches, has_contexts, warm_up

            if has_contexts(self.vllm_config):
                batches = decode_batches(self.vllm_config)
                sizes = (self.config.sink, self.config.recent)
                warm_up(self.recipe, self.num_heads, act_dtype, self.scale, *sizes, batches)

    def _window_metadata(self) -> OscarMetadata:
        metadata: OscarMetadata = get_forward_context().attn_metadata[self.window_name]
        return metadata

    def _view(self, history: torch.Tensor, batch: OscarMetadata | ExtendPlan, first: int, last: int) -> CacheView:
        """The caches as requests (of a plan, pieces) ``first .. last - 1`` of the batch see them."""
        window = self._window_metadata()
        tables = window.extends if isinstance(batch, ExtendPlan) else window
        assert tables is not None
        return CacheView(
            history=history.view(torch.uint8),
            window=self.layers[self.window_name].kv_cache,
            block_table=batch.block_table[first:last],
            window_table=tables.block_table[first:last],
            seq_lens=batch.seq_lens[first:last],
            query_start=batch.query_start[first : last + 1],
            sink=self.config.sink,
            recent=self.config.recent,
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: OscarMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of this step's queries [T, Hq, D] into output [T, Hq, D]."""
        if attn_metadata is None or kv_cache.numel() == 0:  # profiling
            if query.is_cuda:
                self._borrow_workspace(query.dtype)
            return output.fill_(0)
        assert self.recipe is not None
        metadata = attn_metadata
        tokens = min(metadata.slot_mapping.shape[0], key.shape[0])
        new = (key[:tokens], value[:tokens])
        slots = (metadata.slot_mapping[:tokens], self._window_metadata().slot_mapping[:tokens])
        if metadata.num_prefills:
            window = self.layers[self.window_name].kv_cache
            write(*new, kv_cache.view(torch.uint8), window, *slots, self.recipe)
        if metadata.num_decodes:
            self._decode(query, new, slots, kv_cache, metadata, output)
        if metadata.extends is not None:
            self._extend(query, kv_cache, metadata.extends, output)
        if metadata.prefill is not None:
            self._prefill_cuda(query, key, value, kv_cache, metadata, metadata.prefill, output)
        elif metadata.num_prefills and not query.is_cuda:
            self._prefill_cpu(query, key, value, kv_cache, metadata, output)
        if self.oracle is not None:
            everyone = self._view(kv_cache, metadata, 0, metadata.num_decodes + metadata.num_prefills)
            self.oracle.check(query, key, value, everyone, self.recipe, self.scale, metadata.num_decodes, output)
        if self.observer is not None:
            tokens = int(metadata.query_start_cpu[-1])
            self.observer.update(query[:tokens], key[:tokens], value[:tokens], output[:tokens])
        return output

    def _decode(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor],
        slots: tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        metadata: OscarMetadata,
        output: torch.Tensor,
    ) -> None:
        """The decodes that lead the batch; where they are all of it, their tokens are not in the caches yet."""
        assert self.recipe is not None
        tokens = metadata.num_decode_tokens
        view = self._view(kv_cache, metadata, 0, metadata.num_decodes)
        if metadata.plan is None and not query.is_cuda:
            metadata.plan = plan_decode(view, metadata.max_decode_query_len, tokens)
        options: dict[str, Any] = {
            "max_query_len": metadata.max_decode_query_len,
            "out": output[:tokens],
            "plan": metadata.plan,
        }
        if metadata.num_prefills:
            attend(query[:tokens], view, self.recipe, self.scale, **options)
        else:
            decode_step(query[:tokens], *new, view, *slots, self.recipe, self.scale, **options)

    def _extend(self, query: torch.Tensor, kv_cache: torch.Tensor, plan: ExtendPlan, output: torch.Tensor) -> None:
        """Short prefills behind a context, as decodes of a few tokens each."""
        assert self.recipe is not None
        view = self._view(kv_cache, plan, 0, plan.seq_lens.shape[0])
        rows = slice(plan.first_token, plan.first_token + plan.tokens)
        attend(query[rows], view, self.recipe, self.scale, max_query_len=MAX_QUERY_TOKENS, out=output[rows])

    def _prefill_cpu(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: OscarMetadata,
        output: torch.Tensor,
    ) -> None:
        """Prefills one by one; the CPU has no variable-length attention."""
        assert self.recipe is not None
        starts = metadata.query_start_cpu.tolist()
        for request in range(metadata.num_decodes, metadata.num_decodes + metadata.num_prefills):
            rows = slice(starts[request], starts[request + 1])
            if rows.start == rows.stop:
                continue
            length = int(metadata.seq_lens[request])
            prefill_cpu(
                query[rows],
                key[rows],
                value[rows],
                self._view(kv_cache, metadata, request, request + 1),
                length - (rows.stop - rows.start),
                self.recipe,
                self.scale,
                output[rows],
            )

    def _prefill_cuda(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: OscarMetadata,
        plan: PrefillPlan,
        output: torch.Tensor,
    ) -> None:
        """All prefills at once."""
        from oscar_vllm.backend.flash import flash_attention
        from oscar_vllm.backend.prefill_cuda import prefill_cuda

        assert self.recipe is not None
        rows = slice(plan.first_token, plan.first_token + plan.tokens)
        prefill_cuda(
            query[rows],
            key[rows],
            value[rows],
            self._view(kv_cache, metadata, 0, metadata.num_decodes + metadata.num_prefills),
            plan,
            self.recipe,
            self.scale,
            output[rows],
            self._borrow_workspace(query.dtype) if plan.tiles else [],
            flash_attention(self.head_size),
        )

    def _borrow_workspace(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Scratch for the largest chunk that the scheduler makes; vLLM keeps one for all layers."""
        from oscar_vllm.backend.prefill_cuda import borrow_workspace, workspace_shapes

        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        return borrow_workspace(workspace_shapes(tokens, self.num_heads, self.num_kv_heads, self.head_size), dtype)
