"""Engines of this process with a tiny model, for the tests that need a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


def graphs(*sizes: int) -> dict[str, Any]:
    """Full CUDA graphs for decodes of so many tokens."""
    return {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": list(sizes)}
    }


@contextmanager
def engine(model: str, monkeypatch: pytest.MonkeyPatch, recipe: str = "hadamard", **options: Any) -> Iterator[Any]:
    """An engine of this process, so that its caches can be reached.

    ``model`` has weights of its own (``tiny_model``): those of vLLM's ``load_format="dummy"`` are so small that no
    answer depends on its context.
    """
    from vllm import LLM, envs

    envs.disable_envs_cache()  # of an engine before it, which may have had the other model runner
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    settings: dict[str, Any] = {
        "attention_backend": "OSCAR",
        "additional_config": {"oscar": {"recipe": recipe}},
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 200 * 2**20,
        "gpu_memory_utilization": 0.05,  # so that it starts beside other work
        "disable_log_stats": False,
        "seed": 0,
    }
    llm = LLM(model=model, **(settings | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        torch.cuda.empty_cache()


def caches(llm: Any) -> list[torch.Tensor]:
    """The bytes of every layer's cache."""
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [layer.kv_cache.view(torch.uint8) for layer in layers.values() if layer.kv_cache.numel()]


def check_in_a_pool_of_nan(llm: Any, ask: Callable[[], Any]) -> None:
    """The answers are those of a clean pool, and the null block stays as it is."""
    llm.reset_prefix_cache()
    clean = ask()
    llm.reset_prefix_cache()
    for cache in caches(llm):
        cache.fill_(255)
    assert ask() == clean
    assert all(bool((cache[0] == 255).all()) for cache in caches(llm)), "the null block was written"
