"""Teacher-forced quality through the served path: KL to the stock backend, agreement, NLL."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oscar_vllm.engine import cpu_options, engine

WORKER = "oscar_vllm.evaluation.worker.LogitsWorker"


@dataclass(frozen=True)
class Quality:
    """Next-token distributions of a backend against the reference backend's, over the same positions."""

    positions: int
    kl: float
    """Mean KL(reference || backend), nats."""
    top1: float
    """Share of positions with the same most likely token."""
    nll: float
    """Mean negative log-likelihood of the text under the backend, nats."""
    reference_nll: float


def record_logits(
    model: str, prompts: Sequence[Sequence[int]], folder: Path, *, chunk: int, **options: Any
) -> list[list[Path]]:
    """Serve the prompts one after the other in chunks of ``chunk`` tokens and keep the logits of every position.

    Small chunks make the measurement one of decoding: a chunk sees itself exactly and everything before it as cached.

    Returns:
        For each prompt the files of its logits, in order.
    """
    from vllm import SamplingParams

    longest = max(len(prompt) for prompt in prompts)
    settings = {
        "worker_extension_cls": WORKER,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": longest + 1,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": 1,
        **cpu_options(),
        **options,
    }
    folder.mkdir(parents=True, exist_ok=True)
    files: list[list[Path]] = []
    with engine(model, **settings) as llm:
        llm.collective_rpc("oscar_record_logits", args=(str(folder),))
        for prompt in prompts:
            before = set(folder.iterdir())
            sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
            llm.generate([{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False)
            files.append(sorted(set(folder.iterdir()) - before))
    return files


def _rows(files: Sequence[Path]) -> Iterator[torch.Tensor]:
    for file in files:
        yield from torch.load(file, weights_only=True).float()


def compare(
    prompts: Sequence[Sequence[int]], reference: Sequence[Sequence[Path]], files: Sequence[Sequence[Path]], *, skip: int
) -> Quality:
    """Compare two recordings of the same prompts, leaving out the first ``skip`` positions of each.

    Raises:
        ValueError: the recordings do not cover the prompts.
    """
    kl = agree = nll = reference_nll = 0.0
    positions = 0
    for prompt, wanted, given in zip(prompts, reference, files, strict=True):
        rows = 0
        for position, (p, q) in enumerate(zip(_rows(wanted), _rows(given), strict=True)):
            rows += 1
            if position < skip:
                continue
            log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
            kl += float((log_p.exp() * (log_p - log_q)).sum())
            agree += float(p.argmax() == q.argmax())
            nll -= float(log_q[prompt[position + 1]])
            reference_nll -= float(log_p[prompt[position + 1]])
            positions += 1
        if rows != len(prompt) - 1:
            raise ValueError(f"recorded {rows} positions of a prompt of {len(prompt)} tokens")
    return Quality(positions, kl / positions, agree / positions, nll / positions, reference_nll / positions)
