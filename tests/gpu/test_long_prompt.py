"""A prompt of 100,000 tokens in chunks of 2,048 on a GPU whose memory is the cache's."""

from pathlib import Path

import pytest
import torch

from oscar_vllm.bench.serve import timing_recipe
from oscar_vllm.bench.shapes import write_shape

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

TOKENS = 100_000


def test_a_long_prompt_takes_no_memory_that_a_short_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import LLM, SamplingParams

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = write_shape("tiny", tmp_path)
    llm = LLM(
        model=model,
        attention_backend="OSCAR",
        additional_config={"oscar": {"recipe": timing_recipe(model, tmp_path / "recipe.safetensors")}},
        hf_overrides={"max_position_embeddings": 131_072},
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=131_072,
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        # Starts in seconds; what a prefill needs does not depend on it.
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2]},
    )
    ids = torch.randint(5, 500, (TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    peaks = []
    try:
        for tokens in (8_000, TOKENS):
            torch.cuda.reset_peak_memory_stats()
            (output,) = llm.generate([{"prompt_token_ids": ids[:tokens]}], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 4
            peaks.append(torch.cuda.max_memory_allocated())
    finally:
        llm.llm_engine.engine_core.shutdown()
        torch.cuda.empty_cache()
    assert peaks[1] - peaks[0] < 64 * 2**20, "what a prefill needs is bounded, whatever the context"
