"""Everything OSCAR cannot serve, refused in one sentence before a model is loaded."""

from typing import Any

from vllm.platforms import current_platform

from oscar_vllm.backend.drafting import draft_config, speculation_problem
from oscar_vllm.backend.flash import is_available
from oscar_vllm.backend.recipes import load_recipe
from oscar_vllm.cache.layout import PAGE_TOKENS
from oscar_vllm.config import OscarConfig
from oscar_vllm.kernels.decode import MAX_QUERY_TOKENS

HEAD_SIZES = (64, 128, 256)
DTYPES = ("torch.bfloat16", "torch.float16")
_ALIBI_MODELS = ("bloom", "mpt", "baichuan", "step1")
_SINK_MODELS = ("gpt_oss",)
_CHECKED = "_oscar_block_size_checked"


class UnsupportedByOscarError(ValueError):
    """A model or flag that the backend does not serve."""


def selects_oscar(vllm_config: Any) -> bool:
    """Whether this engine was asked for the OSCAR backend."""
    return getattr(vllm_config.attention_config.backend, "name", None) == "OSCAR"


def _cache_problem(model: Any) -> str | None:
    """A cache other than plain full attention's, which neither the model nor its draft model may have."""
    text = model.hf_text_config
    if model.use_mla:
        return "a model with multi-head latent attention (MLA)"
    if model.is_encoder_decoder:
        return "an encoder-decoder model"
    if str(getattr(model, "attn_type", "decoder")) in ("encoder_only", "encoder", "encoder_decoder"):
        return "an encoder model"
    if model.is_attention_free or model.is_hybrid:
        return "a model with state-space or linear-attention layers"
    layer_types = getattr(text, "layer_types", None) or ()
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if any("sliding" in kind or "chunked" in kind for kind in layer_types) or (window and not layer_types):
        return "a model with sliding-window layers"
    if getattr(text, "num_kv_shared_layers", 0):
        return "a model whose layers share keys and values"
    return None


def _model_problem(model: Any) -> str | None:
    text = model.hf_text_config
    if problem := _cache_problem(model):
        return problem
    if getattr(text, "attn_logit_softcapping", None):
        return "a model with a soft cap on its attention logits"
    if getattr(text, "alibi", False) or text.model_type in _ALIBI_MODELS:
        return "a model with alibi position biases"
    if getattr(text, "attention_sinks", False) or text.model_type in _SINK_MODELS:
        return "a model with attention sinks of its own"
    # vLLM's own choice of a backend would refuse it; on the CPU it is not asked.
    if getattr(model, "is_mm_prefix_lm", False):
        return "a model whose image tokens attend in both directions"
    return None


def check_serving(vllm_config: Any) -> None:
    """Refuse what the backend cannot serve, and find and validate the recipe.

    Raises:
        UnsupportedByOscarError, OscarConfigError, RecipeError: one sentence that says what is wrong and what to do.
    """
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise UnsupportedByOscarError(
            f"OSCAR serves on NVIDIA GPUs and on CPUs and this is {current_platform.device_name}: start without "
            "--attention-backend OSCAR"
        )
    if current_platform.is_cuda() and not current_platform.has_device_capability(80):
        raise UnsupportedByOscarError(
            "OSCAR needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer: start without --attention-backend "
            "OSCAR"
        )
    OscarConfig.from_additional_config(vllm_config.additional_config)
    model, cache = vllm_config.model_config, vllm_config.cache_config
    problem = _model_problem(model)
    if problem is not None:
        raise UnsupportedByOscarError(
            f"OSCAR does not serve {problem}: start {model.model} without --attention-backend OSCAR"
        )
    head_size = model.get_head_size()
    if head_size not in HEAD_SIZES:
        raise UnsupportedByOscarError(
            f"OSCAR serves head sizes {', '.join(map(str, HEAD_SIZES))} and {model.model} has {head_size}: start it "
            "without --attention-backend OSCAR"
        )
    if current_platform.is_cuda() and not is_available(head_size):
        raise UnsupportedByOscarError(
            f"OSCAR prefills with FlashAttention, and this vLLM has none for head size {head_size} on this GPU: "
            "install xformers, whose attention takes its place (pip install xformers)"
        )
    if str(model.dtype) not in DTYPES:
        raise UnsupportedByOscarError(
            f"OSCAR serves bfloat16 and float16 and this model would run in {str(model.dtype).removeprefix('torch.')}: "
            "add --dtype bfloat16"
        )
    if cache.cache_dtype != "auto":
        raise UnsupportedByOscarError(
            f"OSCAR stores its own 2-bit format and --kv-cache-dtype {cache.cache_dtype} asks for another: leave that "
            "flag out"
        )
    # vLLM sets block_size to the smallest of all groups once it has grouped them, and a copy of the config is checked
    # again after that: only the user's own choice counts.
    if not getattr(cache, _CHECKED, False):
        if cache.user_specified_block_size and cache.block_size != PAGE_TOKENS:
            raise UnsupportedByOscarError(
                f"OSCAR's pages hold {PAGE_TOKENS} tokens and --block-size {cache.block_size} asks for another size: "
                f"leave that flag out or give {PAGE_TOKENS}"
            )
        setattr(cache, _CHECKED, True)
    if getattr(cache, "prefix_cache_retention_interval", None):
        raise UnsupportedByOscarError(
            "OSCAR keeps every full page in the prefix cache and prefix_cache_retention_interval asks to drop some: "
            "leave that option out"
        )
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        raise UnsupportedByOscarError(
            "OSCAR keeps two KV-cache groups, which needs vLLM's hybrid KV cache manager: leave out "
            "--disable-hybrid-kv-cache-manager"
        )
    speculative = vllm_config.speculative_config
    drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
    if drafts >= MAX_QUERY_TOKENS:
        raise UnsupportedByOscarError(
            f"OSCAR verifies up to {MAX_QUERY_TOKENS - 1} speculative tokens at a time and {drafts} are asked for: set "
            f"num_speculative_tokens to {MAX_QUERY_TOKENS - 1} or fewer"
        )
    draft = draft_config(vllm_config)
    problem = _cache_problem(draft) if draft is not None else None
    if problem is not None:
        raise UnsupportedByOscarError(
            f"OSCAR's pool holds draft models with full attention in every layer and {draft.model} is {problem}: name "
            "another draft model in speculative_config"
        )
    problem = speculation_problem(vllm_config)
    if problem is not None:
        raise UnsupportedByOscarError(problem)
    # The offloading flag becomes a connector after this check.
    if vllm_config.kv_transfer_config is not None or getattr(cache, "kv_offloading_size", None):
        raise UnsupportedByOscarError(
            "OSCAR's two caches are not carried by KV connectors, which would move pages without the windows beside "
            "them: leave out --kv-transfer-config and KV offloading"
        )
    parallel = vllm_config.parallel_config
    if parallel.use_ubatching:
        raise UnsupportedByOscarError(
            "OSCAR does not run a batch as several micro-batches: leave out --enable-dbo and --ubatch-size"
        )
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, flag, 1) > 1:
            raise UnsupportedByOscarError(
                f"OSCAR does not split a request's cache over ranks: leave out --{flag.replace('_', '-')}"
            )
    load_recipe(vllm_config)
