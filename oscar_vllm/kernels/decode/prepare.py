# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The launch before the splits: transform the queries, bring them into operand form, and work out the split plan.

What every program of the decode kernel would otherwise repeat is done once here: per query column the int8 halves of
its 16-bit integer form, its 16-bit halves for the window, and its factors; per program where its chunk begins.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from oscar_vllm.kernels.decode.device import use_dependent_launch
from oscar_vllm.kernels.decode.partials import SplitPlan
from oscar_vllm.kernels.decode.plan import batch_costs
from oscar_vllm.kernels.views import CacheView

PLAN_FIELDS = 4
PLAN_TILE = 16384
"""Elements of the (program, request) comparison that one program of the plan holds."""


class Operands(NamedTuple):
    """Queries as the decode kernel reads them; a lane is a column block of one (request, head)."""

    codes: torch.Tensor
    """[lanes, 4, 2 * N, D / 4] int8: of channel 4k + field, the high (even) and low (odd) byte of each column."""
    halves: torch.Tensor
    """[lanes, 2, N, D] window dtype: column over its largest channel, as a sum of two."""
    factors: torch.Tensor
    """[lanes, 3, N] float32: channel sum in integer units, integer score to log2, window score to log2."""
    plan: torch.Tensor
    """[programs, 4] int32 first request of each program, where that begins on the line, chunk, total; then [R] where
    each request begins."""


