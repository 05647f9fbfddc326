"""Real vLLM on a GPU: full CUDA graphs against eager, padding, poisoned memory."""

from typing import Any

import pytest
import torch
from engines import check_in_a_pool_of_nan, engine, graphs
from tiny_model import write_checkpoint

from oscar_vllm.bench.serve import timing_recipe
from oscar_vllm.cache import window

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LENGTHS = (40, 200, 700, 1500)
GRAPHS = graphs(1, 2, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def recipe(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With refits, as a calibrated one has them."""
    return timing_recipe(model, tmp_path_factory.mktemp("recipe") / "recipe.safetensors")


def answers(
    llm: Any, lengths: tuple[int, ...], last: int | None = None
) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Token ids and log-probabilities of greedy answers to fixed random prompts, which may all end with one token."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(2, 128, (n,), generator=generator).tolist() for n in lengths]
    prompts = [{"prompt_token_ids": row if last is None else [*row[:-1], last]} for row in ids]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=5, detokenize=False)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        (list(o.token_ids), [{token: p.logprob for token, p in step.items()} for step in o.logprobs]) for o in outputs
    ]


def test_full_graphs_equal_eager_bit_for_bit(model: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model, monkeypatch, recipe, enforce_eager=True) as llm:
        eager = answers(llm, LENGTHS)
        assert len({tuple(tokens) for tokens, _ in answers(llm, LENGTHS, last=7)}) == len(LENGTHS), "context is read"
    # A graph of every size: a padded one multiplies matrices of another shape than eager execution.
    with engine(model, monkeypatch, recipe, **graphs(1, 2, 3, 4)) as llm:
        assert answers(llm, LENGTHS) == eager


def test_padding_of_a_graph_neither_reads_nor_writes(model: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests in a graph of four; every byte of the pool is NaN before they start."""
    with engine(model, monkeypatch, recipe, **GRAPHS) as llm:
        check_in_a_pool_of_nan(llm, lambda: answers(llm, LENGTHS[:3]))


def test_graphs_replay_after_others_and_after_allocator_churn(
    model: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model, monkeypatch, recipe, enable_prefix_caching=False, **GRAPHS) as llm:
        first = answers(llm, LENGTHS)
        for lengths in (LENGTHS[:1], LENGTHS[:2], LENGTHS[1:]):
            answers(llm, lengths)
        torch.cuda.empty_cache()
        churn = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        del churn
        assert answers(llm, LENGTHS) == first


def test_nothing_is_compiled_by_the_first_prefix_hit(model: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up compiled what contexts need: short rests of a prompt (of long hits), long ones, decodes beside them."""
    import triton
    from vllm import SamplingParams

    with engine(model, monkeypatch, recipe, **GRAPHS) as llm:
        compiled: list[str] = []

        def note(*args: Any, fn: Any, **rest: Any) -> None:
            compiled.append(f"{fn.module}.{fn.name}")

        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
        ids = torch.randint(2, 128, (1800,), generator=torch.Generator().manual_seed(2)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        for refreshed in (window.REFRESHED_HIT, 0):
            monkeypatch.setattr(window, "REFRESHED_HIT", refreshed)
            for tokens in (600, 620, 1800, 1799, 1720, 131, 260):
                llm.generate([{"prompt_token_ids": ids[:tokens]}], params, use_tqdm=False)
            # The first of these decodes beside the second's chunks.
            llm.generate([{"prompt_token_ids": ids[n:]} for n in (1700, 300)], params, use_tqdm=False)
        assert [name for name in compiled if "oscar" in name] == []
