"""Launches by a short key: when a compiled kernel is used again, and when Triton decides anew."""

from typing import Any

import pytest
import torch
import triton

from oscar_vllm.kernels import launch as launches
from oscar_vllm.kernels.launch import Launch, compile_together


class FakeTensor(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class FakeKernel:
    """Records what goes through Triton's own launch and what goes to a compiled kernel."""

    arg_names = ("x", "y", "count", "stride", "scale", "SIZE")
    do_not_specialize = ("count",)

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.again: list[tuple[Any, ...]] = []
        self.only_compiled: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.only_compiled.append((grid, args, options))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.compiled.append((grid, args, options))
            return _Compiled(self)

        return launch


class _Compiled:
    def __init__(self, kernel: FakeKernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.kernel.again.append((grid, args))


def tensor(dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    return torch.zeros(64, dtype=dtype)[offset:].as_subclass(FakeTensor)


def test_only_what_the_binary_depends_on_compiles_again() -> None:
    kernel = FakeKernel()
    launch = Launch(kernel)
    x, y = tensor(), tensor()
    launch((1, 1, 1), x, y, 3, 64, 0.5, 128, num_warps=4)
    launch((2, 1, 1), tensor(), None, 3, 64, 0.5, 128, num_warps=4)
    assert len(kernel.compiled) == 2  # None for a tensor is another kernel
    launch((7, 2, 1), tensor(), y, 4, 64, 0.25, 128, num_warps=4)
    assert len(kernel.compiled) == 2
    assert kernel.again[0][0] == (7, 2, 1)
    assert kernel.again[0][1][2:] == (4, 64, 0.25, 128)
    for args in ((x, y, 3, 65, 0.5, 128), (x, y, 3, 64, 0.5, 256), (tensor(torch.bfloat16), y, 3, 64, 0.5, 128)):
        launch((1, 1, 1), *args, num_warps=4)
    launch((1, 1, 1), x, y, 3, 64, 0.5, 128, num_warps=8)
    assert len(kernel.compiled) == 6
    assert len(kernel.again) == 1


def test_unaligned_tensors_take_tritons_path() -> None:
    kernel = FakeKernel()
    launch = Launch(kernel)
    for _ in range(2):
        launch((1, 1, 1), tensor(), tensor(offset=1), 3, 64, 0.5, 128)
    assert len(kernel.compiled) == 2
    launch((1, 1, 1), tensor(), tensor(), 3, 64, 0.5, 128)
    launch((1, 1, 1), tensor(), tensor(), 3, 64, 0.5, 128)
    assert len(kernel.compiled) == 3
    assert len(kernel.again) == 1


def test_what_is_compiled_together_does_not_run() -> None:
    kernel = FakeKernel()
    launch = Launch(kernel)
    x = tensor()
    compile_together(lambda: launch((3, 1, 1), x, None, 3, 64, 0.5, 128, num_warps=4))
    assert [(grid, options) for grid, _, options in kernel.only_compiled] == [((3, 1, 1), {"num_warps": 4})]
    assert not kernel.compiled
    launch((3, 1, 1), x, None, 3, 64, 0.5, 128, num_warps=4)
    assert len(kernel.compiled) == 1
    assert len(kernel.only_compiled) == 1


def test_launches_run_again_after_one_that_cannot_be_compiled() -> None:
    kernel = FakeKernel()

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("does not compile")

    kernel.warmup = fail  # type: ignore[method-assign]
    launch = Launch(kernel)
    with pytest.raises(RuntimeError, match="does not compile"):
        compile_together(lambda: launch((3, 1, 1), tensor(), None, 3, 64, 0.5, 128))
    launch((3, 1, 1), tensor(), None, 3, 64, 0.5, 128)
    assert len(kernel.compiled) == 1


@pytest.mark.parametrize("lacking", ["threads in Triton", "launches by a short key"])
def test_without_the_means_nothing_is_compiled_ahead(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if lacking == "threads in Triton":
        monkeypatch.delattr(triton, "AsyncCompileMode")
    else:
        monkeypatch.setattr(launches, "REUSE", False)
    compile_together(lambda: pytest.fail("called"))
