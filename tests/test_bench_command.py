"""``oscar bench``: what it refuses, and how rows are given (timing itself needs a GPU)."""

import pytest
import torch
from typer.testing import CliRunner

from oscar_vllm.commands.bench import _points, bench


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and what was printed, on a wide terminal."""
    result = CliRunner(env={"COLUMNS": "200"}).invoke(bench, list(arguments))
    return result.exit_code, result.output


def test_rows() -> None:
    assert _points("8x32768,1x1024") == [(8, 32768), (1, 1024)]


@pytest.mark.parametrize("arguments", [
    ("kernels", "--rows", "8*32768"),
    ("kernels", "--model", "GPT-2"),
    ("serve",),
    ("serve", "--dummy", "gpt-2"),
    ("serve", "some/model", "--backends", "oscar,fp4"),
    ("serve", "some/model", "--prefill", "many"),
])  # fmt: skip
def test_usage_errors(arguments: tuple[str, ...]) -> None:
    status, output = run(*arguments)
    assert status == 2
    assert "Invalid value" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize(
    "models",
    [(), ("--model", "Qwen3-8B"), ("--model", "Qwen3-8B, Llama-3.1-8B")],
    ids=["all", "one name", "both names"],
)
def test_kernels_without_a_gpu(models: tuple[str, ...]) -> None:
    """A layout goes by any of its models' names."""
    status, output = run("kernels", *models)
    assert status == 1
    assert "NVIDIA GPU" in output
