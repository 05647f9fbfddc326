"""A real small model through real vLLM: what users do."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def model() -> str:
    from oscar_vllm.demo.model import ensure_demo_model

    return str(ensure_demo_model())


@pytest.fixture(scope="session")
def recipe(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe calibrated on 8,192 tokens of the shipped text."""
    from oscar_vllm.calibration.run import calibrate
    from oscar_vllm.calibration.text import default_text

    path = tmp_path_factory.mktemp("recipe") / "recipe.safetensors"
    with in_process():
        calibrate(model, text=default_text(), out=path)
    return path


@pytest.fixture(scope="session")
def tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="session")
def held_out(tokenizer: Any) -> list[int]:
    """Token ids of a text that no recipe was calibrated on."""
    from oscar_vllm.calibration.text import held_out_text

    return list(tokenizer.encode(held_out_text()))


Start = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="session")
def stock(model: str) -> Start:
    """Start the stock backend in this process: ``with stock(max_model_len=...) as llm``."""
    return _starter(model, {})


@pytest.fixture(scope="session")
def oscar(model: str, recipe: Path) -> Start:
    """Start OSCAR: ``with oscar(...) as llm``; ``config`` adds to its options."""
    return _starter(model, {"attention_backend": "OSCAR"}, recipe)


@contextmanager
def in_process() -> Iterator[None]:
    """Engines started inside run in this process, so that a test can look at the scheduler and the caches."""
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        yield
    finally:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.platforms import current_platform

        cleanup_dist_env_and_memory()
        # Done once it is done for the process, and its scan of all modules trips over numba's once those are loaded.
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
        if before is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before


def _starter(model: str, fixed: dict[str, Any], recipe: Path | None = None) -> Start:
    @contextmanager
    def start(config: dict[str, Any] | None = None, **options: Any) -> Iterator[Any]:
        from oscar_vllm.engine import cpu_options, engine

        settings: dict[str, Any] = {
            "enforce_eager": True,
            "max_model_len": 2560,
            **cpu_options(0.5),
            **fixed,
            **options,
        }
        if recipe is not None:
            settings["additional_config"] = {"oscar": {"recipe": str(recipe), **(config or {})}}
        with in_process(), engine(model, **settings) as llm:
            yield llm

    return start


def core(llm: Any) -> Any:
    """The engine core of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core


def free_blocks(llm: Any) -> int:
    """Blocks that no request holds, by the pool's own count."""
    return int(core(llm).scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def watch_preemptions(llm: Any) -> list[Any]:
    """The requests that the engine preempts from now on, as it does."""
    scheduler, preempted = core(llm).scheduler, []
    preempt = scheduler._preempt_request

    def count(request: Any, *args: Any, **options: Any) -> None:
        preempted.append(request)
        preempt(request, *args, **options)

    scheduler._preempt_request = count
    return preempted
