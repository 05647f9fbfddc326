"""Serving a real model: text inside the windows, prefix hits, chunks, batches, preemption, abort, speculation."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from oscar_vllm.backend.attention import OscarImpl
from oscar_vllm.cache import window
from oscar_vllm.cache.layout import PAGE_TOKENS, PageLayout
from oscar_vllm.demo.prompt import ANSWER, long_prompt

from .conftest import Start, core, free_blocks, watch_preemptions

SHORT = [
    "The capital of France is",
    "Write a haiku about the sea.",
    "2 + 2 =",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a fox who",
    "Translate to German: Good morning, my friend.",
    "List three reasons to exercise:\n1.",
    'The JSON for a user named Ada aged 36 is {"name":',
    "Q: Why is the sky blue?\nA:",
    "The largest planets of the solar system, in order, are",
]


def tokens(*prompts: list[int]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def greedy(n: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, **options)


def texts(llm: Any, prompts: list[Any], n: int) -> list[str]:
    return [output.outputs[0].text for output in llm.generate(prompts, greedy(n), use_tqdm=False)]


def first_logprobs(output: Any) -> dict[int, float]:
    return {token: entry.logprob for token, entry in output.outputs[0].logprobs[0].items()}


def distance(one: Any, other: Any) -> float:
    """Largest difference of the log-probabilities of ``one``'s five likeliest first tokens."""
    a, b = first_logprobs(one), first_logprobs(other)
    best = sorted(a, key=lambda token: -a[token])[:5]
    return max(abs(a[token] - b[token]) for token in best)


def first_token_distances(some: list[Any], others: list[Any]) -> list[float]:
    return [distance(one, other) for one, other in zip(some, others, strict=True)]


def test_text_inside_the_windows_is_the_stock_backends(stock: Start, oscar: Start) -> None:
    """Up to 250 tokens nothing is read from INT2: greedy text and log-probabilities are the stock backend's.

    In float16: this model in bfloat16 does not agree with itself in float32 on half of these texts.
    """
    sampling = greedy(48, logprobs=20)
    with stock(dtype="float16") as llm:
        expected = llm.generate(SHORT, sampling, use_tqdm=False)
    with oscar(dtype="float16") as llm:
        given = llm.generate(SHORT, sampling, use_tqdm=False)
    assert all(len(output.prompt_token_ids) + 48 <= 250 for output in given)
    same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(expected, given, strict=True))
    assert same >= 9, [(a.outputs[0].text, b.outputs[0].text) for a, b in zip(expected, given, strict=True)]
    assert max(first_token_distances(expected, given)) <= 0.06


def test_bfloat16_is_as_near_to_float32_as_the_stock_backend_is(stock: Start, oscar: Start) -> None:
    sampling = greedy(1, logprobs=20)
    with stock(dtype="float32") as llm:
        exact = llm.generate(SHORT, sampling, use_tqdm=False)
    with stock() as llm:
        expected = first_token_distances(exact, llm.generate(SHORT, sampling, use_tqdm=False))
    with oscar() as llm:
        given = first_token_distances(exact, llm.generate(SHORT, sampling, use_tqdm=False))
    assert sum(given) <= 1.25 * sum(expected)


def poison_sinks(llm: Any, block: int) -> None:
    """Set the INT2 metadata of tokens 0..63 of a page to NaN in every layer: who reads a sink from INT2 gets NaN."""
    for layer in core(llm).vllm_config.compilation_config.static_forward_context.values():
        if hasattr(layer, "impl"):
            layout = PageLayout(layer.head_size)
            pages = layer.kv_cache.view(torch.uint8).flatten(2)
            for start in (layout.key_meta, layout.value_meta):
                pages[block, :, start : start + 64 * 4] = 0xFF


