"""Which recipe a server takes: the configured one, the cached one, a published one; and what it logs."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_model import GEOMETRY, write_config

from oscar_vllm.backend import recipes
from oscar_vllm.backend.recipes import cached_recipe_path, fingerprint, load_recipe, recipe_path
from oscar_vllm.backend.startup_log import UNCENTERED, log_startup, near_only
from oscar_vllm.cache.layout import PageLayout
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import OscarRecipe, RecipeError


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OSCAR_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_config(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 10_000)
    return folder


def recipe(model: str = "org/m", centered: bool = True) -> OscarRecipe:
    plain = OscarRecipe.hadamard(GEOMETRY, model)
    metadata = plain.metadata.model_copy(
        update={"method": "oscar", "tokens": 8192, "centered": centered, "positions": 8192}
    )
    return OscarRecipe(**plain.tensors(), metadata=metadata)


def config(model: str, **oscar: Any) -> Any:
    """As much of a VllmConfig as is read."""
    hf = SimpleNamespace(
        model_type="llama",
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        hidden_size=256,
        rope_theta=10000.0,
    )
    return SimpleNamespace(
        additional_config={"oscar": oscar},
        model_config=SimpleNamespace(model=model, hf_text_config=hf, max_model_len=8192),
        cache_config=SimpleNamespace(num_gpu_blocks=1001),
    )


def test_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published, then cached over published, then configured over both."""

    def publish(model: str, geometry: ModelGeometry, path: Path) -> bool:
        recipe("published").save(path)
        return True

    monkeypatch.setattr(recipes, "import_published", publish)
    assert load_recipe(config("org/m")).metadata.model == "published"
    cached = cached_recipe_path("org/m", GEOMETRY)
    assert cached.parent == tmp_path / "cache" / "recipes"
    recipe("cached").save(cached)
    monkeypatch.setattr(recipes, "import_published", lambda *_: pytest.fail("a cached recipe is there"))
    assert load_recipe(config("org/m")).metadata.model == "cached"
    recipe("configured").save(tmp_path / "own")
    assert load_recipe(config("org/m", recipe=str(tmp_path / "own"))).metadata.model == "configured"
    assert load_recipe(config("org/m", recipe="hadamard")).metadata.method == "hadamard"


def test_none_found_names_the_command() -> None:
    with pytest.raises(RecipeError, match=r"^OSCAR has no recipe for org/m; make one with `oscar calibrate org/m`"):
        recipe_path(None, "org/m", GEOMETRY)


def test_recipe_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def hub(repository: str, file: str, revision: str | None = None) -> str:
        calls.append((repository, file, revision))
        if repository == "org/none":
            raise ConnectionError
        return str(tmp_path / "r")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    assert recipe_path("org/r@main", "org/m", GEOMETRY) == tmp_path / "r"
    assert recipe_path("org/r", "org/m", GEOMETRY) == tmp_path / "r"
    assert calls == [("org/r", "oscar_recipe.safetensors", "main"), ("org/r", "oscar_recipe.safetensors", None)]
    with pytest.raises(
        RecipeError, match=r'^oscar recipe "org/none" is not a file here, and oscar_recipe.safetensors of'
    ):
        recipe_path("org/none", "org/m", GEOMETRY)


def test_cache_is_keyed_by_what_the_model_is(model: Path, tmp_path: Path) -> None:
    """A copy shares the recipe; another configuration, other weights or another geometry do not."""
    path = cached_recipe_path(str(model), GEOMETRY)
    copy = tmp_path / "elsewhere" / "model"
    shutil.copytree(model, copy)
    assert cached_recipe_path(str(copy), GEOMETRY) == path
    assert cached_recipe_path(str(model), GEOMETRY.model_copy(update={"num_layers": 3})) != path
    with (copy / "model.safetensors").open("r+b") as stream:
        stream.seek(1_280_000)  # the middle
        stream.write(b"tuned")
    assert cached_recipe_path(str(copy), GEOMETRY) != path
    before = fingerprint(model)
    (model / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint(model) != before


def test_start_up_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.oscar"), "info", lines.append)
    recipe().save(tmp_path / "r")
    log_startup(config("org/m", recipe=str(tmp_path / "r")))
    assert lines[0] == f"OSCAR recipe {recipe().content_hash()[:12]}: oscar, calibrated on 8,192 tokens, centered"
    # 2 + 32 / 64 bits, and 320 tokens of 16 bits more than that.
    bits = 2.5 + 320 / 8192 * (16 - 2.5)
    assert lines[1] == (
        f"OSCAR cache: sink 64 | history INT2, page format 1 | recent 256, {bits:.2f} bits per element at 8,192 tokens"
    )
    dense = 1001 * PageLayout(64).page_bytes // (2 * 2 * 64)
    fit = int(lines[2].split()[2].replace(",", ""))
    assert lines[2] == (
        f"OSCAR memory: {fit:,} KV tokens in requests of 8,192, {fit / dense:.1f} times what a 16-bit cache holds"
    )
    assert 4 * dense < fit < 7 * dense
    assert len(lines) == 3


@pytest.mark.parametrize("centered", [True, False])
def test_an_uncentered_recipe_is_warned_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, centered: bool) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(logging.getLogger("vllm.oscar"), "warning", warnings.append)
    recipe(centered=centered).save(tmp_path / "r")
    log_startup(config("org/m", recipe=str(tmp_path / "r")))
    assert warnings == ([] if centered else [UNCENTERED])
    assert "--means-only" in UNCENTERED


@pytest.mark.parametrize(
    ("known", "centered", "warned"),
    [(8192, True, False), (4096, True, True), (0, True, True), (0, False, False)],
    ids=["all positions", "fewer than served", "a prompt's alone", "nothing to turn away"],
)
def test_a_recipe_that_does_not_hold_far_on_is_warned_about(known: int, centered: bool, warned: bool) -> None:
    made = recipe(centered=centered)
    made = OscarRecipe(**made.tensors(), metadata=made.metadata.model_copy(update={"positions": known}))
    found = near_only(made, 8192)
    assert (found is not None) is warned
    if found is not None:
        assert found.startswith(
            f"OSCAR recipe knows keys of the first {known or 2048:,} positions and requests may have "
        )
        assert "oscar calibrate" in found
    assert near_only(made, 2048) is None


def test_no_block_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the memory is profiled the number of blocks is not known."""
    monkeypatch.setattr(logging.getLogger("vllm.oscar"), "info", pytest.fail)
    empty = config("org/m", recipe="hadamard")
    empty.cache_config.num_gpu_blocks = None
    log_startup(empty)
