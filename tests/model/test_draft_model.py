"""A draft model beside OSCAR: the text of no speculation, nothing written over others, the capacity that is told."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tiny_model import write_checkpoint

from oscar_vllm.backend import drafting, metadata
from oscar_vllm.backend.drafting import draft_cache
from oscar_vllm.backend.oracle import SWITCH, OracleError
from oscar_vllm.cache.capacity import Shares, request_blocks

from .conftest import Start, _starter, core, free_blocks, watch_preemptions
from .test_serving import SHORT, greedy

TIE = 0.05
"""Two tokens whose log-probabilities are this near may change places by rounding alone."""


def drafting_for_itself(model: str) -> dict[str, Any]:
    """Options: the model drafts on the stock backend, with a BF16 cache."""
    speculative = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    return {"speculative_config": speculative, "disable_log_stats": False}


def verified(llm: Any) -> tuple[int, int]:
    """Draft tokens accepted and rejected so far."""
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    accepted = counts["vllm:spec_decode_num_accepted_tokens"]
    return int(accepted), int(counts["vllm:spec_decode_num_draft_tokens"] - accepted)


def parts_without_reason(reference: Any, other: Any) -> int | None:
    """The first position where two answers differ, unless the reference was undecided there."""
    one, two = reference.outputs[0], other.outputs[0]
    for at, (expected, given) in enumerate(zip(one.token_ids, two.token_ids, strict=True)):
        if expected != given:
            likely = {token: entry.logprob for token, entry in one.logprobs[at].items()}
            tie = given in likely and likely[expected] - likely[given] <= TIE
            return None if tie else at
    return None


def test_a_draft_model_gives_the_text_of_no_speculation(oscar: Start, model: str) -> None:
    """Inside the windows verification and plain decoding read the same rows."""
    sampling = greedy(40, logprobs=5, ignore_eos=True)
    prompts = ["Repeat: one two three one two three one two three one two", *SHORT[:4]]
    with oscar(dtype="float16") as llm:
        plain = llm.generate(prompts, sampling, use_tqdm=False)
    with oscar(dtype="float16", **drafting_for_itself(model)) as llm:
        before = free_blocks(llm)
        drafted = llm.generate(prompts, sampling, use_tqdm=False)
        assert free_blocks(llm) == before
        accepted, _ = verified(llm)
    assert [parts_without_reason(*pair) for pair in zip(plain, drafted, strict=True)] == [None] * len(prompts)
    # It knows what it will say: a draft that reads another's tokens, or none, is hardly ever right.
    assert accepted > 0.8 * 40 * len(prompts) * 3 / 4


# A model of random weights, in a second a start


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def shallow(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model of one layer: the first of the target's two."""
    folder = tmp_path_factory.mktemp("shallow")
    config = json.loads((Path(tiny) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = load_file(Path(tiny) / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if ".layers.1." not in name}, folder / "model.safetensors"
    )
    return str(folder)


@pytest.fixture
def start(tiny: str, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Every read is compared with the true keys and values."""
    monkeypatch.setenv(SWITCH, "1")
    options = {"attention_backend": "OSCAR", "skip_tokenizer_init": True, "max_model_len": 1024}
    return _starter(tiny, options | drafting_for_itself(tiny), Path("hadamard"))


def prompts(*lengths: int) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [2 + (base * 31 + 7 * i * i) % 126 for i in range(length)]}
        for base, length in enumerate(lengths)
    ]


def test_drafts_leave_the_targets_tokens_alone(start: Start) -> None:
    """Mixed lengths in chunks, prefix hits and rejected drafts."""
    sampling = greedy(24, ignore_eos=True, detokenize=False)
    with start({"recent": 32}, max_num_batched_tokens=256, max_num_seqs=4) as llm:
        before = free_blocks(llm)
        llm.generate(prompts(3, 40, 130, 400, 700), sampling, use_tqdm=False)
        again = llm.generate(prompts(3, 40, 130, 400, 700), sampling, use_tqdm=False)
        assert all(output.num_cached_tokens >= 128 for output in again[3:])
        assert free_blocks(llm) == before
        accepted, rejected = verified(llm)
    assert accepted > 20
    assert rejected > 20


def test_preempted_requests_draft_on(start: Start) -> None:
    with start(max_num_seqs=4, max_model_len=512, num_gpu_blocks_override=64) as llm:
        preempted = watch_preemptions(llm)
        before = free_blocks(llm)
        llm.generate(prompts(*[100] * 4), greedy(120, ignore_eos=True, detokenize=False), use_tqdm=False)
        assert preempted
        assert free_blocks(llm) == before


@pytest.mark.parametrize(
    ("drafter", "shares"), [("tiny", Shares(1, 1, 32)), ("shallow", Shares(2, 1, 32))], ids=["as deep", "shallow"]
)
def test_a_request_takes_the_blocks_that_the_capacity_counts(
    start: Start, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, drafter: str, shares: Shares
) -> None:
    """Beside a shallow draft model vLLM makes several groups of the target's layers; what is logged is logged once."""
    logged: list[Any] = []
    monkeypatch.setattr(metadata, "log_startup", logged.append)
    with start(**drafting_for_itself(request.getfixturevalue(drafter))) as llm:
        cache = draft_cache(core(llm).vllm_config)
        assert cache is not None
        assert cache.shares == shares
        assert len(logged) == 1
        before, engine = free_blocks(llm), llm.llm_engine
        engine.add_request("one", prompts(590)[0], greedy(64, ignore_eos=True, detokenize=False))
        for _ in range(8):
            engine.step()
        (running,) = core(llm).scheduler.running
        expected = request_blocks(running.num_tokens, 64, 256, shares)
        # Blocks for the drafts of the next step may be there, one in each group.
        assert expected - 1 <= before - free_blocks(llm) <= expected + 5
        engine.abort_request(["one"])
        assert free_blocks(llm) == before


def test_drafts_in_the_targets_group_would_be_seen(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's V1 runner does unless the draft's group is the first: it drafts with the target's block table.

    Prompts are so short that it finds a block of the target's for every block of 32 tokens that it looks for.
    """
    monkeypatch.setattr(drafting, "DRAFT_PREFIX", "")
    with start({"recent": 32}) as llm, pytest.raises(OracleError):
        llm.generate(prompts(200, 150, 180), greedy(48, ignore_eos=True, detokenize=False), use_tqdm=False)