def test_prefix_hit_is_near_to_a_cold_run(oscar: Start, held_out: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """640 tokens again hit 384, the sinks among them are read in BF16 (their INT2 rows are poisoned), and the last 256
    tokens of the prompt are computed again: nearer to a cold run than a hit of 512 that reads those from INT2.
    """
    first_slots: list[int] = []
    forward = OscarImpl.forward

    def spy(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, metadata: Any, *rest: Any, **more: Any
    ) -> Any:
        if metadata is not None:
            first_slots.append(int(metadata.slot_mapping[0]))
        return forward(self, layer, query, key, value, kv_cache, metadata, *rest, **more)

    monkeypatch.setattr(OscarImpl, "forward", spy)
    sampling = greedy(1, logprobs=20)
    distances: dict[int, list[float]] = {512: [], 384: []}
    with oscar(dtype="float16") as llm:
        for start in range(0, 32_000, 2_000):
            prompt = tokens(held_out[start : start + 640])
            first_slots.clear()
            cold = llm.generate(prompt, sampling, use_tqdm=False)[0]
            poison_sinks(llm, first_slots[0] // PAGE_TOKENS)
            for cached, refreshed in ((512, 0), (384, window.REFRESHED_HIT)):
                with monkeypatch.context() as patch:
                    patch.setattr(window, "REFRESHED_HIT", refreshed)
                    hit = llm.generate(prompt, sampling, use_tqdm=False)[0]
                assert hit.num_cached_tokens == cached
                distances[cached].append(distance(cold, hit))
            llm.reset_prefix_cache()
    assert sum(distances[384]) <= 0.9 * sum(distances[512]), distances


def test_poisoned_sinks_would_show(oscar: Start, held_out: list[int]) -> None:
    """The same poison in the recent window's absence, sinks off: INT2 rows 0..63 are read and the result is NaN."""
    prompt = held_out[:640]
    with oscar({"sink": 0}, max_num_batched_tokens=256) as llm:
        llm.generate(tokens(prompt), greedy(1), use_tqdm=False)
        for block in range(1, 64):
            poison_sinks(llm, block)
        output = llm.generate(tokens(prompt), greedy(1, logprobs=5), use_tqdm=False)[0]
        assert output.num_cached_tokens == 384
        assert any(value != value for value in first_logprobs(output).values())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 256}, id="chunks-of-256"),
        pytest.param({"max_num_batched_tokens": 2560}, id="one-chunk"),
        pytest.param(
            {
                "max_num_batched_tokens": 256,
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
            },
            id="ngram-speculation",
        ),
    ],
)
def test_long_prompt_is_answered_and_blocks_come_back(oscar: Start, tokenizer: Any, options: dict[str, Any]) -> None:
    prompt = long_prompt(tokenizer, paragraphs=60)
    assert 1_500 < len(prompt) < 2_000
    with oscar(**options) as llm:
        before = free_blocks(llm)
        assert ANSWER in texts(llm, tokens(prompt), 16)[0]
        assert free_blocks(llm) == before


def test_speculation_gives_the_text_of_no_speculation(oscar: Start) -> None:
    """Inside the windows verification and plain decoding read the same rows."""
    prompts = ["Repeat: one two three one two three one two three one two", "a b c d a b c d a b c d a b c"]
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with oscar(dtype="float16") as llm:
        plain = texts(llm, prompts, 48)
    with oscar(dtype="float16", speculative_config=speculative) as llm:
        before = free_blocks(llm)
        assert texts(llm, prompts, 48) == plain
        assert free_blocks(llm) == before


def test_mixed_lengths_together_answer_as_alone(oscar: Start, tokenizer: Any) -> None:
    """8 requests at once, prompts of 10 to 1,800 tokens."""
    longer = [long_prompt(tokenizer, paragraphs=n) for n in (2, 10, 25, 60)]
    prompts: list[Any] = [*tokens(*longer), *SHORT[:4]]
    with oscar(max_num_batched_tokens=512, max_num_seqs=8) as llm:
        before = free_blocks(llm)
        together = texts(llm, prompts, 16)
        assert all(ANSWER in text for text in together[:4]), together
        assert "Paris" in together[4]
        assert free_blocks(llm) == before


def test_preempted_requests_resume(oscar: Start, tokenizer: Any) -> None:
    """A pool that cannot hold what all requests grow to: some are preempted and give what they give undisturbed."""
    prompts = tokens(*[long_prompt(tokenizer, paragraphs=n) for n in (1, 2, 3, 1, 2, 3, 1, 2)])
    sampling = greedy(60, ignore_eos=True)
    # float16, as every token is in the windows: the comparison is of scheduling, not of rounding.
    options = {"dtype": "float16", "max_num_seqs": 8, "max_model_len": 512, "enable_prefix_caching": False}
    with oscar(**options) as llm:
        undisturbed = llm.generate(prompts, sampling, use_tqdm=False)
    with oscar(**options, num_gpu_blocks_override=64) as llm:
        preempted = watch_preemptions(llm)
        before = free_blocks(llm)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        assert preempted
        assert all(ANSWER in output.outputs[0].text for output in outputs)
        same = sum(
            a.outputs[0].token_ids[:24] == b.outputs[0].token_ids[:24]
            for a, b in zip(undisturbed, outputs, strict=True)
        )
        assert same >= 7
        assert free_blocks(llm) == before


def test_aborted_request_gives_its_blocks_back(oscar: Start, tokenizer: Any) -> None:
    prompt = long_prompt(tokenizer, paragraphs=20)
    with oscar(max_num_batched_tokens=256) as llm:
        before = free_blocks(llm)
        engine = llm.llm_engine
        engine.add_request("gone", tokens(prompt)[0], greedy(200, ignore_eos=True))
        engine.add_request("stays", tokens(prompt)[0], greedy(24))
        for _ in range(10):
            engine.step()
        assert free_blocks(llm) < before
        engine.abort_request(["gone"])
        finished = []
        while engine.has_unfinished_requests():
            finished += [output for output in engine.step() if output.finished]
        assert [output.request_id for output in finished] == ["stays"]
        assert ANSWER in finished[0].outputs[0].text
        assert free_blocks(llm) == before


def test_windows_of_any_size_serve(oscar: Start, tokenizer: Any) -> None:
    prompt = long_prompt(tokenizer, paragraphs=10)
    for config in ({"sink": 0, "recent": 0}, {"sink": 16, "recent": 1024}, {"sink": 128, "recent": 0}):
        with oscar(config, max_num_batched_tokens=256) as llm:
            before = free_blocks(llm)
            assert texts(llm, tokens(prompt), 8)[0].strip()
            assert free_blocks(llm) == before
