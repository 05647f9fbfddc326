"""What evaluation adds to vLLM's workers: keep the logits of every prompt position."""

from pathlib import Path
from typing import Any

import torch


class LogitsWorker:
    """Mixed into the worker class by ``worker_extension_cls``; rank 0's files hold the full vocabulary."""

    model_runner: Any

    def oscar_record_logits(self, folder: str) -> None:
        """Save the logits of prompt positions, in the order they are computed, to ``folder/NNNNNN.pt``.

        They pass by where vLLM computes prompt log-probabilities (one request at a time, any chunk size); a request
        for those log-probabilities makes it do so.
        """
        runner, saved = self.model_runner, Path(folder)
        prompt_logprobs, compute_logits = runner._get_prompt_logprobs_dict, runner.model.compute_logits
        recording = False

        def record(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
            logits: torch.Tensor | None = compute_logits(hidden, *args, **kwargs)
            if recording and logits is not None:
                torch.save(logits.cpu(), saved / f"{len(list(saved.iterdir())):06d}.pt")
            return logits

        def around(*args: Any, **kwargs: Any) -> Any:
            nonlocal recording
            recording = True
            try:
                return prompt_logprobs(*args, **kwargs)
            finally:
                recording = False

        runner.model.compute_logits = record
        runner._get_prompt_logprobs_dict = around
