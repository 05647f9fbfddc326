"""Short prefills behind a context, cut into pieces for the decode kernels."""

import pytest
import torch
from caches import attend_float64, random_case, relative_error

from oscar_vllm.backend.extend_plan import SHORT_QUERY, count_short, plan_extends


@pytest.mark.parametrize(
    ("new", "totals", "count"),
    [
        ([], [], 0),
        ([SHORT_QUERY], [SHORT_QUERY + 1], 1),
        ([SHORT_QUERY + 1], [500], 0),
        ([20, 30, 70, 10], [400, 31, 500, 500], 2),
        ([20, 30], [20, 300], 0),
        ([0, 30], [0, 300], 0),
    ],
    ids=["none", "just-short", "too-long", "leading-only", "no-context", "padding"],
)
def test_which_prefills_are_cut(new: list[int], totals: list[int], count: int) -> None:
    starts = torch.tensor([7, *new]).cumsum(0).tolist()
    assert count_short(starts, totals) == count


def test_pieces() -> None:
    table = torch.arange(12, dtype=torch.int32).view(4, 3)
    plan = plan_extends(2, [5, 14, 30], [100, 300], table)
    assert (plan.first_token, plan.tokens) == (5, 25)
    assert plan.query_start.tolist() == [0, 8, 9, 17, 25]
    assert plan.seq_lens.tolist() == [99, 100, 292, 300]
    assert plan.block_table.tolist() == [[6, 7, 8], [6, 7, 8], [9, 10, 11], [9, 10, 11]]


@pytest.mark.parametrize(
    ("missing", "recent"),
    [(1.0, 4096), (0.0, 4096), (0.2, 32)],
    ids=["from-history", "from-window", "over-the-edge"],
)
@pytest.mark.parametrize(("lengths", "new"), [([200], [1]), ([300, 150], [19, 16]), ([5, 260], [3, 33])])
def test_attention_of_the_pieces_is_that_of_the_chunk(
    device: str, lengths: list[int], new: list[int], missing: float, recent: int
) -> None:
    from oscar_vllm.kernels.decode.triton import attend_triton

    case = random_case(lengths, new, heads=2, group=3, dim=64, recent=recent, missing=missing)
    want, _ = attend_float64(case)
    here = case.to(device)
    starts = case.view.query_start.tolist()
    plan = plan_extends(0, starts, lengths, here.view.block_table)
    windows = plan_extends(0, starts, lengths, here.view.window_table)
    view = here.view._replace(
        block_table=plan.block_table,
        window_table=windows.block_table,
        seq_lens=plan.seq_lens,
        query_start=plan.query_start,
    )
    out = torch.empty_like(here.query[: plan.tokens])
    attend_triton(here.query[: plan.tokens], view, here.recipe, case.scale, max_query_len=8, out=out)
    assert relative_error(out, want[: plan.tokens])[0] < 4e-3
