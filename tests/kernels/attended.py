"""Decode attention of a case by the kernels, and its comparison with float64."""

import torch
from caches import Case, attend_float64, relative_error

from oscar_vllm.kernels.decode.triton import attend_triton


def attend(case: Case, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of a case, NaN where nothing was written."""
    out = torch.full(case.query.shape, float("nan"), dtype=dtype, device=case.query.device)
    lse = torch.full(case.query.shape[:2], float("nan"), dtype=torch.float32, device=case.query.device)
    attend_triton(case.query, case.view, case.recipe, case.scale, max_query_len=case.max_query_len, out=out, lse=lse)
    return out, lse


def check(case: Case, out: torch.Tensor, lse: torch.Tensor, bound: float = 2e-4, worst: float = 1e-3) -> None:
    """Rows of requests near float64, all others untouched."""
    want, want_lse = attend_float64(case)
    tokens = int(case.view.query_start[-1])
    error = relative_error(out[:tokens], want[:tokens])
    assert error[0] <= bound
    assert error[1] <= worst
    torch.testing.assert_close(lse[:tokens].double().cpu(), want_lse[:tokens], rtol=1e-4, atol=2e-3)
    assert out[tokens:].isnan().all()
    assert lse[tokens:].isnan().all()


def run(device: str, case: Case, bound: float = 2e-4, worst: float = 1e-3) -> None:
    case = case.to(device)
    check(case, *attend(case), bound, worst)
