"""Flags, options and recipes that the backend cannot serve, refused in one sentence that says what to do."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from refused import configure, refusal
from safetensors.torch import load_file, save_file
from tiny_model import GEOMETRY, write_config
from vllm import EngineArgs

from oscar_vllm.backend.checks import UnsupportedByOscarError
from oscar_vllm.backend.recipes import cached_recipe_path
from oscar_vllm.config import OscarConfigError
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import OscarRecipe, RecipeError

pytestmark = pytest.mark.usefixtures("no_recipe_and_no_subprocess")


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., str]:
    """A checkpoint's folder without weights: a configuration is all that is read before loading."""

    def make(**changes: Any) -> str:
        return str(write_config(tmp_path / "model", **changes))

    return make


FLAGS: dict[str, tuple[dict[str, Any], str]] = {
    "block size 16": (
        {"block_size": 16},
        "OSCAR's pages hold 128 tokens and --block-size 16 asks for another size: leave that flag out or give 128",
    ),
    "block size 256": (
        {"block_size": 256},
        "OSCAR's pages hold 128 tokens and --block-size 256 asks for another size: leave that flag out or give 128",
    ),
    "float32": (
        {"dtype": "float32"},
        "OSCAR serves bfloat16 and float16 and this model would run in float32: add --dtype bfloat16",
    ),
    "fp8 cache": (
        {"kv_cache_dtype": "fp8"},
        "OSCAR stores its own 2-bit format and --kv-cache-dtype fp8 asks for another: leave that flag out",
    ),
    "retention": (
        {"prefix_cache_retention_interval": 128},
        "OSCAR keeps every full page in the prefix cache and prefix_cache_retention_interval asks to drop some: leave "
        "that option out",
    ),
    "no hybrid manager": (
        {"disable_hybrid_kv_cache_manager": True},
        "OSCAR keeps two KV-cache groups, which needs vLLM's hybrid KV cache manager: leave out "
        "--disable-hybrid-kv-cache-manager",
    ),
    "decode context parallel": (
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
        "OSCAR does not split a request's cache over ranks: leave out --decode-context-parallel-size",
    ),
    "kv connector": (
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}},
        "OSCAR's two caches are not carried by KV connectors, which would move pages without the windows beside them: "
        "leave out --kv-transfer-config and KV offloading",
    ),
    "kv offloading": (
        {"kv_offloading_size": 1.0},
        "OSCAR's two caches are not carried by KV connectors, which would move pages without the windows beside them: "
        "leave out --kv-transfer-config and KV offloading",
    ),
    "micro-batches": (
        {"ubatch_size": 2},
        "OSCAR does not run a batch as several micro-batches: leave out --enable-dbo and --ubatch-size",
    ),
    "speculative tokens": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4}},
        "OSCAR verifies up to 7 speculative tokens at a time and 8 are asked for: set num_speculative_tokens to 7 or "
        "fewer",
    ),
}


@pytest.mark.parametrize(("flags", "sentence"), FLAGS.values(), ids=FLAGS)
def test_flags(model: Callable[..., str], flags: dict[str, Any], sentence: str) -> None:
    assert refusal(UnsupportedByOscarError, model(), **flags) == sentence


@pytest.mark.parametrize(
    ("additional", "sentence"),
    [
        ({"oscar": {"sinks": 64}}, 'unknown oscar option "sinks"; the options are recipe, sink, recent'),
        ({"oskar": {}}, 'additional_config has no option "oskar"; did you mean "oscar"?'),
        (
            {"oscar": {"recent": 100}},
            'oscar option "recent": must be a multiple of 16 (the tokens of one window block), got 100',
        ),
    ],
    ids=["unknown", "misspelt", "not whole blocks"],
)
def test_options(model: Callable[..., str], additional: dict[str, Any], sentence: str) -> None:
    assert refusal(OscarConfigError, model(), additional) == sentence


# Recipes


def recipe_file(path: Path, geometry: ModelGeometry = GEOMETRY) -> Path:
    OscarRecipe.hadamard(geometry, "org/tiny").save(path)
    return path


