"""Draft models beside the target: refused in one sentence, or on their own backend in blocks that fit OSCAR's pool."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_model import write_config
from vllm import EngineArgs
from vllm.config.utils import replace
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec

from oscar_vllm.backend import drafting
from oscar_vllm.backend.checks import UnsupportedByOscarError
from oscar_vllm.backend.drafting import METHODS, draft_cache, make_room_for_draft
from oscar_vllm.backend.startup_log import describe
from oscar_vllm.backend.window_layer import SUFFIX
from oscar_vllm.cache.capacity import Shares, request_blocks, tokens_that_fit
from oscar_vllm.cache.layout import PageLayout
from oscar_vllm.cache.spec import history_spec
from oscar_vllm.cache.window import window_spec

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

Configure = Callable[..., Any]


@pytest.fixture
def configure(no_recipe_and_no_subprocess: None, tmp_path: Path) -> Configure:
    """The configuration of an engine with a draft model; ``draft``, ``target``: changed fields of the models."""

    def make(draft: dict[str, Any] | None = None, target: dict[str, Any] | None = None, **options: Any) -> Any:
        flags = options.pop("flags", {})
        speculative = {"method": "draft_model", "num_speculative_tokens": 3} | options
        if speculative["method"] != "ngram":
            speculative["model"] = str(write_config(tmp_path / "draft", **(draft or {})))
        return EngineArgs(
            model=str(write_config(tmp_path / "target", **(target or {}))),
            attention_backend="OSCAR",
            skip_tokenizer_init=True,
            additional_config={"oscar": {"recipe": "hadamard"}},
            speculative_config=speculative,
            **flags,
        ).create_engine_config()

    return make


# What is refused


DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "eagle": (
        {},
        {"method": "eagle"},
        f"OSCAR verifies drafts of the methods {', '.join(METHODS)} and speculative_config asks for eagle: name one of "
        "these as its method, or leave out --speculative-config",
    ),
    "OSCAR for the draft": (
        {},
        {"attention_backend": "OSCAR"},
        "OSCAR serves the target model only and speculative_config asks for it for the draft model: leave "
        "attention_backend out of speculative_config",
    ),
    "8-bit cache for the draft": (
        {},
        {"kv_cache_dtype": "fp8"},
        "OSCAR's pool holds a draft model's cache in 16 bits and speculative_config asks for fp8: leave kv_cache_dtype "
        "out of speculative_config",
    ),
    "sliding windows in the draft": (
        {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
        {},
        "OSCAR's pool holds draft models with full attention in every layer and {draft} is a model with sliding-window "
        "layers: name another draft model in speculative_config",
    ),
    "a deep draft": (
        {"num_hidden_layers": 3},
        {},
        "OSCAR takes drafts from a model with less than one and a half times the target's 2 layers and {draft} has 3: "
        "name a smaller draft model",
    ),
    "a wide draft": (
        # 32 tokens of it take 81,920 bytes, and a page of the target's two heads takes 10,240.
        {"hidden_size": 640, "num_attention_heads": 10, "num_key_value_heads": 10},
        {},
        "OSCAR's pool cannot hold the draft model {draft}, whose block of 32 tokens takes 8 times the target's INT2 "
        "page: name a smaller draft model",
    ),
    "two pipeline stages": (
        {},
        {"flags": {"pipeline_parallel_size": 2}},
        "OSCAR serves draft models in one pipeline stage: leave out --pipeline-parallel-size, or the draft model",
    ),
    "eight drafts": (
        {},
        {"num_speculative_tokens": 8},
        "OSCAR verifies up to 7 speculative tokens at a time and 8 are asked for: set num_speculative_tokens to 7 or "
        "fewer",
    ),
}


@pytest.mark.parametrize(("draft", "options", "sentence"), DRAFTS.values(), ids=DRAFTS)
def test_what_is_not_drafted_with(
    configure: Configure, tmp_path: Path, draft: dict[str, Any], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        configure(draft, **options)
    (problem,) = caught.value.errors()
    error = problem["ctx"]["error"]
    assert type(error) is UnsupportedByOscarError
    assert str(error) == sentence.format(draft=tmp_path / "draft")


# The draft's backend


@pytest.mark.parametrize(("asked", "given"), [(None, None), ("CPU_ATTN", "CPU_ATTN")], ids=["left out", "named"])
def test_a_draft_does_not_inherit_the_targets_backend(configure: Configure, asked: str | None, given: Any) -> None:
    """vLLM 0.33 makes the draft's configuration of the target's with nothing but another model in it."""
    config = configure(attention_backend=asked)
    draft = replace(config, model_config=config.speculative_config.draft_model_config)
    assert getattr(draft.attention_config.backend, "name", None) == given
    assert config.attention_config.backend.name == "OSCAR"


def test_a_draft_needs_no_recipe_and_no_head_size_of_oscars(configure: Configure) -> None:
    config = configure({"head_dim": 32, "num_hidden_layers": 1})
    replace(config, model_config=config.speculative_config.draft_model_config)


# The pool


MODELS: dict[str, tuple[int, int, int, int, int, int, int]] = {
    # Layers, KV heads and head size of target and draft, tokens of a draft block where the least is 16.
    "itself": (2, 2, 64, 2, 2, 64, 16),
    "Qwen3 8B, 0.6B": (36, 8, 128, 28, 8, 128, 16),
    "Qwen2.5 7B, 0.5B": (28, 4, 128, 24, 2, 64, 64),
    "Llama 3 70B, 8B": (80, 8, 128, 32, 8, 128, 16),
    "Llama 3 70B, 1B": (80, 8, 128, 16, 8, 64, 32),
    "a draft of one layer": (12, 4, 64, 1, 4, 64, 16),
    "a draft of wider layers": (4, 1, 64, 4, 2, 64, 16),
    "a narrow draft": (4, 16, 256, 4, 1, 64, 128),
}


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(drafting, "_least_block", lambda: 16)  # of a GPU
    return request.param


def models(shape: Any, v2: bool = True) -> Any:
    """What of a configuration is asked for a draft's cache."""
    layers, heads, size, draft_layers, draft_heads, draft_size, _ = shape

    def model(layers: int, heads: int, size: int) -> Any:
        return SimpleNamespace(
            dtype=torch.bfloat16,
            get_total_num_hidden_layers=lambda: layers,
            get_num_kv_heads=lambda _: heads,
            get_head_size=lambda: size,
        )

    names = [f"model.layers.{i}.attn" for i in range(layers)]
    context = {name: object() for name in names + [name + SUFFIX for name in names]}
    context |= {f"draft_model.model.layers.{i}.attn": object() for i in range(draft_layers)}
    draft = model(draft_layers, draft_heads, draft_size)
    return SimpleNamespace(
        model_config=model(layers, heads, size),
        parallel_config=None,
        cache_config=SimpleNamespace(block_size=128),
        compilation_config=SimpleNamespace(static_forward_context=context),
        speculative_config=SimpleNamespace(
            method="draft_model", draft_model_config=draft, draft_parallel_config=None, num_speculative_tokens=3
        ),
        use_v2_model_runner=v2,
    )


