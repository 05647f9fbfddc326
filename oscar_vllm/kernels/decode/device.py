"""What the device under a tensor can do."""

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device (a small number on the CPU, where the interpreter runs programs in turn)."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


@cache
def use_inline_ptx(device: torch.device) -> bool:
    """Whether kernels on this device may hold inline PTX (not in the interpreter, not on other vendors' GPUs)."""
    return device.type == "cuda" and torch.version.hip is None


@cache
def use_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it still runs (compute capability 9.0 up)."""
    return use_inline_ptx(device) and torch.cuda.get_device_capability(device) >= (9, 0)


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that begins with a wait for the grid before it."""
    return {"launch_pdl": True} if use_dependent_launch(device) else {}
