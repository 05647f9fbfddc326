"""Gauges on vLLM's own /metrics endpoint: what the cache holds.

vLLM's statistics tell of the whole block pool only (``vllm:kv_cache_usage_perc``), not of one group of it, so the
window blocks in use cannot be told apart here.
"""

from typing import Any

from prometheus_client import Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from oscar_vllm.backend.checks import selects_oscar
from oscar_vllm.backend.drafting import draft_cache
from oscar_vllm.backend.recipes import load_recipe
from oscar_vllm.cache.capacity import ALONE, tokens_that_fit
from oscar_vllm.cache.layout import bits_per_element
from oscar_vllm.config import OscarConfig

_LABELS = ["model_name", "engine"]
_gauges: dict[str, Gauge] = {}


def _gauge(name: str, documentation: str) -> Gauge:
    """One gauge a process: vLLM makes a logger an engine."""
    if name not in _gauges:
        _gauges[name] = Gauge(name, documentation, _LABELS, multiprocess_mode="mostrecent")
    return _gauges[name]


class OscarStatLogger(StatLoggerBase):
    """Sets the gauges once the engine knows its cache; does nothing where another backend serves."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index

    def log_engine_initialized(self) -> None:
        """vLLM calls this when the engine is up."""
        config = self.vllm_config
        blocks = config.cache_config.num_gpu_blocks
        if not blocks or not selects_oscar(config):
            return
        oscar = OscarConfig.from_additional_config(config.additional_config)
        length = config.model_config.max_model_len
        windows = oscar.sink + oscar.recent
        labels = (config.model_config.served_model_name, str(self.engine_index))
        draft = draft_cache(config)
        shares = draft.shares if draft else ALONE
        _gauge("oscar:kv_tokens", "KV tokens the cache holds in requests of the model's full length").labels(
            *labels
        ).set(tokens_that_fit(blocks, length, oscar.sink, oscar.recent, shares))
        head_size = load_recipe(config).geometry.head_size
        _gauge("oscar:bits_per_element", "Bits a cached element takes in requests of the model's full length").labels(
            *labels
        ).set(bits_per_element(head_size, length, windows))

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Nothing changes from step to step."""