def specs(config: Any, shape: Any) -> dict[str, KVCacheSpec]:
    """What the layers of both models answer, in vLLM's order."""
    _, heads, size, _, draft_heads, draft_size, _ = shape
    make: Callable[..., Any] = FullAttentionSpec
    dense = make(block_size=config.cache_config.block_size, num_kv_heads=heads, head_size=size, dtype=torch.bfloat16)
    draft = make(
        block_size=config.cache_config.block_size,
        num_kv_heads=draft_heads,
        head_size=draft_size,
        dtype=torch.bfloat16,
    )
    window = window_spec(
        num_kv_heads=heads,
        head_size=size,
        dtype=torch.bfloat16,
        sink=64,
        recent=256,
        lookahead=3,
        steps_in_flight=2,
    )
    return {
        name: draft if name.startswith("draft") else window if name.endswith(SUFFIX) else history_spec(dense)
        for name in config.compilation_config.static_forward_context
    }


def test_vllm_groups_a_draft_beside_both_caches(shape: Any) -> None:
    """By vLLM's own functions: pages of 128 tokens, window blocks of 16, as many groups as the capacity counts."""
    config = models(shape)
    make_room_for_draft(config)
    options = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )
    groups = get_kv_cache_groups(options, specs(config, shape))
    kinds: dict[str, list[Any]] = {"draft": [], "window": [], "history": []}
    for group in groups:
        (kind,) = {
            "draft" if name.startswith("draft") else "window" if name.endswith(SUFFIX) else "history"
            for name in group.layer_names
        }
        kinds[kind].append(group.kv_cache_spec)
    cache = draft_cache(config)
    assert cache is not None
    assert cache.shares == Shares(len(kinds["history"]), len(kinds["draft"]), shape[-1])
    assert len(kinds["window"]) == len(kinds["history"])
    assert {spec.block_size for spec in kinds["history"]} == {128}
    assert {spec.block_size for spec in kinds["window"]} == {16}
    assert {spec.block_size for spec in kinds["draft"]} == {shape[-1]}
    # All pages are equal, and larger than OSCAR's own only where 16 tokens of the draft are.
    least = 16 * 4 * shape[4] * shape[5]
    own = shape[1] * PageLayout(shape[2]).page_bytes
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {max(own, least)}
    layers = max(len(group.layer_names) for group in groups)
    dense = 4 * (shape[0] * shape[1] * shape[2] + shape[3] * shape[4] * shape[5])
    assert cache.dense_tokens(1000) == 1000 * layers * max(own, least) // dense


