"""Every read of served runs against the true keys and values (OSCAR_ORACLE=1), and faults that it must see."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model.conftest import Start, free_blocks, watch_preemptions
from vllm import SamplingParams
from vllm.platforms import current_platform

from oscar_vllm.backend import attention
from oscar_vllm.backend.oracle import Oracle, OracleError, oracle_for
from oscar_vllm.cache.layout import PAGE_TOKENS
from oscar_vllm.cache.window import OscarWindowManager


@pytest.fixture(autouse=True)
def _oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_ORACLE", "1")


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each comparison looked at."""
    counts: list[int] = []
    compare = Oracle._compare

    def count(self: Any, view: Any, row: int, computed: int, length: int) -> Any:
        counts.append(length)
        return compare(self, view, row, computed, length)

    monkeypatch.setattr(Oracle, "_compare", count)
    return counts


def prompt(base: int, length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [2 + (base * 31 + 7 * i * i) % 126 for i in range(length)]}


def generate(llm: Any, prompts: list[dict[str, list[int]]], tokens: int = 6) -> list[Any]:
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return list(llm.generate(prompts, sampling, use_tqdm=False))


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "none"])
def test_mixed_requests_and_prefix_hits_read_their_own_tokens(oscar: Start, compared: list[int], caching: bool) -> None:
    lengths = (3, 40, 130, 400, 700)
    with oscar(max_num_batched_tokens=256, max_num_seqs=4, enable_prefix_caching=caching) as llm:
        generate(llm, [prompt(base, length) for base, length in enumerate(lengths)])
        again = generate(llm, [prompt(base, length) for base, length in enumerate(lengths)])
        assert all((output.num_cached_tokens >= 128) == caching for output in again[3:])
    assert max(compared) == 706 - 1


def test_preempted_requests_read_their_own_tokens(oscar: Start, compared: list[int]) -> None:
    with oscar(max_num_seqs=4, max_model_len=512, num_gpu_blocks_override=48) as llm:
        preempted = watch_preemptions(llm)
        before = free_blocks(llm)
        generate(llm, [prompt(base, 100) for base in range(4)], tokens=120)
        assert preempted
        assert free_blocks(llm) == before
    assert max(compared) == 219


def test_rejected_drafts_leave_nothing_behind(oscar: Start, compared: list[int]) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    with oscar({"recent": 32}, speculative_config=drafts) as llm:
        repeating = [5, 6, 7, 8] * 40
        generate(llm, [{"prompt_token_ids": repeating}, prompt(1, 90)], tokens=40)
    assert max(compared) >= 199


def lose_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    write = attention.write

    def forgetful(key: Any, value: Any, history: Any, window: Any, slots: Any, *rest: Any) -> None:
        slots = slots.clone()
        slots[-1] = -1
        write(key, value, history, window, slots, *rest)

    monkeypatch.setattr(attention, "write", forgetful)


def corrupt_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of a key in a page that a decode is about to read."""
    decode = attention.OscarImpl._decode

    def corrupting(self: Any, query: Any, new: Any, slots: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        pages = kv_cache.view(torch.uint8).flatten(2)
        pages[metadata.block_table[0, 0], 1, 70 * self.head_size // 4] ^= 4
        decode(self, query, new, slots, kv_cache, metadata, output)

    monkeypatch.setattr(attention.OscarImpl, "_decode", corrupting)


def read_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    view = attention.OscarImpl._view

    def swapped(self: Any, *args: Any) -> Any:
        right = view(self, *args)
        return right._replace(block_table=right.block_table.flip(0))

    monkeypatch.setattr(attention.OscarImpl, "_view", swapped)


def free_a_live_window_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OscarWindowManager, "_first_recent", lambda self, tokens: max(0, tokens - 16) // 16)


def read_the_wrong_head(monkeypatch: pytest.MonkeyPatch) -> None:
    step = attention.decode_step

    def rolled(query: Any, *args: Any, **options: Any) -> None:
        step(query.roll(1, 1), *args, **options)

    monkeypatch.setattr(attention, "decode_step", rolled)


def forget_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that never looks at a page's minimum."""
    from oscar_vllm.kernels.decode import reference

    unpack = reference.unpack_pages

    def partial(*args: Any) -> Any:
        codes, scale, minimum = unpack(*args)
        return codes, scale, torch.zeros_like(minimum)

    monkeypatch.setattr(reference, "unpack_pages", partial)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a write is lost": (lose_a_write, "is not the key and value that were computed for it"),
    "a bit of a page flips": (corrupt_a_page, "is not the key and value that were computed for it"),
    "another request's table": (read_another_request, "is not the key and value that were computed for it"),
    "a live window block is freed": (free_a_live_window_block, "has no unquantized copy in its window"),
    "queries read the wrong head": (read_the_wrong_head, "is not attention over its keys and values"),
    "a minimum is ignored": (forget_the_mean, "is not attention over its keys and values"),
}


@pytest.mark.parametrize(("plant", "sentence"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_ends_the_run(
    oscar: Start, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], sentence: str
) -> None:
    plant(monkeypatch)
    prompts = [prompt(base, 2 * PAGE_TOKENS + 40) for base in range(2)]
    with oscar({"recent": 32}) as llm, pytest.raises(OracleError, match=sentence):
        generate(llm, prompts)


def test_the_oracle_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    with pytest.raises(ValueError, match=r"unset it to serve on another device$"):
        oracle_for("model.layers.0.attn")


def test_without_the_switch_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSCAR_ORACLE")
    assert oracle_for("model.layers.0.attn") is None
