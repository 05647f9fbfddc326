"""The context kernel: windows where valid, history elsewhere, and nothing that is NaN in the caches."""

import pytest
import torch
from caches import Case, random_case

from oscar_vllm.kernels.views import CacheView

Piece = tuple[int, int, int]
"""(request, first position, end)."""


def gather(view: CacheView, pieces: list[Piece], slack: int = 0) -> list[torch.Tensor]:
    """Run the kernel on (request, start, stop) pieces; returns K and V [T, H, D] and the spare rows behind them."""
    from oscar_vllm.kernels.context.triton import gather_context_triton

    device = view.history.device
    lengths = [stop - start for _, start, stop in pieces]
    cu_lens = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    total = sum(lengths)
    shape = (total + 5, view.history.shape[1], view.window.shape[-1] // 2)
    out = [torch.full(shape, float("nan"), dtype=view.window.dtype, device=device) for _ in range(2)]
    starts = torch.tensor([start for _, start, _ in pieces], dtype=torch.int32, device=device)
    rows = torch.tensor([row for row, _, _ in pieces], dtype=torch.int32, device=device)
    gather_context_triton(view, starts, cu_lens, rows, *out, max(lengths) + slack)
    assert all(x[total:].isnan().all() for x in out), "rows of no piece"
    return [x[:total] for x in out]


def check(case: Case, pieces: list[Piece], device: str, slack: int = 0) -> None:
    case = case.to(device)
    got = gather(case.view, pieces, slack)
    for mine, source in zip(got, (case.keys, case.values), strict=True):
        want = torch.cat([source[row][start:stop] for row, start, stop in pieces])
        error = (mine.double().cpu() - want).abs()
        assert (error <= torch.finfo(mine.dtype).eps * want.abs() + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("missing", [0.0, 0.4, 1.0], ids=lambda x: f"missing{x}")
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (2, 128), (1, 256)])
def test_pieces_of_several_requests(device: str, heads: int, dim: int, missing: float, dtype: torch.dtype) -> None:
    case = random_case([400, 77, 131], [100, 1, 3], heads=heads, dim=dim, dtype=dtype, missing=missing, sink=64)
    check(case, [(0, 0, 300), (2, 5, 128), (1, 76, 77), (0, 127, 129)], device, slack=40)


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (16, 0), (0, 48), (16, 32), (64, 256)])
def test_window_sizes(device: str, sink: int, recent: int) -> None:
    case = random_case([290, 17], [40, 17], sink=sink, recent=recent, missing=0.2)
    check(case, [(0, 0, 250), (1, 0, 17)], device)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 127, 128, 129, 257])
def test_lengths_around_blocks_and_pages(device: str, length: int) -> None:
    check(random_case([length], 1, sink=16, recent=16, missing=0.3), [(0, 0, length)], device)


def test_padded_strides(device: str) -> None:
    case = random_case([200, 90], [9, 1], heads=2, dim=64, missing=0.3, strided=True)
    check(case, [(0, 0, 191), (1, 3, 89)], device)


def test_positions_past_a_request_are_zero(device: str) -> None:
    case = random_case([100], 1).to(device)
    key, value = gather(case.view, [(0, 96, 112)])
    assert (key[4:] == 0).all()
    assert (value[4:] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (3, 64), (2, 256)])
def test_long_contexts(heads: int, dim: int, dtype: torch.dtype) -> None:
    case = random_case([9000, 3001, 1], [2000, 1, 1], heads=heads, dim=dim, dtype=dtype, missing=0.3)
    check(case, [(0, 0, 7000), (1, 1000, 3000), (2, 0, 1), (0, 4096, 8192)], "cuda")
