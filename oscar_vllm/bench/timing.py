"""Times of CUDA work as served: replays of a CUDA graph over buffers larger than the L2 cache."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

ROTATED_BYTES = 256 << 20
"""Buffers that one measurement walks over, several times any GPU's L2."""
MOST_SETS = 48
LEAST_CALLS = 16
"""Calls in a graph: starting it takes the GPU microseconds that a model's tens of layers share too."""
_HEAD_START = 400_000
"""Clock cycles of a spin before the first event, while the host hands the work over."""


def sets_for(bytes_per_set: int) -> int:
    """How many copies of the buffers a measurement rotates over."""
    return max(2, min(MOST_SETS, -(-ROTATED_BYTES // max(bytes_per_set, 1))))


def _elapsed(work: Callable[[], Any], repeats: int) -> float:
    """Median milliseconds of ``work`` on the device."""
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(_HEAD_START)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def graph_microseconds(calls: Sequence[Callable[[], None]], replays: int = 25) -> float:
    """Median time of one call, in microseconds, when ``calls`` run one after the other in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    rounds = -(-LEAST_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls] * rounds:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return _elapsed(graph.replay, replays) * 1e3 / (rounds * len(calls))


def copy_bandwidth(gigabytes: float = 4.0, repeats: int = 10) -> float:
    """Bytes per second, read plus written, of PyTorch's device-to-device copy: the ceiling of every row."""
    source = torch.randn(int(gigabytes * 2**28), device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (_elapsed(lambda: target.copy_(source), repeats) * 1e-3)
