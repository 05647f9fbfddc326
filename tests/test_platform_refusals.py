"""What the machine does not have, refused in one sentence before a model is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest

from oscar_vllm.backend import checks
from oscar_vllm.backend.checks import UnsupportedByOscarError, check_serving


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_up(kind: str, capability: int = 90, attention: bool = True) -> None:
        platform = SimpleNamespace(
            device_name=kind,
            is_cpu=lambda: kind == "cpu",
            is_cuda=lambda: kind == "cuda",
            has_device_capability=lambda least: capability >= least,
        )
        monkeypatch.setattr(checks, "current_platform", platform)
        monkeypatch.setattr(checks, "is_available", lambda head_size: attention)

    return set_up


LLAMA: Any = SimpleNamespace(
    additional_config={"oscar": {"recipe": "hadamard"}},
    cache_config=SimpleNamespace(cache_dtype="auto"),
    model_config=SimpleNamespace(
        model="org/llama",
        dtype="torch.float32",
        hf_text_config=SimpleNamespace(model_type="llama"),
        use_mla=False,
        is_encoder_decoder=False,
        is_attention_free=False,
        is_hybrid=False,
        get_head_size=lambda: 128,
    ),
)
PAST_THE_MACHINE = (
    "OSCAR serves bfloat16 and float16 and this model would run in float32: add --dtype bfloat16"  # what LLAMA gets
)


def refusal() -> str:
    with pytest.raises(UnsupportedByOscarError) as caught:
        check_serving(LLAMA)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["rocm", "tpu", "xpu"])
def test_other_platforms(machine: Any, kind: str) -> None:
    machine(kind)
    assert refusal() == (
        f"OSCAR serves on NVIDIA GPUs and on CPUs and this is {kind}: start without --attention-backend OSCAR"
    )


@pytest.mark.parametrize("capability", [60, 75])
def test_old_gpus(machine: Any, capability: int) -> None:
    machine("cuda", capability)
    assert refusal() == (
        "OSCAR needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer: start without --attention-backend OSCAR"
    )


def test_a_gpu_without_flash_attention_and_xformers(machine: Any) -> None:
    machine("cuda", attention=False)
    assert refusal() == (
        "OSCAR prefills with FlashAttention, and this vLLM has none for head size 128 on this GPU: install xformers, "
        "whose attention takes its place (pip install xformers)"
    )


@pytest.mark.parametrize(
    ("kind", "capability", "attention"),
    [("cpu", 0, False), ("cuda", 80, True), ("cuda", 120, True)],
    ids=["CPU", "Ampere", "Blackwell"],
)
def test_machines_that_serve(machine: Any, kind: str, capability: int, attention: bool) -> None:
    machine(kind, capability, attention)
    assert refusal() == PAST_THE_MACHINE
