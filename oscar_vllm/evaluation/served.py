"""Teacher-forced quality through the served path: one engine records the reference, others are compared with it.

Prompts are prefilled in small chunks, so that a query reads nearly all it attends to from the cache, as in decoding:
a chunk sees itself exactly and everything before it as cached.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from oscar_vllm.engine import cpu_options, engine
from oscar_vllm.evaluation.divergence import Quality, Rows

WORKER = "oscar_vllm.evaluation.worker.EvaluationWorker"


@contextmanager
def teacher_forcing(model: str, *, longest: int, chunk: int, **options: Any) -> Iterator[Any]:
    """An engine that takes one prompt at a time, of up to ``longest`` tokens, in chunks of ``chunk`` tokens."""
    settings: dict[str, Any] = {
        "worker_extension_cls": WORKER,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": longest + 1,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": 1,
        "disable_log_stats": True,
        **cpu_options(),
        **options,
    }
    with engine(model, **settings) as llm:
        yield llm


def record(llm: Any, prompts: Sequence[Sequence[int]], folder: Path, *, skip: int, chunk: int) -> None:
    """Keep the logits of every position behind the first ``skip`` in ``folder``: positions x vocabulary x 2 bytes."""
    for number, prompt in enumerate(prompts):
        place = folder / f"{number:04d}"
        place.mkdir(parents=True)
        _run(llm, prompt, place, skip=skip, chunk=chunk, compare=False)


def compare(llm: Any, prompts: Sequence[Sequence[int]], folder: Path, *, skip: int, chunk: int) -> Quality:
    """The quality of this engine against what ``record`` kept of the same prompts, skip and chunk."""
    rows = [
        part
        for number, prompt in enumerate(prompts)
        for part in _run(llm, prompt, folder / f"{number:04d}", skip=skip, chunk=chunk, compare=True)
    ]
    return Quality.of(rows)


def use_recipe(llm: Any, recipe: str) -> None:
    """Let a running OSCAR engine serve with another recipe (a path, or "hadamard")."""
    llm.collective_rpc("oscar_use_recipe", args=(recipe,))


def _run(llm: Any, prompt: Sequence[int], folder: Path, *, skip: int, chunk: int, compare: bool) -> list[Rows]:
    from vllm import SamplingParams

    tokens = list(prompt)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with tempfile.TemporaryDirectory(prefix="oscar-eval-") as scratch:
        file = Path(scratch) / "rows.pt"
        llm.collective_rpc("oscar_begin_prompt", args=(tokens, str(folder), skip, chunk, compare))
        llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        seen = [count for count in llm.collective_rpc("oscar_end_prompt", args=(str(file),)) if count]
        if seen != [len(tokens) - 1]:
            raise RuntimeError(f"vLLM gave the logits of {seen} positions of a prompt of {len(tokens)} tokens")
        return [Rows(*rows) for rows in torch.load(file, weights_only=True)]