@pytest.mark.parametrize("v2", [True, False], ids=["V2", "V1"])
def test_the_v1_runner_finds_the_draft_in_its_first_group(v2: bool) -> None:
    config = models(MODELS["Qwen3 8B, 0.6B"], v2)
    before = list(config.compilation_config.static_forward_context)
    for _ in range(2):
        make_room_for_draft(config)
        names = list(config.compilation_config.static_forward_context)
        if v2:
            assert names == before
        else:
            assert names == before[72:] + before[:72]


def test_without_a_draft_model_nothing_is_rearranged(configure: Configure) -> None:
    config = configure(method="ngram", prompt_lookup_max=3)
    block = config.cache_config.block_size
    make_room_for_draft(config)
    assert config.cache_config.block_size == block
    assert draft_cache(config) is None


# What the pool holds


def test_the_capacity_counts_the_drafts_blocks() -> None:
    """4,096 tokens: 32 pages, 4 sink and 17 recent blocks a history group, 64 or 256 blocks of the draft's."""
    assert request_blocks(4096, 64, 256) == 53
    assert request_blocks(4096, 64, 256, Shares(1, 1, 64)) == 53 + 64
    assert request_blocks(4096, 64, 256, Shares(3, 1, 16)) == 3 * 53 + 256
    assert tokens_that_fit(1 + 10 * 117, 4096, 64, 256, Shares(1, 1, 64)) == 10 * 4096


def test_the_start_up_log_tells_the_drafts_part(configure: Configure) -> None:
    """On a CPU blocks hold 32 tokens at least: of itself 16,384 bytes a layer, to which pages of 10,240 are padded."""
    config = configure(target={"max_position_embeddings": 2048})
    lines = describe(config, 1001)
    blocks = 16 + 4 + 17 + 2048 // 32
    dense = 1001 * 2 * 16384 // (2 * 2 * 4 * 2 * 64)
    fit = int(1000 / blocks * 2048)
    assert lines[2] == (
        f"OSCAR memory: {fit:,} KV tokens in requests of 2,048, {fit / dense:.1f} times what a 16-bit cache holds"
    )
    assert lines[3:] == [
        f"OSCAR draft model: {64 / blocks:.0%} of that memory is its own cache of 16 bits, in blocks of 32 tokens"
    ]
