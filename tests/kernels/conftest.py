"""Without a GPU the Triton kernels run in the interpreter, which must be chosen before they are imported."""

import os

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(GPU, reason="the interpreter was not chosen")),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no GPU")]),
    ]
)
def device(request: pytest.FixtureRequest) -> str:
    """Where a kernel test runs: the interpreter on the CPU, or (-m gpu) the GPU."""
    return str(request.param)
