"""How many threads calibration computes with on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """A head's matrices are small: threads that share one wait for each other longer than they work.

    On a busy machine they wait for minutes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
