"""Kernel launches that cost the host little: what Triton compiled is found again by a short key.

Triton's own launch sorts every argument into a specialization, hashes all of them and checks every global that the
kernel mentions: about 100 us for fifty arguments on a slow core, paid for every launch outside CUDA graphs. What the
binary depends on is less: the values that it was specialized on, the types, and that all pointers are aligned.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import torch
import triton

ALIGNMENT = 16
REUSE = os.environ.get("OSCAR_REUSE_LAUNCHES", "1") != "0"
"""0 sends every launch through Triton, for a release of it whose compiled kernels are called differently."""


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up; Triton's own takes microseconds on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


_compiles_only = False
"""Whether launches are compiled instead of made."""


def compile_together(launches: Callable[[], None]) -> None:
    """Compile every kernel that ``launches`` would launch, side by side, and run none of them.

    Where none is on disk that saves a third of the time (docs/serving.md, start-up). Under a Triton that cannot compile
    in threads nothing happens here, and each is compiled when it is first launched.
    """
    global _compiles_only
    together = getattr(triton, "AsyncCompileMode", None)
    if together is None or not REUSE:
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads, together(threads):
        _compiles_only = True
        try:
            launches()
        finally:
            _compiles_only = False


def _pick(positions: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """A function that takes these positions out of a tuple."""
    if len(positions) == 1:
        only = positions[0]
        return lambda values: (values[only],)
    return itemgetter(*positions) if positions else lambda values: ()


class Launch:
    """A Triton kernel as a function of a grid and *all* of its arguments, in order, constants included.

    The kernel is specialized on integers and constants (unless it declares otherwise), never on floats; a pointer
    parameter takes a tensor or None. The first argument is a tensor. Unaligned tensors take Triton's own path.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._made: dict[Any, Any] = {}
        self._tensors: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
        self._constants: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple

    def _sort(self, args: tuple[Any, ...]) -> None:
        """Learn from the first call which arguments the binary depends on."""
        free = set(self.kernel.do_not_specialize)
        pointers = [i for i, x in enumerate(args) if x is None or isinstance(x, torch.Tensor)]
        names = self.kernel.arg_names
        kept = [
            i for i, x in enumerate(args) if i not in pointers and names[i] not in free and not isinstance(x, float)
        ]
        self._tensors, self._constants = _pick(pointers), _pick(kept)

    def __call__(self, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        """Launch; ``options`` are Triton's (``num_warps`` and the like)."""
        if not (REUSE and args[0].is_cuda):  # on the CPU: the interpreter
            self.kernel[grid](*args, **options)
            return
        if _compiles_only:
            self.kernel.warmup(*args, grid=grid, **options)
            return
        if self._tensors is None:
            self._sort(args)
            assert self._tensors is not None
        address = 0
        kinds: list[torch.dtype | None] = []
        for x in self._tensors(args):
            if x is None:
                kinds.append(None)
            else:
                address |= x.data_ptr()
                kinds.append(x.dtype)
        key = (args[0].get_device(), self._constants(args), *kinds, *options.values())
        made = self._made.get(key) if address % ALIGNMENT == 0 else None
        if made is not None:
            made[grid](*args)
            return
        made = self.kernel[grid](*args, **options)
        if address % ALIGNMENT == 0:
            self._made[key] = made
