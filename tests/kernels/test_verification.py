"""Several query tokens of a request read what as many steps of one token each read: every token its own window."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from attended import attend, run
from caches import Case, random_case, relative_error

from oscar_vllm.kernels.decode.reference import attend_reference

Attend = Callable[[Case], tuple[torch.Tensor, torch.Tensor]]

STARTS = (-5, 0, 13, 27, 58, 61, 93, 121, 125, 253)
"""Where the first token's window begins: before blocks, tiles and pages end, at most seven tokens."""


def twin(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The PyTorch twin's output and log-sum-exp."""
    out, lse = torch.empty(case.query.shape), torch.empty(case.query.shape[:2])
    attend_reference(case.query, case.view, case.recipe, case.scale, max_query_len=case.max_query_len, out=out, lse=lse)
    return out, lse


def one_by_one(case: Case) -> list[tuple[torch.Tensor, Case]]:
    """(query rows, step) of each step of one token: the same caches, as long as they were before the token's next."""
    start, new = case.view.query_start[:-1], case.view.query_start.diff()
    requests = torch.arange(len(new) + 1, dtype=torch.int32, device=new.device)
    steps = []
    for token in range(int(new.max())):
        there = new > token
        view = case.view._replace(
            block_table=case.view.block_table[there],
            window_table=case.view.window_table[there],
            seq_lens=(case.view.seq_lens - new + token + 1)[there],
            query_start=requests[: int(there.sum()) + 1],
        )
        rows = (start + token)[there].long()
        steps.append((rows, replace(case, query=case.query[rows], view=view, max_query_len=1)))
    return steps


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (0, 32), (16, 0), (64, 48)])
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (128, 2), (128, 5)])
def test_verification_is_plain_decoding(device: str, dim: int, group: int, sink: int, recent: int) -> None:
    lengths, new = [recent + start + 8 for start in STARTS[::2] if recent + start >= 0], 8
    case = random_case(lengths, new, dim=dim, group=group, sink=sink, recent=recent, missing=0.1)
    _compare(case.to(device), attend, 2e-4, 1e-3)


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (0, 32), (16, 0), (64, 48), (64, 256)])
def test_verification_by_the_twin_is_plain_decoding(sink: int, recent: int, missing: float) -> None:
    lengths, new = [300 + 41 * n for n in range(9)] + [8, 3], [*range(9), 8, 3]
    case = random_case(lengths, new, heads=2, group=3, sink=sink, recent=recent, missing=missing)
    _compare(case, twin, 1e-5, 1e-5)


def _compare(case: Case, attend: Attend, bound: float, worst: float) -> None:
    out, lse = attend(case)
    for rows, step in one_by_one(case):
        want, want_lse = attend(step)
        error = relative_error(out[rows], want.double().cpu())
        assert error[0] <= bound
        assert error[1] <= worst
        torch.testing.assert_close(lse[rows], want_lse, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("new", range(1, 9))
def test_query_tokens_where_their_windows_begin(device: str, new: int, dim: int) -> None:
    lengths = [max(48 + start + new, 1) for start in STARTS]
    run(device, random_case(lengths, new, dim=dim, group=3 if new % 2 else 1, sink=16, recent=48, missing=0.1))


@pytest.mark.parametrize("missing", [0.0, 0.4, 1.0], ids=["all", "some", "none"])
@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (0, 16), (16, 0), (128, 32), (256, 16)])
def test_windows_of_many_tokens(device: str, sink: int, recent: int, missing: float) -> None:
    """Requests shorter than their windows among them, and more columns than one program holds."""
    lengths = [recent + 125, recent + sink + 5, 8, 3, recent + 66]
    run(device, random_case(lengths, [8, 7, 8, 3, 2], dim=64, group=5, sink=sink, recent=recent, missing=missing))
