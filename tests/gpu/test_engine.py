"""Real vLLM on a GPU: full CUDA graphs against eager, padding, poisoned memory. Random weights: only numbers matter."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_vllm.bench.serve import timing_recipe
from oscar_vllm.bench.shapes import write_shape
from oscar_vllm.cache import window

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

LENGTHS = (40, 200, 700, 1500)
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}}


@contextmanager
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Any]:
    """An engine of this process, so that its caches can be reached."""
    from vllm import LLM

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = write_shape("tiny", folder)
    recipe = timing_recipe(model, folder / "recipe.safetensors")
    settings: dict[str, Any] = {
        "attention_backend": "OSCAR",
        "additional_config": {"oscar": {"recipe": recipe}},
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 200 * 2**20,
        "gpu_memory_utilization": 0.05,  # so that it starts beside other work
        "seed": 0,
    }
    llm = LLM(model=model, **(settings | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        torch.cuda.empty_cache()


def answers(llm: Any, lengths: tuple[int, ...]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Token ids and log-probabilities of greedy answers to fixed random prompts."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(1)
    prompts = [{"prompt_token_ids": torch.randint(5, 500, (n,), generator=generator).tolist()} for n in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=5, detokenize=False)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        (list(o.token_ids), [{token: p.logprob for token, p in step.items()} for step in o.logprobs]) for o in outputs
    ]


def caches(llm: Any) -> list[torch.Tensor]:
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [layer.kv_cache.view(torch.uint8) for layer in layers.values() if layer.kv_cache.numel()]


def test_full_graphs_equal_eager_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch, enforce_eager=True) as llm:
        eager = answers(llm, LENGTHS)
    with engine(tmp_path, monkeypatch, **GRAPHS) as llm:
        assert answers(llm, LENGTHS) == eager


def test_padding_of_a_graph_neither_reads_nor_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests in a graph of four; every byte of the pool is NaN before they start."""
    with engine(tmp_path, monkeypatch, **GRAPHS) as llm:
        clean = answers(llm, LENGTHS[:3])
        llm.reset_prefix_cache()
        for cache in caches(llm):
            cache.fill_(255)
        assert answers(llm, LENGTHS[:3]) == clean
        assert all(bool((cache[0] == 255).all()) for cache in caches(llm)), "the null block was written"


def test_graphs_replay_after_others_and_after_allocator_churn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(tmp_path, monkeypatch, enable_prefix_caching=False, **GRAPHS) as llm:
        first = answers(llm, LENGTHS)
        for lengths in (LENGTHS[:1], LENGTHS[:2], LENGTHS[1:]):
            answers(llm, lengths)
        torch.cuda.empty_cache()
        churn = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
        del churn
        assert answers(llm, LENGTHS) == first


def test_nothing_is_compiled_by_the_first_prefix_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up compiled what contexts need: short rests of a prompt (of long hits), long ones, decodes beside them."""
    import triton
    from vllm import SamplingParams

    with engine(tmp_path, monkeypatch, **GRAPHS) as llm:
        compiled: list[str] = []

        def note(*args: Any, fn: Any, **rest: Any) -> None:
            compiled.append(f"{fn.module}.{fn.name}")

        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
        ids = torch.randint(5, 500, (1800,), generator=torch.Generator().manual_seed(2)).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
        for refreshed in (window.REFRESHED_HIT, 0):
            monkeypatch.setattr(window, "REFRESHED_HIT", refreshed)
            for tokens in (600, 620, 1800, 1799, 1720, 131, 260):
                llm.generate([{"prompt_token_ids": ids[:tokens]}], params, use_tqdm=False)
            # The first of these decodes beside the second's chunks.
            llm.generate([{"prompt_token_ids": ids[n:]} for n in (1700, 300)], params, use_tqdm=False)
        assert [name for name in compiled if "oscar" in name] == []
