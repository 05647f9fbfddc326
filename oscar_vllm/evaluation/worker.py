"""What evaluation adds to vLLM's workers: the logits of every prompt position, and another recipe without a restart.

Logits never leave the worker: the reference's go to files, a chunk of positions each, in the model's own dtype (so
nothing is lost), and another engine's are compared with those files as they are computed. Memory holds one chunk.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oscar_vllm.evaluation.divergence import Rows, compare_rows


class _Prompt:
    """One prompt under way: which positions the next logits belong to."""

    def __init__(self, tokens: list[int], folder: str, skip: int, chunk: int, compare: bool) -> None:
        self.tokens = torch.tensor(tokens)
        self.folder = Path(folder)
        self.skip = skip
        self.chunk = chunk
        self.compare = compare
        self.position = 0
        self.rows: list[Rows] = []

    def take(self, logits: torch.Tensor) -> None:
        """The logits [n, V] of the next n positions; the last position of a prompt predicts no token of it."""
        if logits.shape[0] > self.chunk:
            raise RuntimeError(f"vLLM prefilled {logits.shape[0]} tokens at once where at most {self.chunk} were asked")
        start, end = self.position, min(self.position + logits.shape[0], len(self.tokens) - 1)
        self.position = end
        first = max(start, self.skip)
        if first >= end:
            return
        logits, file = logits[first - start : end - start], self.folder / f"{first:08d}.pt"
        if self.compare:
            # mmap: the page cache already holds it, and one copy to the device is enough.
            reference = torch.load(file, weights_only=True, mmap=True)
            self.rows.append(compare_rows(reference, logits, self.tokens[first + 1 : end + 1]))
        else:
            torch.save(logits.cpu(), file)


class EvaluationWorker:
    """Mixed into the worker class by ``worker_extension_cls``; every method runs once per rank."""

    model_runner: Any
    vllm_config: Any
    _oscar_prompt: _Prompt | None = None
    _oscar_hooked: bool = False

    def oscar_begin_prompt(self, tokens: list[int], folder: str, skip: int, chunk: int, compare: bool) -> None:
        """Record the next request's logits behind position ``skip`` in ``folder``, or compare them with it."""
        from vllm.distributed import get_tensor_model_parallel_rank

        if not self._oscar_hooked:
            self._oscar_hook()
            self._oscar_hooked = True
        # The first rank sees the whole vocabulary.
        first = get_tensor_model_parallel_rank() == 0
        self._oscar_prompt = _Prompt(tokens, folder, skip, chunk, compare) if first else None

    def oscar_end_prompt(self, file: str) -> int | None:
        """Save what was compared to ``file``; returns the number of positions that passed, None on other ranks."""
        prompt, self._oscar_prompt = self._oscar_prompt, None
        if prompt is None or prompt.position == 0:
            return None
        torch.save([tuple(rows) for rows in prompt.rows], file)
        return prompt.position

    def oscar_use_recipe(self, recipe: str) -> None:
        """Serve with another recipe from here on. Only for engines that cache nothing across requests."""
        from oscar_vllm.backend.attention import OscarImpl

        self.vllm_config.additional_config["oscar"]["recipe"] = recipe
        layers = self.vllm_config.compilation_config.static_forward_context
        for layer in list(layers.values()):
            if isinstance(getattr(layer, "impl", None), OscarImpl):
                layer.impl.process_weights_after_loading(self.vllm_config.model_config.dtype)

    def _oscar_hook(self) -> None:
        """Stand where vLLM computes prompt log-probabilities; a request that asks for them makes it do so."""
        runner: Any = self.model_runner
        if hasattr(runner, "_get_prompt_logprobs_dict"):  # the V1 runner takes the logits from the model
            original, compute_logits = runner._get_prompt_logprobs_dict, runner.model.compute_logits

            def around(*args: Any, **kwargs: Any) -> Any:
                runner.model.compute_logits = self._oscar_tap(compute_logits)
                try:
                    return original(*args, **kwargs)
                finally:
                    runner.model.compute_logits = compute_logits

            runner._get_prompt_logprobs_dict = around
        else:  # the V2 runner hands the function over
            worker = runner.prompt_logprobs_worker
            compute = worker.compute_prompt_logprobs

            def with_tap(logits_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                return compute(self._oscar_tap(logits_fn), *args, **kwargs)

            worker.compute_prompt_logprobs = with_tap

    def _oscar_tap(self, compute_logits: Callable[..., Any]) -> Callable[..., Any]:
        def tap(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            if self._oscar_prompt is not None and logits is not None:
                self._oscar_prompt.take(logits)
            return logits

        return tap
