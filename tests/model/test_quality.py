"""Teacher-forced quality through the served path, on text that no recipe was calibrated on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oscar_vllm.calibration.run import calibrate
from oscar_vllm.calibration.text import default_text
from oscar_vllm.evaluation.divergence import Quality
from oscar_vllm.evaluation.served import compare, record, teacher_forcing, use_recipe

from .conftest import in_process

SKIP, LENGTH, CHUNK, PROMPTS = 320, 2400, 64, 2


@pytest.fixture(scope="module")
def prompts(held_out: list[int]) -> list[list[int]]:
    return [held_out[i * LENGTH : (i + 1) * LENGTH] for i in range(PROMPTS)]


@pytest.fixture(scope="module")
def recorded(model: str, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The stock backend's logits over 4,158 positions."""
    folder = tmp_path_factory.mktemp("logits")
    with in_process(), teacher_forcing(model, longest=LENGTH, chunk=CHUNK) as llm:
        record(llm, prompts, folder, skip=SKIP, chunk=CHUNK)
        again = compare(llm, prompts[:1], folder, skip=SKIP, chunk=CHUNK)
        assert (again.kl, again.top1, again.nll) == (0, 1, again.reference_nll)
        yield folder


@pytest.fixture(scope="module")
def qualities(model: str, recipe: Path, prompts: list[list[int]], recorded: Path) -> dict[str, Quality]:
    """One engine, first with the calibrated recipe, then with the uncalibrated rotation in its place."""
    options = {"attention_backend": "OSCAR", "additional_config": {"oscar": {"recipe": "hadamard"}}}
    rules = {"skip": SKIP, "chunk": CHUNK}
    with in_process(), teacher_forcing(model, longest=LENGTH, chunk=CHUNK, **options) as llm:
        use_recipe(llm, str(recipe))
        calibrated = compare(llm, prompts, recorded, **rules)
        use_recipe(llm, "hadamard")
        return {"calibrated": calibrated, "hadamard": compare(llm, prompts, recorded, **rules)}


def test_calibrated_cache_keeps_the_distribution(qualities: dict[str, Quality]) -> None:
    quality = qualities["calibrated"]
    print(quality)
    assert quality.positions == PROMPTS * (LENGTH - 1 - SKIP)
    assert quality.kl <= 0.018
    assert quality.top1 >= 0.935


def test_measurement_can_fail(qualities: dict[str, Quality]) -> None:
    """Without calibration and centering the same measurement is clearly worse: the other recipe was in place."""
    print(qualities["hadamard"])
    assert qualities["hadamard"].kl > 1.4 * qualities["calibrated"].kl


def test_logits_are_kept_in_the_models_own_type_and_nothing_of_the_start(recorded: Path) -> None:
    files = sorted((recorded / "0000").iterdir())
    logits = torch.load(files[0], weights_only=True)
    assert (files[0].name, logits.dtype, logits.shape[0]) == ("00000320.pt", torch.bfloat16, CHUNK)
    assert len(files) == -(-(LENGTH - SKIP) // CHUNK)


def test_calibration_is_stable(
    model: str, prompts: list[list[int]], recorded: Path, qualities: dict[str, Quality], tmp_path: Path
) -> None:
    """A recipe of another text that shares nothing with the first is as good on a third, within 15 %."""
    text = default_text()
    other = text[len(text) // 2 :]
    options = {"attention_backend": "OSCAR", "additional_config": {"oscar": {"recipe": "hadamard"}}}
    with in_process():
        _, path = calibrate(model, text=other, out=tmp_path / "other.safetensors")
    with in_process(), teacher_forcing(model, longest=LENGTH, chunk=CHUNK, **options) as llm:
        use_recipe(llm, str(path))
        found = compare(llm, prompts, recorded, skip=SKIP, chunk=CHUNK)
    print(found)
    assert abs(found.kl / qualities["calibrated"].kl - 1) < 0.15
