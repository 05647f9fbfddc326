"""The decode kernel's tiles, programs and registers, by head size, query columns and size of the batch."""

from functools import cache

import torch

from oscar_vllm.cache.layout import WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.decode.device import multiprocessors, use_inline_ptx
from oscar_vllm.kernels.decode.partials import SplitPlan
from oscar_vllm.kernels.launch import cdiv, next_power_of_2
from oscar_vllm.kernels.views import CacheView

COST_BYTES = 512
HALF_TILES_FROM = 1 << 30
"""(request, head) pairs of a batch from which programs with few query columns take half tiles: a third fewer registers,
and half as many more programs to hide each other's latency, for more splits to merge."""


class TileShape:
    """Compile-time shape of the decode kernel for one head size and number of query columns."""

    def __init__(self, head_size: int, columns: int, half_tiles: bool) -> None:
        self.ratio = 2 if head_size == 64 else 1
        self.columns_pad = 8 if columns <= 8 else 16
        wide = self.columns_pad == 16 or head_size == 256
        small = half_tiles and not wide
        self.rows = (64 if wide or small else 128) // self.ratio
        # One warp has registers enough for everything but wide heads with many columns.
        self.warps = 2 if self.columns_pad == 16 and head_size == 256 else 1
        self.stages = 3
        self.window_stages = 2
        # A quarter of a multiprocessor holds two warps of up to 255 registers a thread, or three of up to 168.
        self.registers = 168 if small else 255
        self.programs_per_processor = (12 if small else 8) // self.warps


def register_limit(registers: int, device: torch.device) -> dict[str, int]:
    """Launch options that hold a kernel to so many registers a thread (255 is what every kernel may take)."""
    return {"maxnreg": registers} if registers < 255 and use_inline_ptx(device) else {}


@cache
def tile_shape(head_size: int, columns: int, half_tiles: bool) -> TileShape:
    """The shape for so many query columns of a program."""
    return TileShape(head_size, columns, half_tiles)


def half_tiles(view: CacheView) -> bool:
    """Whether a batch of this size takes half tiles where its columns allow."""
    return view.seq_lens.shape[0] * view.history.shape[1] >= HALF_TILES_FROM


@cache
def _plan(
    heads: int, group: int, dim: int, bucket: int, programs: int | None, half_tiles: bool, device: torch.device
) -> SplitPlan:
    total = group * bucket
    blocks = cdiv(total, 16)
    columns = cdiv(total, blocks)
    shape = tile_shape(dim, columns, half_tiles)
    tile = shape.rows * shape.ratio
    tile_cost = tile * PageLayout(dim).token_bytes // COST_BYTES
    return SplitPlan(
        programs=programs or shape.programs_per_processor * multiprocessors(device),
        tile=tile,
        tile_cost=tile_cost,
        block_cost=WINDOW_TOKENS * 4 * dim // COST_BYTES,
        item_cost=tile_cost,
        min_chunk=tile_cost,
        group=group,
        max_query_len=bucket,
        columns_pad=shape.columns_pad,
        columns=columns,
        column_blocks=blocks,
    )


def split_plan(view: CacheView, query: torch.Tensor, max_query_len: int, programs: int | None = None) -> SplitPlan:
    """Plan for a batch's shapes; ``programs`` defaults to one wave of the device."""
    heads = view.history.shape[1]
    bucket = next_power_of_2(max_query_len)
    return _plan(heads, query.shape[1] // heads, query.shape[2], bucket, programs, half_tiles(view), query.device)
