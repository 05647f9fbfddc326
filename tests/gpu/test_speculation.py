"""Speculation under full CUDA graphs, on both of vLLM's model runners: the text of no speculation, up to rounding."""

from typing import Any

import pytest
import torch
from agreement import Answer, agreed, answers
from engines import check_in_a_pool_of_nan, engine, graphs
from safetensors.torch import load_file, save_file
from tiny_model import write_checkpoint

from oscar_vllm.backend.attention import OscarImpl
from oscar_vllm.cache.layout import PageLayout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LENGTHS = (40, 200, 700, 1500)
ANSWER = 96
DRAFTS = 3
ROUNDING = 0.05
"""How far log-probabilities may be from those of a batch of another shape, which rounds otherwise."""
WHOLE: dict[str, Any] = {"max_num_batched_tokens": 4096}
"""Every prompt is prefilled at once: where chunks end decides what is read in INT2, and drafts move it."""
NGRAM = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 3, "prompt_lookup_min": 1}

SINGLE, VERIFYING = WHOLE | graphs(1, 2, 4), WHOLE | graphs(4, 8, 16)
"""Tokens in a graph: one a request, or one and its drafts."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Attention is damped, so that a token is followed by what it was followed by before often enough for drafts."""
    folder = write_checkpoint(tmp_path_factory.mktemp("model"))
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if "o_proj" in name:
            weights[name] *= 0.3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def ask(llm: Any, lengths: tuple[int, ...] = LENGTHS) -> list[Answer]:
    """Answers to fixed prompts, each of 20 random tokens again and again."""
    generator = torch.Generator().manual_seed(1)
    prompts = []
    for length in lengths:
        piece = torch.randint(2, 128, (20,), generator=generator).tolist()
        prompts.append((piece * (length // 20 + 1))[:length])
    return answers(llm, prompts, ANSWER)[0]


def verified(llm: Any) -> tuple[int, int]:
    """Draft tokens accepted and rejected so far."""
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    accepted = counts["vllm:spec_decode_num_accepted_tokens"]
    return int(accepted), int(counts["vllm:spec_decode_num_draft_tokens"] - accepted)


def free_blocks(llm: Any) -> int:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    return int(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every graph that is replayed."""
    counted: list[None] = []
    replay = torch.cuda.CUDAGraph.replay

    def count(graph: Any) -> None:
        counted.append(None)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", count)
    return counted


@pytest.fixture(scope="module")
def plain(model: str) -> list[Answer]:
    """The answers of no speculation."""
    with pytest.MonkeyPatch.context() as patch, engine(model, patch, **SINGLE) as llm:
        return ask(llm)


def keep_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: the first token of a verification is not written, so that a rejected draft's row stays in its place."""
    decode = OscarImpl._decode

    def forgetful(self: Any, query: Any, new: Any, slots: Any, kv_cache: Any, metadata: Any, output: Any) -> None:
        slots = tuple(slot.clone() for slot in slots)
        for slot in slots:
            slot[metadata.query_start[: metadata.num_decodes].long()] = -1
        decode(self, query, new, slots, kv_cache, metadata, output)

    monkeypatch.setattr(OscarImpl, "_decode", forgetful)


def test_ngram_speculation_says_what_no_speculation_says(
    model: str, plain: list[Answer], monkeypatch: pytest.MonkeyPatch, replays: list[None]
) -> None:
    """And bit for bit the same with graphs as without, whatever bytes lie where no token was written.

    Two requests at a time fill the graphs of eight and, when one of them has ended, of four tokens; a padded graph
    multiplies matrices of another shape than eager execution.
    """
    with engine(model, monkeypatch, enforce_eager=True, **WHOLE, speculative_config=NGRAM) as llm:
        eager = [ask(llm, LENGTHS[:2]), ask(llm, LENGTHS[2:])]
        llm.reset_prefix_cache()
        assert agreed(plain, ask(llm), ROUNDING) > ANSWER * len(LENGTHS) // 2
        assert not replays
        with monkeypatch.context() as patch:
            keep_rejected_drafts(patch)
            llm.reset_prefix_cache()
            faulty = ask(llm)
        with pytest.raises(AssertionError):
            agreed(plain, faulty, ROUNDING)
    with engine(model, monkeypatch, **VERIFYING, speculative_config=NGRAM) as llm:
        before = free_blocks(llm)
        assert [ask(llm, LENGTHS[:2]), ask(llm, LENGTHS[2:])] == eager
        llm.reset_prefix_cache()
        assert agreed(plain, ask(llm), ROUNDING) > ANSWER * len(LENGTHS) // 2
        assert len(replays) > ANSWER // (1 + DRAFTS)
        accepted, rejected = verified(llm)
        assert accepted > 0
        assert rejected > 0
        # Three requests in a graph for four, in a pool of NaN: what drafts left is overwritten before it is read.
        check_in_a_pool_of_nan(llm, lambda: ask(llm, LENGTHS[:3]))
        assert free_blocks(llm) == before


@pytest.mark.parametrize("runner", ["V2", "V1"])
def test_a_draft_model_says_what_no_speculation_says(
    model: str, plain: list[Answer], monkeypatch: pytest.MonkeyPatch, replays: list[None], runner: str
) -> None:
    """The model drafts for itself with a BF16 cache on vLLM's own backend, in blocks that fit OSCAR's pages."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "V2" else "0")
    drafter = {"method": "draft_model", "model": model, "num_speculative_tokens": DRAFTS}
    with engine(model, monkeypatch, **VERIFYING, speculative_config=drafter) as llm:
        assert llm.llm_engine.vllm_config.use_v2_model_runner is (runner == "V2")
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        backends = {name: layer.get_attn_backend().get_name() for name, layer in layers.items()}
        assert {backend for name, backend in backends.items() if name.startswith("draft_model.")}.isdisjoint(
            {"OSCAR", "OSCAR_WINDOW"}
        )
        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        assert sorted(group.kv_cache_spec.block_size for group in groups) == [16, 16, 128]
        assert {group.kv_cache_spec.page_size_bytes for group in groups} == {2 * PageLayout(64).page_bytes}
        before = free_blocks(llm)
        drafted = ask(llm)
        assert agreed(plain, drafted, ROUNDING) > ANSWER * len(LENGTHS) // 2
        assert len(replays) > ANSWER // (1 + DRAFTS)
        accepted, rejected = verified(llm)
        # INT2 makes the target differ from its draft; one that reads another's tokens is right once in 128 times.
        assert accepted > (accepted + rejected) // 10
        assert rejected > 0
        llm.reset_prefix_cache()
        assert ask(llm) == drafted
        assert free_blocks(llm) == before
