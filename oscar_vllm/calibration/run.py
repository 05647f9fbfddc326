"""Calibration from end to end: a text through vLLM's own prefill, statistics from its workers, a recipe on disk."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from oscar_vllm.backend.recipes import cached_recipe_path
from oscar_vllm.calibration.build import build_recipe
from oscar_vllm.calibration.statistics import LayerStatistics
from oscar_vllm.calibration.text import text_hash
from oscar_vllm.engine import cpu_options, engine
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import OscarRecipe

WORKER = "oscar_vllm.calibration.worker.CalibrationWorker"
DEFAULT_TOKENS = 8192
SEQUENCE_TOKENS = 2048
"""Tokens of one calibration prompt: prefilled in one step, so that its attention is exact."""


class CalibrationError(ValueError):
    """A calibration that cannot be run as asked; the message is one sentence."""


def _join(files: Sequence[str]) -> list[LayerStatistics]:
    """Statistics of every layer, in order, from the files of all ranks (heads over tensor, layers over pipeline)."""
    parts: dict[int, dict[int, LayerStatistics]] = {}
    for file in files:
        saved = torch.load(file, weights_only=True)
        for layer, state in saved["layers"].items():
            # A rank with a copy of another's head brings the same statistics once more.
            parts.setdefault(layer, {})[saved["first_head"]] = LayerStatistics.from_state_dict(state)
    return [LayerStatistics.join_heads([heads[first] for first in sorted(heads)]) for _, heads in sorted(parts.items())]


def _context(model: str) -> int:
    """Longest sequence the model was made for."""
    from vllm.transformers_utils.config import get_config

    config = get_config(model, trust_remote_code=False).get_text_config()
    return getattr(config, "max_position_embeddings", None) or SEQUENCE_TOKENS + 1


def calibrate(
    model: str,
    *,
    text: str,
    tokens: int = DEFAULT_TOKENS,
    center: bool = True,
    out: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
    **engine_options: Any,
) -> tuple[OscarRecipe, Path]:
    """Make a recipe for ``model`` and save it.

    Args:
        model: a path or Hugging Face id that vLLM serves with full attention.
        text: calibration text; its first ``tokens`` tokens are used.
        tokens: how many tokens to calibrate on.
        center: subtract the calibrated means of keys and values.
        out: where to save; None: the cache, where the server finds it by itself.
        progress: called with (tokens done, tokens in all).
        engine_options: passed to ``vllm.LLM`` (quantization, tensor_parallel_size, ...).

    Returns:
        The recipe and the file it was saved to.

    Raises:
        CalibrationError: the text is too short.
        UnsupportedByOscarError: the model is one that OSCAR does not serve.
    """
    from vllm import SamplingParams

    options = {
        "attention_backend": "OSCAR",
        "additional_config": {"oscar": {"recipe": "hadamard"}},
        "worker_extension_cls": WORKER,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "disable_log_stats": True,
        **cpu_options(),
        **engine_options,
    }
    sequence = min(SEQUENCE_TOKENS, tokens, _context(model) - 1)
    options.setdefault("max_model_len", sequence + 1)
    options.setdefault("max_num_batched_tokens", sequence + 1)
    with engine(model, **options) as llm:
        ids = llm.get_tokenizer().encode(text)[:tokens]
        if len(ids) < tokens:
            raise CalibrationError(
                f"The calibration text has {len(ids)} tokens and {tokens} were asked for: give a longer text or a "
                "smaller --tokens."
            )
        geometry = ModelGeometry.from_hf_config(llm.llm_engine.vllm_config.model_config.hf_text_config)
        llm.collective_rpc("oscar_start_statistics")
        for start in range(0, tokens, sequence):
            prompt = {"prompt_token_ids": ids[start : start + sequence]}
            llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
            if progress is not None:
                progress(min(start + sequence, tokens), tokens)
        with tempfile.TemporaryDirectory(prefix="oscar-calibration-") as folder:
            statistics = _join(llm.collective_rpc("oscar_save_statistics", args=(folder,)))
    recipe = build_recipe(statistics, geometry, model=model, text_hash=text_hash(text), center=center)
    path = cached_recipe_path(model, geometry) if out is None else out
    path.parent.mkdir(parents=True, exist_ok=True)
    recipe.save(path)
    return recipe, path
