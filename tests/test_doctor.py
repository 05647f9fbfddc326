"""`oscar doctor`: sees a healthy installation as one, and a sick one as sick."""

from pathlib import Path

import pytest
import torch
from tiny_model import write_config
from typer.testing import CliRunner

import oscar_vllm.selftest
from oscar_vllm.cli import app
from oscar_vllm.commands.doctor import _flash
from oscar_vllm.selftest import ATTENTION_LIMIT, CODE_LIMIT, run_selftest


@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 128), (1, 3, 64), (1, 1, 256)])
def test_kernels_pass_their_self_test(heads: int, group: int, dim: int) -> None:
    result = run_selftest(torch.device("cpu"), heads, group, dim)
    assert result.passed
    assert result.differing_bytes == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 128), (1, 3, 64), (1, 1, 256)])
def test_gpu_kernels_pass_their_self_test(heads: int, group: int, dim: int) -> None:
    assert run_selftest(torch.device("cuda"), heads, group, dim).passed


def test_a_kernel_that_forgets_the_output_matrix_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = oscar_vllm.selftest.attend

    def wrong(query, view, recipe, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        right(query, view, recipe._replace(output=torch.eye(128).expand(2, 128, 128)), *args, **kwargs)

    monkeypatch.setattr(oscar_vllm.selftest, "attend", wrong)
    result = run_selftest(torch.device("cpu"))
    assert result.attention_error > ATTENTION_LIMIT
    assert not result.passed


def test_a_kernel_that_writes_another_code_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = oscar_vllm.selftest.write

    def wrong(key, value, history, *rest) -> None:  # type: ignore[no-untyped-def]
        right(key, value, history, *rest)
        history[:, :, ::16] ^= 1

    monkeypatch.setattr(oscar_vllm.selftest, "write", wrong)
    assert run_selftest(torch.device("cpu")).differing_bytes > CODE_LIMIT


def test_healthy_installation() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    for text in ("oscar-vllm", "vLLM", "installed", "OscarBackend", "of the bytes differ"):
        assert text in result.output


def test_blocked_plugin_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "BLOCKED by VLLM_PLUGINS=other" in result.output


def test_missing_recipe_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    write_config(tmp_path)
    result = CliRunner(env={"OSCAR_CACHE": str(tmp_path / "cache")}).invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 1
    assert f"oscar calibrate {tmp_path}" in result.output


@pytest.mark.parametrize(
    ("version", "xformers", "line"),
    [
        (3, False, "vLLM's FlashAttention 3"),
        (None, True, "xformers' (vLLM's FlashAttention is not there)"),
        (None, False, "none; install xformers"),
    ],
    ids=["vllm", "xformers", "neither"],
)
def test_doctor_names_what_prefill_attends_with(
    monkeypatch: pytest.MonkeyPatch, version: int | None, xformers: bool, line: str
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: False)
    monkeypatch.setattr("oscar_vllm.backend.flash.vllm_version", lambda size: version)
    monkeypatch.setattr("oscar_vllm.backend.flash.is_available", lambda size: version is not None or xformers)
    assert _flash() == line
