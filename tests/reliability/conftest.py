"""Served runs under faults, with an uncalibrated rotation (nothing to calibrate first)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from model.conftest import Start, in_process, model
from tiny_model import write_checkpoint

__all__ = ["model"]  # a fixture


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of two layers with random weights."""
    return str(write_checkpoint(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def oscar(tiny: str) -> Start:
    """Start OSCAR in this process: ``with oscar(...) as llm``; ``config`` adds to its options."""

    @contextmanager
    def start(config: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
        from oscar_vllm.engine import cpu_options, engine

        settings: dict[str, Any] = {
            "attention_backend": "OSCAR",
            "additional_config": {"oscar": {"recipe": "hadamard", **(config or {})}},
            "enforce_eager": True,
            "max_model_len": 1024,
            "skip_tokenizer_init": True,
            **cpu_options(0.05),
        }
        with in_process(), engine(tiny, **settings | options) as llm:
            yield llm

    return start
