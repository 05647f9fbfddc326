"""Decode attention (prepare, splits, merge) against float64 on the data that the reading rule selects."""

from dataclasses import replace

import pytest
import torch
from attended import attend, check, run
from caches import attend_float64, random_case, relative_error

from oscar_vllm.kernels.decode.triton import attend_triton, decode_step_triton, decode_triton
from oscar_vllm.kernels.merge.triton import merge_triton
from oscar_vllm.kernels.write.triton import write_triton

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
gpu_only = pytest.mark.parametrize("device", [pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])])


@pytest.mark.parametrize("group", range(1, 17))
def test_head_groups(device: str, group: int) -> None:
    run(device, random_case([0, 300, 0, 77, 1], group=group, heads=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("new", [1, 2, 3, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_head_sizes_and_query_tokens(device: str, dim: int, new: int, dtype: torch.dtype) -> None:
    run(device, random_case([290, 40], new, dim=dim, dtype=dtype, group=3, sink=16, recent=48, missing=0.2))


@pytest.mark.parametrize(("new", "group"), [(8, 16), (5, 7), (4, 4), (2, 13)])
def test_many_query_columns(device: str, new: int, group: int) -> None:
    """More columns than one program holds, uneven numbers of tokens in a batch, a bucket above all of them."""
    run(device, random_case([200, 150, 3], [new, 1, 3], group=group, sink=16, recent=32, max_query_len=8))


@pytest.mark.parametrize(
    ("sink", "recent"), [(0, 0), (16, 0), (0, 16), (64, 256), (128, 32), (272, 16), (16, 512), (1024, 1024)]
)
@pytest.mark.parametrize("missing", [0.0, 0.4, 1.0], ids=["all", "some", "none"])
def test_windows(device: str, sink: int, recent: int, missing: float) -> None:
    run(device, random_case([600, 129, 16], 2, group=2, sink=sink, recent=recent, missing=missing))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [(0, 0), (16, 16)], ids=["history", "windows"])
def test_lengths_around_edges(device: str, dim: int, window: tuple[int, int]) -> None:
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 0, 385]
    run(device, random_case(lengths, dim=dim, group=1, sink=window[0], recent=window[1]), worst=2e-3)


def test_padded_strides(device: str) -> None:
    run(device, random_case([400, 70], heads=3, dim=128, group=2, sink=16, recent=32, strided=True))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_query_spike(device: str, dim: int) -> None:
    """One query channel 60 times the others: nearly one-hot attention."""
    run(device, random_case([500, 260], dim=dim, group=4, sink=16, recent=32, query_spike=60.0), 1e-3, 5e-3)


@pytest.mark.parametrize("value_scale", [1e-3, 160.0])
def test_value_scales(device: str, value_scale: float) -> None:
    run(device, random_case([500, 260], group=4, sink=0, recent=0, value_scale=value_scale), 1e-3, 5e-3)


def test_dominating_sink(device: str) -> None:
    """The first token's score lies hundreds above all others: the window's partial swallows the history's."""
    case = random_case([700], group=4, dim=128, sink=16, recent=32)
    first = case.view.window[int(case.view.window_table[0, 0]), 0, 0]
    towards = case.query[0, 0].double() @ case.recipe.query[0].double()
    loud = (towards * (600 / case.scale / towards.square().sum())).to(first.dtype)
    first[:128] = loud
    case.keys[0][0, 0] = loud.double()
    run(device, case, 1e-3, 5e-3)


def test_nan_stays_in_its_request(device: str) -> None:
    case = random_case([300, 300, 300], group=2, heads=2, sink=16, recent=32)
    block = int(case.view.block_table[1, 1])
    case.view.history[block, 0].view(-1)[128 * 32 : 128 * 36] = 255  # K meta of the second page, head 0
    case = case.to(device)
    out, lse = attend(case)
    want, _ = attend_float64(case)
    assert out[1, :2].isnan().all()
    assert lse[1, :2].isnan().all()
    out[1, :2] = want[1, :2].to(out)
    assert relative_error(out[:3], want[:3])[0] <= 2e-4


def test_two_runs_are_bit_equal(device: str) -> None:
    case = random_case([900, 0, 333, 17], 2, heads=2, group=5, sink=16, recent=32).to(device)
    first, second = attend(case), attend(case)
    tokens = int(case.view.query_start[-1])
    assert torch.equal(first[0][:tokens], second[0][:tokens])
    assert torch.equal(first[1][:tokens], second[1][:tokens])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_rounded_output(device: str, dtype: torch.dtype) -> None:
    case = random_case([300, 77], dtype=dtype, group=4, dim=128, sink=16, recent=32).to(device)
    out, lse = attend(case, dtype)
    check(case, out, lse, bound=4e-3 if dtype == torch.bfloat16 else 1e-3, worst=8e-3)


@pytest.mark.parametrize("programs", [1, 2, 7, 64])
def test_any_number_of_programs(device: str, programs: int) -> None:
    case = random_case([700, 0, 300, 20], 3, heads=2, group=3, sink=32, recent=64, missing=0.2).to(device)
    out = torch.full(case.query.shape, float("nan"), dtype=torch.float32, device=device)
    lse = torch.full(case.query.shape[:2], float("nan"), device=device)
    partials = decode_triton(
        case.query, case.view, case.scale, max_query_len=4, num_splits=programs, transform=case.recipe.query
    )
    merge_triton(partials, case.view, case.recipe, out, lse)
    check(case, out, lse)


def test_transformed_queries(device: str) -> None:
    """Without a transform the queries are taken as they are, in float32."""
    case = random_case([300, 77], heads=2, group=4, dim=128, sink=16, recent=32).to(device)
    grouped = case.query.float().unflatten(1, (2, 4)).double()
    query = torch.einsum("thgd,hde->thge", grouped, case.recipe.query.double()).flatten(1, 2).float()
    out = torch.full_like(query, float("nan"))
    lse = torch.full(query.shape[:2], float("nan"), device=device)
    merge_triton(decode_triton(query, case.view, case.scale, max_query_len=1), case.view, case.recipe, out, lse)
    check(case, out, lse)


@pytest.mark.parametrize(("dim", "new"), [(64, 1), (128, 1), (128, 3), (256, 1)])
def test_step_writes_then_attends(device: str, dim: int, new: int) -> None:
    """The fused step leaves the same bytes in both caches, and attends to them, as a write and an attend."""
    case = random_case([300, 0, 77, 5], new, heads=2, group=3, dim=dim, sink=16, recent=32).to(device)
    recipe = case.recipe._replace(rounds=2)
    view, tokens = case.view, int(case.view.query_start[-1])
    key, value = torch.randn(2, tokens + 2, 2, dim, device=device).to(case.query.dtype)
    request = torch.repeat_interleave(torch.arange(4), view.query_start.diff().cpu())
    position = torch.cat([torch.arange(n) for n in view.query_start.diff().tolist()])
    position += (view.seq_lens - view.query_start.diff()).cpu()[request]
    slots = view.block_table.cpu()[request, position // 128].long() * 128 + position % 128
    window_slots = view.window_table.cpu()[request, position // 16].long() * 16 + position % 16
    padding = torch.tensor([-1, -1])
    slots, window_slots = (torch.cat([x, padding]).to(device) for x in (slots, window_slots))
    other = view._replace(history=view.history.clone(), window=view.window.clone())
    outs = [torch.full(case.query.shape, float("nan"), dtype=torch.float32, device=device) for _ in range(2)]
    write_triton(key, value, other.history, other.window, slots, window_slots, recipe)
    attend_triton(case.query, other, recipe, case.scale, max_query_len=new, out=outs[0])
    decode_step_triton(
        case.query, key, value, view, slots, window_slots, recipe, case.scale, max_query_len=new, out=outs[1]
    )
    assert torch.equal(view.history, other.history)
    assert torch.equal(view.window.view(torch.uint8), other.window.view(torch.uint8))
    assert outs[0][:tokens].isfinite().all()
    assert torch.equal(outs[0].nan_to_num(7.0), outs[1].nan_to_num(7.0))


def test_many_short_requests(device: str) -> None:
    """More requests than one block of the plan compares at once, padding between them."""
    run(device, random_case([1 + r % 5 if r % 3 else 0 for r in range(70)], group=2, sink=16, recent=16))


def test_empty_batch(device: str) -> None:
    case = random_case([5]).to(device)
    nothing = case.view._replace(
        seq_lens=case.view.seq_lens[:0], query_start=case.view.query_start[:1], block_table=case.view.block_table[:0]
    )
    out = torch.zeros_like(case.query)
    attend_triton(case.query[:0], nothing, case.recipe, case.scale, max_query_len=1, out=out[:0])
    assert not out.any()


@gpu_only
@pytest.mark.parametrize(("dim", "group", "new"), [(128, 4, 1), (128, 8, 1), (64, 3, 2), (256, 4, 1), (128, 4, 4)])
def test_long_contexts(device: str, dim: int, group: int, new: int) -> None:
    lengths = [20000, 1, 4097, 8192, 0, 333, 12800]
    run(device, random_case(lengths, new, heads=2, dim=dim, group=group, missing=0.05))


@gpu_only
def test_large_batch(device: str) -> None:
    gen = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 1500, (300,), generator=gen).tolist()
    run(device, random_case(lengths, heads=1, dim=128, group=8))


@gpu_only
def test_offsets_beyond_32_bits(device: str) -> None:
    case = random_case([700, 300], heads=2, dim=128, group=4).to(device)
    view = case.view

    def move(cache: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = cache[0].numel() * cache.element_size()
        blocks = (5 << 30) // size
        big = torch.full((blocks, *cache.shape[1:]), 255 if cache.dtype == torch.uint8 else torch.nan,
                         dtype=cache.dtype, device=device)  # fmt: skip
        shift = blocks - len(cache)
        big[shift:] = cache
        return big, torch.where(table == 0, 0, table + shift)

    history, block_table = move(view.history, view.block_table)
    window, window_table = move(view.window, view.window_table)
    case.view = view._replace(history=history, block_table=block_table, window=window, window_table=window_table)
    check(case, *attend(case))


@gpu_only
def test_one_graph_serves_every_length(device: str) -> None:
    cases = [
        random_case(lengths, group=4, dim=128, heads=2).to(device)
        for lengths in ([3000, 800, 129], [1, 0, 2500], [64, 64, 4000])
    ]
    width = max(case.view.block_table.shape[1] for case in cases)
    window_width = max(case.view.window_table.shape[1] for case in cases)
    history = torch.full((80, *cases[0].view.history.shape[1:]), 255, dtype=torch.uint8, device=device)
    window = torch.full((600, *cases[0].view.window.shape[1:]), torch.nan, dtype=torch.bfloat16, device=device)
    view = cases[0].view._replace(
        history=history,
        window=window,
        block_table=torch.ones(3, width, dtype=torch.int32, device=device),
        window_table=torch.ones(3, window_width, dtype=torch.int32, device=device),
        seq_lens=torch.full((3,), 100, dtype=torch.int32, device=device),
        query_start=torch.arange(4, dtype=torch.int32, device=device),
    )
    query = torch.zeros(5, 8, 128, dtype=torch.bfloat16, device=device)
    out = torch.empty(5, 8, 128, device=device)
    lse = torch.empty(5, 8, device=device)
    # The query matrix is a constant of the layer, kept in operand form from the first call.
    recipe = cases[0].recipe._replace(
        output=cases[0].recipe.output.clone(), value_mean=cases[0].recipe.value_mean.clone()
    )
    cases = [replace(case, recipe=case.recipe._replace(query=recipe.query)) for case in cases]
    attend_triton(query, view, recipe, cases[0].scale, max_query_len=1, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend_triton(query, view, recipe, cases[0].scale, max_query_len=1, out=out, lse=lse)
    for case in cases:
        new = case.view
        history.fill_(255)[: len(new.history)] = new.history
        window.fill_(torch.nan)[: len(new.window)] = new.window
        view.block_table[:, : new.block_table.shape[1]] = new.block_table
        view.window_table[:, : new.window_table.shape[1]] = new.window_table
        view.seq_lens.copy_(new.seq_lens)
        view.query_start.copy_(new.query_start)
        for name in ("output", "value_mean"):
            getattr(recipe, name).copy_(getattr(case.recipe, name))
        query[: len(case.query)] = case.query
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        check(case, out, lse)
