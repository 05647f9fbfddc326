"""A text through vLLM's own prefill, and what its workers saw of it."""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_vllm.backend.recipes import cached_recipe_path
from oscar_vllm.calibration.checkpoint import Checkpoint, Identity
from oscar_vllm.calibration.layer import LayerCalibration, join_ranks
from oscar_vllm.calibration.sample import SAMPLE_TOKENS, SAMPLES
from oscar_vllm.calibration.text import text_hash
from oscar_vllm.engine import cpu_options, engine
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import PROMPT_TOKENS

WORKER = "oscar_vllm.calibration.worker.CalibrationWorker"
CHECKPOINT_SECONDS = 20.0
"""Between two states of a calibration that can be resumed."""
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""


class CalibrationError(ValueError):
    """A calibration that cannot be run as asked; the message is one sentence."""


@dataclass(frozen=True)
class Collected:
    """What a calibration run brings home."""

    geometry: ModelGeometry
    layers: list[LayerCalibration]


def collect(
    model: str,
    *,
    text: str,
    tokens: int,
    sample: bool = True,
    resume: Path | None = None,
    progress: Progress | None = None,
    **engine_options: Any,
) -> Collected:
    """Prefill the first ``tokens`` tokens of a text for the statistics and, if asked, the next ones for the sample.

    Args:
        model: a path or Hugging Face id that vLLM serves with full attention.
        text: of at least ``tokens`` tokens (with ``sample`` and ``SAMPLES`` sequences of ``SAMPLE_TOKENS``, or of one
            context, more).
        tokens: how many tokens the statistics see.
        sample: also keep held-out attention for the search.
        resume: a folder that the sums are kept in, and that an interrupted calibration goes on from, or one that is to
            see more tokens of the same text.
        engine_options: passed to ``vllm.LLM`` (quantization, tensor_parallel_size, ...).

    Raises:
        CalibrationError: the text is too short.
        CheckpointError: ``resume`` holds another calibration.
        UnsupportedByOscarError: the model is one that OSCAR does not serve.
    """
    limit = engine_options.get("max_model_len") or _context(model)
    sequence = min(PROMPT_TOKENS, tokens, limit - 1)
    piece = min(SAMPLE_TOKENS, sequence)
    held_out = SAMPLES * piece if sample else 0
    options = {
        "attention_backend": "OSCAR",
        "additional_config": {"oscar": {"recipe": "hadamard"}},
        "worker_extension_cls": WORKER,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 1,
        "max_model_len": sequence + 1,
        "max_num_batched_tokens": sequence + 1,
        "disable_log_stats": True,
        **cpu_options(),
        **engine_options,
    }
    say = progress or (lambda *_: None)
    checkpoint, seen = None, 0
    if resume is not None:  # before vLLM starts: a folder that does not fit is refused at once
        checkpoint, seen = Checkpoint.open(resume, _identity(model, text, sequence, engine_options), tokens)
    say("starting vLLM", 0, tokens + held_out)
    with engine(model, **options) as llm:
        ids = llm.get_tokenizer().encode(text)[: tokens + held_out]
        if len(ids) < tokens + held_out:
            raise CalibrationError(
                f"The calibration text has {len(ids)} tokens and {tokens + held_out} are needed ({held_out} of them to "
                "choose the quantizer on): give a longer text or a smaller --tokens."
            )
        llm.collective_rpc(
            "oscar_start_statistics", args=(str(checkpoint.place(seen)) if checkpoint and seen else None,)
        )
        kept = time.monotonic()
        for start in range(seen, tokens, sequence):
            end = min(start + sequence, tokens)
            _prefill(llm, ids[start:end])
            say("calibrating", end, tokens + held_out)
            # Whole prompts only, so that sums that are resumed are those of one run.
            last = end + sequence > tokens
            if checkpoint and end - start == sequence and (last or time.monotonic() - kept > CHECKPOINT_SECONDS):
                checkpoint.save(end, lambda folder: llm.collective_rpc("oscar_save_sums", args=(folder,)))
                kept = time.monotonic()
        if held_out:
            llm.collective_rpc("oscar_start_sample")
            for start in range(tokens, tokens + held_out, piece):
                _prefill(llm, ids[start : start + piece])
                say("calibrating", start + piece, tokens + held_out)
        geometry = ModelGeometry.from_hf_config(llm.llm_engine.vllm_config.model_config.hf_text_config)
        with tempfile.TemporaryDirectory(prefix="oscar-calibration-") as folder:
            return Collected(geometry, join_ranks(llm.collective_rpc("oscar_save_statistics", args=(folder,))))


def _identity(model: str, text: str, sequence: int, engine_options: dict[str, Any]) -> Identity:
    ranks = [engine_options.get(f"{kind}_parallel_size") or 1 for kind in ("tensor", "pipeline")]
    weights = cached_recipe_path(model, model_geometry(model)).stem
    return Identity(model=weights, text=text_hash(text), sequence=sequence, ranks=ranks[0] * ranks[1])


def _prefill(llm: Any, ids: Sequence[int]) -> None:
    from vllm import SamplingParams

    llm.generate([{"prompt_token_ids": list(ids)}], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)


def model_geometry(model: str) -> ModelGeometry:
    """The attention geometry of a model, from its configuration alone.

    Raises:
        GeometryError: the configuration says too little about its attention.
        OSError: there is no such model.
    """
    from vllm.transformers_utils.config import get_config

    return ModelGeometry.from_hf_config(get_config(model, trust_remote_code=False))


def _context(model: str) -> int:
    """Longest sequence the model was made for."""
    from vllm.transformers_utils.config import get_config

    config = get_config(model, trust_remote_code=False).get_text_config()
    return getattr(config, "max_position_embeddings", None) or PROMPT_TOKENS + 1
