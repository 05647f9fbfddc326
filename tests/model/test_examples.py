"""The examples run to their end, in short form: what they print is there and says what it should."""

import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scripts import load_script

from oscar_vllm.backend.recipes import cached_recipe_path
from oscar_vllm.engine import engine
from oscar_vllm.geometry import ModelGeometry

from .conftest import in_process


@pytest.fixture
def run(model: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run an example as its command line would, with the recipe where it looks for it and nothing compiled."""
    from vllm.transformers_utils.config import get_config

    monkeypatch.setenv("OSCAR_CACHE", str(tmp_path))
    geometry = ModelGeometry.from_hf_config(get_config(model, trust_remote_code=False))
    cached = cached_recipe_path(model, geometry)
    cached.parent.mkdir(parents=True)
    shutil.copy(recipe, cached)

    def run(name: str, *arguments: str) -> None:
        module = load_script(f"examples/{name}.py")
        if hasattr(module, "engine"):
            monkeypatch.setattr(module, "engine", partial(engine, enforce_eager=True))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with in_process():
            module.main()

    return run


def test_agent_workload(run: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ["--sessions", "2", "--turns", "2", "--system-tokens", "700", "--new-tokens", "4"]
    run("agent_workload", model, *short, "--json", str(tmp_path / "rows.json"))
    oscar, dense = json.loads((tmp_path / "rows.json").read_text())
    assert (oscar["cache"], dense["cache"]) == ("OSCAR", "16-bit")
    for row in (oscar, dense):
        assert 0 < row["hit_rate"] < 1
        assert row["first_token_ms"] > 0
        assert row["tokens_per_s"] > 0
    assert oscar["sessions_that_fit"] > dense["sessions_that_fit"]
    table = capsys.readouterr().out.splitlines()[-3:]
    assert table[0].split() == ["cache", "hit", "rate", "first", "token", "tokens/s", "sessions", "that", "fit"]
    assert [line.split()[0] for line in table[1:]] == ["OSCAR", "16-bit"]


def test_offline_batch(run: Any, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "document.txt"
    document.write_text("The parcel is in locker 41. " * 80)
    run("offline_batch", model, str(document))
    out = capsys.readouterr().out
    assert out.count("tokens cached]") == 3


def test_far_positions(run: Any, model: str, recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("far_positions", model, str(recipe), "--positions", "0", "6000", "--tokens", "420")
    pattern = re.compile(rf"{recipe} at position (\S+): KL (\S+) ± \S+, top-1 \S+, 99 positions")
    near, far = (pattern.fullmatch(line) for line in capsys.readouterr().out.splitlines()[-2:])
    assert near is not None
    assert far is not None
    assert (near[1], far[1]) == ("0", "6,000")
    assert 0 < float(near[2]) < 0.05
    assert 0 < float(far[2]) < 0.05
