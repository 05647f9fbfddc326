"""The worker's hooks in both of vLLM's model runners, against runners that hand out logits as those do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_vllm.evaluation.divergence import Rows
from oscar_vllm.evaluation.worker import EvaluationWorker

PROMPT = list(range(10))
VOCABULARY = 32


def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
    return hidden


class RunnerV1:
    """Takes the logits from its model, all but the last position's."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(compute_logits=compute_logits)

    def _get_prompt_logprobs_dict(self, hidden: torch.Tensor, last: bool) -> None:
        self.model.compute_logits(hidden[:-1] if last else hidden)

    def step(self, hidden: torch.Tensor, last: bool) -> None:
        self.model.compute_logits(hidden[-1:])  # of the sampled token: none of the prompt's
        self._get_prompt_logprobs_dict(hidden, last)


class RunnerV2:
    """Hands the function over and asks for every position, the last one's too."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(compute_logits=compute_logits)
        self.prompt_logprobs_worker = SimpleNamespace(
            compute_prompt_logprobs=lambda logits_fn, hidden: logits_fn(hidden)
        )

    def step(self, hidden: torch.Tensor, last: bool) -> None:
        del last
        self.model.compute_logits(hidden[-1:])
        self.prompt_logprobs_worker.compute_prompt_logprobs(self.model.compute_logits, hidden)


@pytest.fixture(params=[RunnerV1, RunnerV2], ids=["V1 runner", "V2 runner"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> EvaluationWorker:
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_rank", lambda: 0)
    worker = EvaluationWorker()
    worker.model_runner = request.param()
    return worker


def run(worker: Any, hidden: torch.Tensor, folder: Path, *, chunk: int = 4, compare: bool) -> list[Rows]:
    worker.oscar_begin_prompt(PROMPT, str(folder), 3, chunk, compare)
    for start in range(0, len(PROMPT), 4):
        worker.model_runner.step(hidden[start : start + 4], start + 4 >= len(PROMPT))
    assert worker.oscar_end_prompt(str(folder / "rows")) == len(PROMPT) - 1
    return [Rows(*rows) for rows in torch.load(folder / "rows", weights_only=True)]


def test_positions_line_up(worker: EvaluationWorker, tmp_path: Path) -> None:
    hidden = torch.randn(len(PROMPT), VOCABULARY).bfloat16()
    assert run(worker, hidden, tmp_path, compare=False) == []
    kept = {file.name: torch.load(file, weights_only=True) for file in sorted(tmp_path.glob("*.pt"))}
    assert list(kept) == ["00000003.pt", "00000004.pt", "00000008.pt"]
    assert torch.equal(torch.cat(list(kept.values())), hidden[3:9])

    other = hidden.clone()
    other[6] = other[6].roll(1)
    rows = run(worker, other, tmp_path, compare=True)
    kl = torch.cat([part.kl for part in rows])
    assert [i + 3 for i, value in enumerate(kl.tolist()) if value > 1e-6] == [6]
    nll = torch.cat([part.nll for part in rows])
    torch.testing.assert_close(nll, -other[3:9].float().log_softmax(-1)[range(6), PROMPT[4:10]])


def test_a_larger_step_than_asked_for_is_an_error(worker: EvaluationWorker, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="prefilled 4 tokens at once where at most 2 were asked"):
        run(worker, torch.randn(len(PROMPT), VOCABULARY), tmp_path, chunk=2, compare=False)


def test_nothing_is_kept_between_prompts(worker: EvaluationWorker, tmp_path: Path) -> None:
    hidden = torch.randn(len(PROMPT), VOCABULARY)
    run(worker, hidden, tmp_path, compare=False)
    before = sorted(tmp_path.iterdir())
    worker.model_runner.step(hidden, True)
    assert sorted(tmp_path.iterdir()) == before
