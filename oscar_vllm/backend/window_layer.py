"""The window cache as a layer of its own, so that vLLM allocates, frees and shares it like any other."""

from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheLayout

from oscar_vllm.backend.metadata import OscarMetadataBuilder
from oscar_vllm.cache.layout import WINDOW_TOKENS
from oscar_vllm.cache.window import OscarWindowSpec, window_spec
from oscar_vllm.config import OscarConfig

SUFFIX = ".oscar_window"
LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)


class OscarWindowBackend(AttentionBackend):
    """Metadata and block size of the window group; attention itself reads it from the main layer."""

    @staticmethod
    def get_name() -> str:
        return "OSCAR_WINDOW"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("the window cache is read by the OSCAR backend of its layer")

    @staticmethod
    def get_builder_cls() -> type[OscarMetadataBuilder]:
        return OscarMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(WINDOW_TOKENS)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return LAYOUTS


class OscarWindowLayer(AttentionLayerBase):
    """Stands in vLLM's forward context beside its attention layer; not a module of the model."""

    def __init__(self, layer: Any, config: OscarConfig, dtype: torch.dtype) -> None:
        self.num_heads = layer.num_heads
        self.num_kv_heads = layer.num_kv_heads
        self.head_size = layer.head_size
        self.dtype = dtype
        self.config = config
        # vLLM binds the cache here, and another one while it profiles: always read it from here.
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return OscarWindowBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> OscarWindowSpec:
        scheduler, speculative = vllm_config.scheduler_config, vllm_config.speculative_config
        if scheduler.disable_hybrid_kv_cache_manager:
            # Also reached when vLLM switches it off by itself, for a KV connector without hybrid support.
            raise ValueError(
                "OSCAR keeps two KV-cache groups and vLLM's hybrid KV cache manager is disabled; remove "
                "--disable-hybrid-kv-cache-manager, or the KV connector that disables it"
            )
        return window_spec(
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            sink=self.config.sink,
            recent=self.config.recent,
            lookahead=0 if speculative is None else speculative.num_speculative_tokens or 0,
            steps_in_flight=2 if scheduler.async_scheduling else 1,
        )
