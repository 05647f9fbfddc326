"""The decode kernel's tiles and programs, by head size and query columns."""

from functools import cache

import torch

from oscar_vllm.cache.layout import WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.decode.device import multiprocessors
from oscar_vllm.kernels.decode.partials import SplitPlan
from oscar_vllm.kernels.launch import cdiv, next_power_of_2
from oscar_vllm.kernels.views import CacheView

COST_BYTES = 512


class TileShape:
    """Compile-time shape of the decode kernel for one head size and number of query columns."""

    def __init__(self, head_size: int, columns: int) -> None:
        self.ratio = 2 if head_size == 64 else 1
        self.columns_pad = 8 if columns <= 8 else 16
        wide = self.columns_pad == 16 or head_size == 256
        self.rows = (64 if wide else 128) // self.ratio
        # One warp has registers enough for everything but wide heads with many columns.
        self.warps = 2 if self.columns_pad == 16 and head_size == 256 else 1
        self.stages = 3
        self.window_stages = 2
        # A quarter of a multiprocessor holds two warps of up to 255 registers a thread. (Three of up to 168, on half
        # tiles, took 3 to 15 % longer at every batch and length.)
        self.programs_per_processor = 8 // self.warps


@cache
def tile_shape(head_size: int, columns: int) -> TileShape:
    """The shape for so many query columns of a program."""
    return TileShape(head_size, columns)


@cache
def _plan(heads: int, group: int, dim: int, bucket: int, programs: int | None, device: torch.device) -> SplitPlan:
    total = group * bucket
    blocks = cdiv(total, 16)
    columns = cdiv(total, blocks)
    shape = tile_shape(dim, columns)
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
    return _plan(heads, query.shape[1] // heads, query.shape[2], bucket, programs, query.device)
