"""Teacher-forced quality through the served path, on text that no recipe was calibrated on."""

from pathlib import Path
from typing import Any

import pytest

from oscar_vllm.evaluation.served import Quality, compare, record_logits

from .conftest import in_process

SKIP = 320
PROMPTS, LENGTH, CHUNK = 2, 2400, 64


@pytest.fixture(scope="module")
def qualities(model: str, recipe: Path, held_out: list[int], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Quality of the default and of windows and centering off, against the stock backend over 4,158 positions."""
    folder = tmp_path_factory.mktemp("logits")
    prompts = [held_out[i * LENGTH : (i + 1) * LENGTH] for i in range(PROMPTS)]

    def record(name: str, **options: Any) -> list[list[Path]]:
        with in_process():
            return record_logits(model, prompts, folder / name, chunk=CHUNK, **options)

    def served(**config: Any) -> dict[str, Any]:
        return {"attention_backend": "OSCAR", "additional_config": {"oscar": config}}

    reference = record("stock")
    runs = {
        "default": served(recipe=str(recipe)),
        "crippled": served(recipe="hadamard", sink=0, recent=0),
    }
    return {name: compare(prompts, reference, record(name, **options), skip=SKIP) for name, options in runs.items()}


def test_calibrated_cache_keeps_the_distribution(qualities: dict[str, Quality]) -> None:
    quality = qualities["default"]
    print(quality)
    assert quality.positions >= 4_000
    assert quality.kl <= 0.08
    assert quality.top1 >= 0.88


def test_measurement_can_fail(qualities: dict[str, Quality]) -> None:
    """Without windows, calibration and centering the same measurement is far outside."""
    quality = qualities["crippled"]
    print(quality)
    assert quality.kl > 0.2
    assert quality.top1 < 0.8
