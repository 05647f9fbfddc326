"""Short-lived vLLM engines for calibration, demo and evaluation: same defaults everywhere, always shut down."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CONFIGURE_LOGGING": "1"}


@contextmanager
def engine(model: str, *, quiet: bool = True, **options: Any) -> Iterator[Any]:
    """A ``vllm.LLM`` that is shut down on exit, its processes ended and its memory free.

    Args:
        model: a path or Hugging Face id.
        quiet: keep vLLM's start-up log off the terminal.
        options: passed to ``LLM``; options that are None are left to vLLM.
    """
    if quiet:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
    from vllm import LLM

    llm = LLM(model=model, **{name: value for name, value in options.items() if value is not None})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def cpu_options(kv_cache_gib: float = 1.0) -> dict[str, Any]:
    """Options that bound an engine's memory on the CPU; empty where vLLM runs on another platform."""
    from vllm.platforms import current_platform

    return {"kv_cache_memory_bytes": int(kv_cache_gib * 2**30)} if current_platform.is_cpu() else {}