@triton.jit
def _plan_block(
    plan,
    seq_lens,
    query_start,
    requests,
    programs,
    sink,
    recent,
    block,
    LANES: tl.constexpr,
    REQUESTS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    costs = LANES * batch_costs(
        seq_lens, query_start, requests, sink, recent, REQUESTS, TILE, TILE_COST, BLOCK_COST, ITEM_COST
    )
    ends = tl.cumsum(costs, 0)
    total = tl.sum(costs, 0)
    chunk = tl.maximum((total + programs - 1) // programs, MIN_CHUNK)
    program = block * BLOCK + tl.arange(0, BLOCK)
    before = ends[None, :] <= (program * chunk)[:, None]
    exists = program < programs
    at = plan + program * FIELDS
    tl.store(at, tl.sum(before.to(tl.int32), 1), mask=exists)
    tl.store(at + 1, tl.sum(tl.where(before, costs[None, :], 0), 1), mask=exists)
    tl.store(at + 2, tl.zeros_like(program) + chunk, mask=exists)
    tl.store(at + 3, tl.zeros_like(program) + total, mask=exists)
    if block == 0:
        r = tl.arange(0, REQUESTS)
        tl.store(plan + programs * FIELDS + r, ends - costs, mask=r < requests)


@triton.jit
def _store_bytes(place, x, inside, D: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """Store [M, D] integers as bytes [M, field, D / 4]: whole words, for lone bytes would each cost a memory sector."""
    x = tl.reshape(x, (M, D // 16, 4, 4))  # channel 16 * word + 4 * byte + field
    x = (x & 255) << (8 * tl.arange(0, 4))[None, None, :, None]
    word = tl.arange(0, D // 16)[None, :, None]
    field = tl.arange(0, 4)[None, None, :]
    place = place[:, None, None] + field * (N * D // 8) + word
    tl.store(place, tl.sum(x, 2), mask=inside[:, None, None])


@triton.jit
def _query_rows(
    query,
    matrix,
    codes,
    halves,
    factors,
    seq_lens,
    query_start,
    requests,
    scale,
    query_stride_token,
    query_stride_head,
    matrix_stride_head,
    matrix_stride_row,
    block,
    head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    TRANSFORM: tl.constexpr,
):
    """M rows (request, query column) of one KV head."""
    d = tl.arange(0, D)
    if TRANSFORM:
        matrix += head.to(tl.int64) * matrix_stride_head
        if K == D:  # on its way while the chain of small loads below runs
            whole = tl.load(matrix + d[:, None] * matrix_stride_row + d[None, :])
    row = block * M + tl.arange(0, M)
    request = row // (COLUMNS * COLUMN_BLOCKS)
    column = row % (COLUMNS * COLUMN_BLOCKS)
    inside = request < requests
    token = column // GROUP
    first_token = tl.load(query_start + request, mask=inside, other=0)
    new = tl.load(query_start + request + 1, mask=inside, other=0) - first_token
    length = tl.load(seq_lens + request, mask=inside, other=0)
    live = inside & (token < new) & (length > 0)
    at = (first_token + token).to(tl.int64) * query_stride_token
    at = query + at + (head * GROUP + column % GROUP).to(tl.int64) * query_stride_head
    if TRANSFORM:
        q = tl.zeros([M, D], tl.float32)
        if K == D:
            x = tl.load(at[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            q = tl.dot(x, whole, q, input_precision="tf32x3")
        else:
            for start in tl.range(0, D, K, num_stages=2):
                k = start + tl.arange(0, K)
                x = tl.load(at[:, None] + k[None, :], mask=live[:, None], other=0.0).to(tl.float32)
                part = tl.load(matrix + k[:, None] * matrix_stride_row + d[None, :])
                q = tl.dot(x, part, q, input_precision="tf32x3")
    else:
        q = tl.load(at[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q), 1), 1e-20)
    unit = 32512.0 / largest
    lane = (request * HEADS + head) * COLUMN_BLOCKS + column // COLUMNS
    lane = lane.to(tl.int64)
    c = column % COLUMNS

    to_log2 = scale * 1.4426950408889634
    factor = factors + lane * (3 * N) + c
    tl.store(factor, tl.sum(q, 1) * unit, mask=inside)
    tl.store(factor + N, to_log2 / unit, mask=inside)
    tl.store(factor + 2 * N, to_log2 * largest, mask=inside)

    # Odd fields' codes come out times 4 (see unpack.py).
    quarter = tl.where(d % 2 == 0, 1.0, 0.25)
    i = tl.floor(q * unit[:, None] * quarter[None, :] + 0.5).to(tl.int32)
    high = (i + 128) >> 8
    low = i - (high << 8)
    place = codes.to(tl.pointer_type(tl.int32)) + lane * (D * N // 2) + c * (D // 8)
    _store_bytes(place, high, inside, D, N, M)
    _store_bytes(place + D // 16, low, inside, D, N, M)

    x = q / largest[:, None]
    first = x.to(halves.dtype.element_ty)
    second = (x - first.to(tl.float32)).to(halves.dtype.element_ty)
    place = halves + (lane * (2 * N * D) + c * D)[:, None] + d[None, :]
    tl.store(place, first, mask=inside[:, None])
    tl.store(place + N * D, second, mask=inside[:, None])


@triton.jit(do_not_specialize=["requests", "programs", "row_blocks"])
def _prepare_kernel(
    query,
    matrix,
    codes,
    halves,
    factors,
    plan,
    seq_lens,
    query_start,
    requests,
    programs,
    row_blocks,
    scale,
    sink,
    recent,
    query_stride_token,
    query_stride_head,
    matrix_stride_head,
    matrix_stride_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    TRANSFORM: tl.constexpr,
    REQUESTS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:  # let the decode kernel's programs start; they wait for this grid before they read
        gdc_launch_dependents()
    program = tl.program_id(0)
    if program < row_blocks * HEADS:
        _query_rows(
            query, matrix, codes, halves, factors, seq_lens, query_start, requests, scale,
            query_stride_token, query_stride_head, matrix_stride_head, matrix_stride_row,
            program // HEADS, program % HEADS,
            HEADS, GROUP, COLUMNS, COLUMN_BLOCKS, D, N, M, K, TRANSFORM,
        )  # fmt: skip
    else:
        _plan_block(
            plan, seq_lens, query_start, requests, programs, sink, recent, program - row_blocks * HEADS,
            HEADS * COLUMN_BLOCKS, REQUESTS, TILE, TILE_COST, BLOCK_COST, ITEM_COST, MIN_CHUNK, FIELDS, BLOCK,
        )  # fmt: skip


def prepare(
    query: torch.Tensor,
    view: CacheView,
    scale: float,
    plan: SplitPlan,
    transform: torch.Tensor | None,
) -> Operands:
    """Operand form of the queries of a batch, and its split plan.

    Args:
        query: [T, Hq, D], last dimension contiguous.
        view: the caches and tables.
        scale: softmax scale.
        plan: the host's share of the plan.
        transform: [H, D, D] float32 applied to the queries, or None where they are transformed already.
    """
    heads = view.history.shape[1]
    requests = view.seq_lens.shape[0]
    dim = query.shape[2]
    n = plan.columns_pad
    lanes = requests * heads * plan.column_blocks
    device = query.device
    codes = torch.empty(lanes, 4, 2 * n, dim // 4, dtype=torch.int8, device=device)
    halves = torch.empty(lanes, 2, n, dim, dtype=view.window.dtype, device=device)
    factors = torch.empty(lanes, 3, n, dtype=torch.float32, device=device)
    line = torch.empty(plan.programs * PLAN_FIELDS + requests, dtype=torch.int32, device=device)
    rows = requests * plan.columns * plan.column_blocks
    row_blocks = triton.cdiv(rows, 16)
    plan_block = max(1, min(64, PLAN_TILE // plan.requests_pad))
    grid = (row_blocks * heads + triton.cdiv(plan.programs, plan_block),)
    _prepare_kernel[grid](
        query,
        transform,
        codes,
        halves,
        factors,
        line,
        view.seq_lens,
        view.query_start,
        requests,
        plan.programs,
        row_blocks,
        scale,
        view.sink,
        view.recent,
        query.stride(0),
        query.stride(1),
        0 if transform is None else transform.stride(0),
        0 if transform is None else transform.stride(1),
        HEADS=heads,
        GROUP=plan.group,
        COLUMNS=plan.columns,
        COLUMN_BLOCKS=plan.column_blocks,
        D=dim,
        N=n,
        M=16,
        K=dim if dim <= 128 else 64,
        TRANSFORM=transform is not None,
        REQUESTS=plan.requests_pad,
        TILE=plan.tile,
        TILE_COST=plan.tile_cost,
        BLOCK_COST=plan.block_cost,
        ITEM_COST=plan.item_cost,
        MIN_CHUNK=plan.min_chunk,
        FIELDS=PLAN_FIELDS,
        BLOCK=plan_block,
        PDL=use_dependent_launch(device),
        num_warps=8,
    )
    return Operands(codes, halves, factors, line)
