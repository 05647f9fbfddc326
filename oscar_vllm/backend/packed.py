"""Small integer arrays of a step, sent to the device in one copy."""

from collections.abc import Sequence

import torch

_ALIGNED = 4
"""int32 values of 16 bytes: kernels are compiled for pointers aligned to that."""


def send_packed(arrays: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
    """Each array as an int32 tensor on ``device``, all views of one buffer, 16-byte aligned; does not synchronize."""
    numbers: list[int] = []
    starts = []
    for array in arrays:
        starts.append(len(numbers))
        numbers.extend(array)
        numbers.extend([0] * (-len(array) % _ALIGNED))
    host = torch.tensor(numbers, dtype=torch.int32)
    if device.type == "cuda":
        host = host.pin_memory()
    sent = host.to(device, non_blocking=True)
    return [sent[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]
