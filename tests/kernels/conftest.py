"""Kernel tests run in Triton's interpreter (see ``tests/conftest.py``) or, the same ones, on a GPU."""

from typing import Any

import pytest
import torch

GPU = torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(GPU, reason="the interpreter was not chosen")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no GPU")]),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where a kernel test runs: the interpreter on the CPU, or (-m gpu) the GPU."""
    return str(request.param)


def _variant(item: pytest.Item) -> str:
    """The same for tests that run the same compiled kernels, as far as their parameters tell."""
    params: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
    kinds = [f"{name}={params[name]}" for name in ("dim", "dtype", "rounds", "moments", "centered") if name in params]
    group, new = params.get("group"), params.get("new")
    if isinstance(group, int) or isinstance(new, int):
        columns = (group if isinstance(group, int) else 2) * (new if isinstance(new, int) else 1)
        kinds.append("wide" if columns > 8 else "narrow")
    return "-".join([item.path.stem, *kinds] if kinds else [item.path.stem, item.name.partition("[")[0]])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Compiling takes most of the GPU tests' time: ``-n 12 --dist loadgroup`` keeps what shares kernels together."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if "kernels" in item.path.parts:
                item.add_marker(pytest.mark.xdist_group(_variant(item)))
