"""Which tests run where, and how small maths is run."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Without a GPU the Triton kernels run in the interpreter, which must be chosen before any test imports one of them.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


SERVED = [Path(__file__).parent / folder for folder in ("model", "reliability")]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what serves a real model. Without a GPU leave its tests out, unless they were asked for by name.

    Asked for (by their marker), they say why they do not run.
    """
    for item in items:
        if any(folder in item.path.parents for folder in SERVED):
            item.add_marker(pytest.mark.model)
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if "gpu" in config.getoption("markexpr"):
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no GPU"))
        return
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if item not in set(gpu)]


@pytest.fixture
def one_seed_and_thread() -> Iterator[None]:
    """The matrices are tiny: a thread pool on a busy machine makes them twenty times slower."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_recipe_and_no_subprocess(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For configurations of engines: no recipe is cached, and vLLM looks into model classes in this process.

    A process of its own, as is its way, would cost seconds for each.
    """
    from vllm.model_executor.models import registry

    monkeypatch.setenv("OSCAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda fn: fn())
