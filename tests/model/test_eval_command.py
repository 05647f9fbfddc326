"""``oscar eval`` as users call it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oscar_vllm.cli import app

from .conftest import in_process


def run(*arguments: str) -> Any:
    with in_process():
        return CliRunner().invoke(app, ["eval", *arguments], env={"COLUMNS": "160"})


def test_table_figures_and_picture(model: str, recipe: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures_file, plots = tmp_path / "out" / "figures.json", tmp_path / "plots"
    options = ["--tokens", "90", "--length", "420", "--methods", "quarot,ours", "--recipe", str(recipe)]
    result = run(model, *options, "--json", str(figures_file), "--plots", str(plots))
    assert result.exit_code == 0, result.output
    figures = json.loads(figures_file.read_text())
    rows = figures["distribution"]["rows"]
    assert list(rows) == ["quarot", "ours"]
    assert rows["ours"]["positions"] == 99
    assert 0 < rows["ours"]["kl"] < rows["quarot"]["kl"]
    assert rows["ours"]["reference_nll"] == rows["quarot"]["reference_nll"]
    assert figures["recipes"]["ours"]["tokens"] == 8192
    assert figures["recipes"]["ours"]["text_hash"] != figures["text_hash"]
    assert (plots / "kl.png").is_file()
    table = [line.split("│")[1:-1] for line in result.output.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in table] == ["BF16 (stock backend)", "QuaRot INT2", "oscar_vllm"]
    assert float(table[2][3]) == pytest.approx(rows["ours"]["kl"], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--methods", "nonsense"], 'There is no method "nonsense"; the methods are bf16,'),
        (["--needle", "--needle-lengths", "4k"], '--needle-lengths takes numbers such as 1024,4096, not "4k".'),
        (["--needle", "--tokens", "0", "--needle-lengths", "9000"], "and the model's context is 8192; ask for shorter"),
        (["--needle", "--tokens", "0", "--task-methods", "kivi"], '"kivi" exists in reference maths only'),
        (["--engine-options", "[1]"], "--engine-options takes a JSON object, not [1]."),
        (["--tokens", "1000000", "--methods", "quarot"], "ask for fewer --tokens or another --length."),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(model: str, options: list[str], message: str) -> None:
    result = run(model, *options)
    assert result.exit_code == 1
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_recipe_calibrated_on_the_evaluations_text_is_refused(model: str, recipe: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    from oscar_vllm.calibration.text import held_out_text, text_hash
    from oscar_vllm.recipe import OscarRecipe

    good = OscarRecipe.load(recipe)
    metadata = good.metadata.model_copy(update={"text_hash": text_hash(held_out_text())})
    path = tmp_path / "cheat.safetensors"
    replace(good, metadata=metadata).save(path)
    result = run(model, "--methods", "ours", "--recipe", str(path))
    assert result.exit_code == 1
    assert "was calibrated on the text of the evaluation" in result.output
