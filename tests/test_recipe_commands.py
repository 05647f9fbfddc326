"""``oscar import`` and ``oscar inspect`` as a user calls them."""

import json
from pathlib import Path

import pytest
import torch
from attention_cases import D, G, H, activations, collect
from typer.testing import CliRunner

from oscar_vllm.calibration.build import build_recipe
from oscar_vllm.calibration.layer import LayerCalibration
from oscar_vllm.calibration.sample import AttentionSample
from oscar_vllm.calibration.transforms import rotation
from oscar_vllm.cli import app
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import OscarRecipe
from oscar_vllm.recipe_report import energy_dims

GEOMETRY = ModelGeometry(
    model_type="llama",
    num_layers=2,
    num_heads=H * G,
    num_kv_heads=H,
    head_size=D,
    hidden_size=H * G * D,
    rope_type="default",
    rope_theta=10000.0,
)
GOLDEN = Path(__file__).parent / "data" / "recipe_v1.safetensors"


def run(*arguments: object) -> tuple[int, str]:
    """Exit status and what was printed, on a wide terminal."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    q, k, v = activations(5, 200)
    layer = LayerCalibration(collect(activations(0, 300)), [AttentionSample.take(q, k, v, D**-0.5)])
    path = tmp_path_factory.mktemp("recipe") / "r.safetensors"
    build_recipe([layer, layer], GEOMETRY, model="org/m", text_hash="abc", tokens=300).save(path)
    return path


def test_inspect(calibrated: Path) -> None:
    status, output = run("inspect", calibrated)
    assert status == 0
    recipe = OscarRecipe.load(calibrated)
    found = recipe.metadata.diagnostics
    assert found is not None
    assert f"Recipe {recipe.content_hash()[:12]} of org/m (llama, 2 layers" in output
    line = "geometric-mean, calibrated on 300 tokens, centered, keys not followed far on, 2 least-squares rounds from"
    assert f"{line} the moments" in output
    rows = [line.split() for line in output.splitlines() if line.strip().startswith("1 ")]
    assert len(rows) == 2  # the last layer of the keys and of the values
    for row, side in zip(rows, (found.key, found.value), strict=True):
        assert row[-1] == f"{side.search_gain(1):.1f}x"
        assert float(row[-2]) == pytest.approx(sum(side.error[1]) / H, rel=0.1)


def test_inspect_draws(calibrated: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    plot = tmp_path / "r.png"
    assert run("inspect", calibrated, "--plot", plot)[0] == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    status, output = run("inspect", calibrated, "--plot", tmp_path / "none" / "r.png")
    assert status == 1
    assert "cannot be written to" in output


def test_inspect_a_recipe_without_diagnostics(tmp_path: Path) -> None:
    status, output = run("inspect", GOLDEN)
    assert status == 0
    assert "The recipe keeps no diagnostics" in output
    status, output = run("inspect", GOLDEN, "--plot", tmp_path / "r.png")
    assert status == 1
    assert "The recipe keeps no diagnostics to draw; make it again with `oscar calibrate MODEL`." in output
    assert run("inspect", tmp_path / "none")[0] == 1


@pytest.mark.parametrize("size", [16, 64, 128])
def test_energy_dims(size: int) -> None:
    points = torch.linspace(0, size - 1, 9).round().long()
    flat, steep = torch.ones(size), 0.5 ** torch.arange(size)
    assert energy_dims(flat[points].tolist(), size) == pytest.approx(0.9 * size, abs=1)
    exact = int((steep.cumsum(0) < 0.9 * steep.sum()).sum()) + 1
    assert energy_dims(steep[points].tolist(), size) == pytest.approx(exact, abs=2)


def test_import(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": H * G,
        "num_key_value_heads": H,
        "head_dim": D,
        "hidden_size": H * G * D,
    }
    (model / "config.json").write_text(json.dumps(config))
    R = rotation(torch.randn(2, D, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    layers = {i: {"layer_id": i, "rotation": R[i]} for i in range(2)}
    torch.save({"format_version": 1, "layers": layers}, tmp_path / "k.pt")
    torch.save({"format_version": 1, "layers": {0: layers[0]}}, tmp_path / "short.pt")
    out = tmp_path / "r.safetensors"
    arguments = ["import", "--k", tmp_path / "k.pt", "--model", model, "--out", out, "--v"]
    status, output = run(*arguments, tmp_path / "k.pt")
    assert status == 0
    assert f"`oscar calibrate {model} --means-only --recipe {out}` adds them." in output
    recipe = OscarRecipe.load(out)
    torch.testing.assert_close(recipe.value[1, 0], R[1], rtol=0, atol=1e-6)
    assert not recipe.metadata.centered
    status, output = run(*arguments, tmp_path / "short.pt")
    assert status == 1
    assert "short.pt has no layer 1 and the model has 2 layers; give the rotations of this model." in output
