"""Without a GPU the Triton kernels run in the interpreter, which must be chosen before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