def test_no_recipe_names_the_command_that_makes_one(model: Callable[..., str]) -> None:
    path = model()
    assert refusal(RecipeError, path, {}) == (
        f"OSCAR has no recipe for {path}; make one with `oscar calibrate {path}`, or name one with "
        '--additional-config \'{"oscar": {"recipe": PATH}}\''
    )


def test_a_recipe_that_is_not_there_names_the_command_that_makes_it(model: Callable[..., str], tmp_path: Path) -> None:
    path, recipe = model(), tmp_path / "missing.safetensors"
    assert refusal(RecipeError, path, {"oscar": {"recipe": str(recipe)}}) == (
        f'oscar recipe "{recipe}" is not a file; make it with `oscar calibrate {path} --out {recipe}`'
    )


def test_a_recipe_of_another_model(model: Callable[..., str], tmp_path: Path) -> None:
    other = GEOMETRY.model_copy(update={"num_layers": 3})
    recipe = recipe_file(tmp_path / "other.safetensors", other)
    assert refusal(RecipeError, model(), {"oscar": {"recipe": str(recipe)}}) == (
        f"The recipe was made for org/tiny ({other}) and does not fit this model ({GEOMETRY}); make one with "
        "`oscar calibrate MODEL`."
    )


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999], ids="{} kept".format)
def test_a_truncated_recipe(model: Callable[..., str], tmp_path: Path, keep: float) -> None:
    recipe = recipe_file(tmp_path / "short.safetensors")
    data = recipe.read_bytes()
    recipe.write_bytes(data[: int(keep * len(data))])
    sentence = refusal(RecipeError, model(), {"oscar": {"recipe": str(recipe)}})
    assert sentence.startswith(f"{recipe}: ")
    assert sentence.endswith("`oscar calibrate MODEL`.")
    assert "\n" not in sentence


def test_a_recipe_with_a_nan(model: Callable[..., str], tmp_path: Path) -> None:
    recipe = recipe_file(tmp_path / "nan.safetensors")
    with recipe.open("rb") as stream:
        header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
    tensors = load_file(recipe)
    tensors["key"][1, 0, 3, 5] = torch.nan
    save_file(tensors, recipe, header["__metadata__"])
    sentence = refusal(RecipeError, model(), {"oscar": {"recipe": str(recipe)}})
    assert sentence.startswith(f"{recipe}: ")
    assert "key" in sentence
    assert "finite" in sentence
    assert "\n" not in sentence


# What is served


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        ({}, {}),
        ({}, {"block_size": 128}),
        ({}, {"dtype": "float16"}),
        ({}, {"prefix_cache_retention_interval": 0}),
        ({"head_dim": 128}, {}),
        ({"head_dim": 256}, {}),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}, {}),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "use_sliding_window": False,
                "sliding_window": 128,
            },
            {},
        ),
    ],
    ids=["plain", "block size 128", "float16", "no retention", "D128", "D256", "no window", "window switched off"],
)
def test_what_is_served_starts(model: Callable[..., str], fields: dict[str, Any], flags: dict[str, Any]) -> None:
    config = configure(model(**fields), **flags)
    assert config.attention_config.backend.name == "OSCAR"


@pytest.mark.parametrize("named", [True, False], ids=["named", "calibrated and cached"])
def test_a_recipe_of_this_model_starts(model: Callable[..., str], tmp_path: Path, named: bool) -> None:
    path = model()
    recipe = recipe_file(tmp_path / "right.safetensors" if named else cached_recipe_path(path, GEOMETRY))
    configure(path, {"oscar": {"recipe": str(recipe)}} if named else {})


def test_another_backend_is_not_asked_for_a_recipe(model: Callable[..., str]) -> None:
    args = EngineArgs(model=model(sliding_window=128), skip_tokenizer_init=True, additional_config={"oscar": {"x": 1}})
    assert args.create_engine_config().attention_config.backend is None


@pytest.mark.parametrize("asked", [None, True, False], ids=["by default", "on", "off"])
def test_prefix_caching_is_what_was_asked_for(model: Callable[..., str], asked: bool | None) -> None:
    flags = {} if asked is None else {"enable_prefix_caching": asked}
    assert configure(model(), **flags).cache_config.enable_prefix_caching is (asked is not False)
