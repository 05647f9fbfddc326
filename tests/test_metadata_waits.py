"""Metadata are built without waiting for the device: its tensors hold no data here, and who asks for some fails."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from oscar_vllm.backend import metadata
from oscar_vllm.backend.metadata import OscarMetadataBuilder
from oscar_vllm.kernels.decode import MAX_QUERY_TOKENS

META = torch.device("meta")


def builder(is_history: bool, drafts: int, monkeypatch: pytest.MonkeyPatch) -> OscarMetadataBuilder:
    """As vLLM makes it for a GPU, with tensors that go to a device without memory."""
    made = OscarMetadataBuilder.__new__(OscarMetadataBuilder)
    made.device = SimpleNamespace(type="cuda")
    made.reorder_batch_threshold = min(1 + drafts, MAX_QUERY_TOKENS)
    made.is_history = is_history
    made.tile_tokens = 256
    plan = metadata.plan_prefill
    monkeypatch.setattr(metadata, "plan_prefill", lambda *args: plan(*args[:-1], META))
    return made


def common(new: list[int], totals: list[int]) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *new]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=torch.empty_like(starts, device=META),
        query_start_loc_cpu=starts,
        seq_lens=torch.empty(len(new), dtype=torch.int32, device=META),
        num_reqs=len(new),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(new),
        max_seq_len=max(totals),
        block_table_tensor=torch.empty(len(new), 64, dtype=torch.int32, device=META),
        slot_mapping=torch.empty(int(starts[-1]), dtype=torch.int64, device=META),
        seq_lens_cpu_upper_bound=torch.tensor(totals, dtype=torch.int32),
    )


BATCHES: dict[str, tuple[list[int], list[int], int, tuple[int, int]]] = {
    "decodes": ([1, 1, 1], [5, 900, 129], 0, (3, 0)),
    "decodes padded for a graph": ([1, 1, 0, 0], [5, 900, 0, 0], 0, (4, 0)),
    "drafts verified": ([4, 4], [104, 904], 3, (2, 0)),
    "drafts and single tokens": ([1, 4, 2], [20, 104, 904], 3, (3, 0)),
    "first chunk": ([700], [700], 0, (0, 1)),
    "decodes and first chunks": ([1, 1, 300, 40], [9, 700, 300, 40], 0, (2, 2)),
    "later chunk": ([256], [1024], 0, (0, 1)),
    "rest of a prefix hit": ([40], [552], 0, (0, 1)),
    "all of them": ([1, 4, 40, 300, 256], [9, 500, 552, 300, 1024], 3, (2, 3)),
}


@pytest.mark.parametrize("is_history", [True, False], ids=["history", "window"])
@pytest.mark.parametrize(("new", "totals", "drafts", "kinds"), BATCHES.values(), ids=BATCHES)
def test_no_path_waits(
    new: list[int],
    totals: list[int],
    drafts: int,
    kinds: tuple[int, int],
    is_history: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: Any = builder(is_history, drafts, monkeypatch).build(0, common(new, totals))
    assert (built.num_decodes, built.num_prefills) == kinds
    assert built.seq_lens.is_meta
    planned = (built.extends is not None) or (built.prefill is not None)
    assert planned == (kinds[1] > 0 and (is_history or built.extends is not None))


def test_a_device_without_memory_refuses_to_be_read() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        common([1], [1]).seq_lens.tolist()
