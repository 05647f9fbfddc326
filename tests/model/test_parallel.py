"""Several ranks, on the cores of one machine: heads and layers find their own share of the recipe.

Random weights and a recipe whose heads and layers differ in every part. Answers of several ranks differ from those of
one by the order of a sum, and a wrong share of the recipe only by more of what two bits lose: so log-probabilities are
compared, and what each planted fault does to them is measured beside what is allowed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from same_recipe import check_same_recipe, errors
from tiny_model import GEOMETRY, write_checkpoint, write_tokenizer
from vllm import SamplingParams

from oscar_vllm.backend.attention import OscarImpl
from oscar_vllm.backend.recipes import load_recipe
from oscar_vllm.calibration.run import calibrate
from oscar_vllm.calibration.text import default_text
from oscar_vllm.recipe import OscarRecipe
from oscar_vllm.recipe_format import CLIPS, GAINS, MATRICES, MEANS, TENSORS

from .conftest import Start, _starter, in_process

INSIDE, BEYOND = (40, 250), (400, 500, 600, 700, 800)
"""Tokens of the prompts; of the first nothing is read from INT2."""
STEPS = 4
INSIDE_ROUNDING, BEYOND_ROUNDING = 0.005, 0.02
"""Root mean square difference of log-probabilities in float16: of every prompt, and of the median prompt where codes
are read. Where rounding makes an element take the next code, that prompt differs by more, and few do."""
FAULT = 0.25
"""Every prompt beyond the windows that is asked differs by more when a share of the recipe is not the right one."""
PARTS = {"matrices": MATRICES, "means": MEANS, "clips": CLIPS, "gains": GAINS}


@dataclass(frozen=True)
class Answers:
    """Log-probabilities [prompts, STEPS, vocabulary] behind the same tokens, whatever was likeliest."""

    inside: torch.Tensor
    beyond: torch.Tensor
    hits: torch.Tensor
    """Of the prompts beyond the windows again."""


def distance(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """Root mean square of each prompt's differences."""
    return (one - other).square().mean((1, 2)).sqrt().tolist()


def logprobs(llm: Any, lengths: tuple[int, ...], hit: bool = False) -> torch.Tensor:
    """One request after the other, so that one rank and two compute in the same shapes."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=STEPS, ignore_eos=True, detokenize=False, logprobs=128, allowed_token_ids=[9]
    )
    found = []
    for length in lengths:
        prompt = {"prompt_token_ids": [2 + (31 * length + 7 * i * i + i**3) % 126 for i in range(length)]}
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        assert (output.num_cached_tokens >= 128) is hit
        found.append([[step[token].logprob for token in range(128)] for step in output.outputs[0].logprobs])
    return torch.tensor(found)


def ask(llm: Any) -> Answers:
    inside, beyond = logprobs(llm, INSIDE), logprobs(llm, BEYOND)
    return Answers(inside, beyond, logprobs(llm, BEYOND, hit=True))


def misplace(worker: Any, parts: tuple[str, ...], of: str) -> None:
    """In a worker: parts of a layer's recipe are those of KV head 0, whatever the rank, or of the other layer."""
    from vllm.model_executor.models.utils import extract_layer_index

    recipe = load_recipe(worker.vllm_config)
    for name, layer in worker.vllm_config.compilation_config.static_forward_context.items():
        impl = getattr(layer, "impl", None)
        if isinstance(impl, OscarImpl):
            index = extract_layer_index(name)
            own: Any = impl.__dict__.setdefault("own_recipe", impl.recipe)
            wrong = recipe.layer(index, heads=slice(0, 1)) if of == "head 0" else recipe.layer(1 - index)
            impl.recipe = own._replace(**{part: getattr(wrong, part) for part in parts})


def misplaced(llm: Any, parts: tuple[str, ...], of: str) -> torch.Tensor:
    """What is answered beyond the windows with that fault."""
    llm.collective_rpc(misplace, args=(parts, of))
    llm.reset_prefix_cache()
    return logprobs(llm, BEYOND[::2])


@pytest.fixture(scope="module", autouse=True)
def _cores() -> Iterator[None]:
    """vLLM binds each rank to a NUMA node of its own, which a machine may lack, and ranks may take 5 s to end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "30")
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(write_checkpoint(tmp_path_factory.mktemp("tiny")))


def calibrated(tiny: Path, out: Path, **options: Any) -> OscarRecipe:
    prefill: dict[str, Any] = {"max_model_len": 513, "max_num_batched_tokens": 513, "dtype": "float16"}
    with in_process():
        return calibrate(str(tiny), text=default_text(), tokens=1024, out=out, **prefill, **options)[0]


@pytest.fixture(scope="module")
def of_one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> OscarRecipe:
    """The recipe that one rank calibrates."""
    return calibrated(tiny, tmp_path_factory.mktemp("recipe") / "of-one.safetensors")


@pytest.fixture(scope="module")
def recipe(of_one: OscarRecipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with clips and gains that differ: calibration chooses much the same ones for random weights."""
    clips, gains = torch.tensor([[1.0, 0.8], [0.9, 0.7]]), torch.tensor([[1.0, 1.5], [0.8, 1.25]])
    tensors = of_one.tensors() | dict.fromkeys(CLIPS, clips) | dict.fromkeys(GAINS, gains)
    path = tmp_path_factory.mktemp("recipe") / "recipe.safetensors"
    OscarRecipe(**tensors, metadata=of_one.metadata).save(path)
    return path


def serving(model: Path, recipe: Path) -> Start:
    options = {"attention_backend": "OSCAR", "dtype": "float16", "skip_tokenizer_init": True, "max_logprobs": 128}
    return _starter(str(model), options | {"max_model_len": 1024, "max_num_batched_tokens": 256}, recipe)


@pytest.fixture(scope="module")
def one_rank(tiny: Path, recipe: Path) -> Answers:
    with serving(tiny, recipe)() as llm:
        return ask(llm)


@dataclass(frozen=True)
class Served:
    """By several ranks: as they start, and beyond the windows with each planted fault."""

    answers: Answers
    faults: Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def two_ranks(tiny: Path, recipe: Path) -> Served:
    with serving(tiny, recipe)(tensor_parallel_size=2) as llm:
        return Served(ask(llm), {name: misplaced(llm, parts, "head 0") for name, parts in PARTS.items()})


@pytest.fixture(scope="module")
def two_stages(tiny: Path, recipe: Path) -> Served:
    """Traced: a stage that runs eagerly on a CPU has no buffers to receive into, whatever vLLM's attention backend."""
    options = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}
    with serving(tiny, recipe)(pipeline_parallel_size=2, **options) as llm:
        return Served(ask(llm), {"everything": misplaced(llm, TENSORS, "the other layer")})


def check_same(expected: Answers, given: Answers) -> None:
    assert max(distance(expected.inside, given.inside)) <= INSIDE_ROUNDING
    assert median(distance(expected.beyond, given.beyond)) <= BEYOND_ROUNDING
    assert median(distance(expected.hits, given.hits)) <= BEYOND_ROUNDING


def check_seen(expected: Answers, faulty: torch.Tensor) -> None:
    assert min(distance(expected.beyond[::2], faulty)) > FAULT


def test_two_tensor_parallel_ranks_give_the_answers_of_one(one_rank: Answers, two_ranks: Served) -> None:
    check_same(one_rank, two_ranks.answers)


@pytest.mark.parametrize("part", PARTS)
def test_a_rank_with_another_heads_share_would_be_seen(part: str, one_rank: Answers, two_ranks: Served) -> None:
    """Two ranks that both take KV head 0's: one of them is right."""
    check_seen(one_rank, two_ranks.faults[part])


def test_two_pipeline_stages_give_the_answers_of_one(one_rank: Answers, two_stages: Served) -> None:
    check_same(one_rank, two_stages.answers)


def test_a_stage_with_another_layers_share_would_be_seen(one_rank: Answers, two_stages: Served) -> None:
    check_seen(one_rank, two_stages.faults["everything"])


def test_two_ranks_with_copies_of_one_kv_head_give_the_answers_of_one(recipe: Path, tmp_path: Path) -> None:
    """More ranks than KV heads; which heads copies are of is compared in ``tests/test_ranks.py``."""
    model = write_checkpoint(tmp_path / "tiny", num_key_value_heads=1)
    whole, geometry = OscarRecipe.load(recipe), GEOMETRY.model_copy(update={"num_kv_heads": 1})
    metadata = whole.metadata.model_copy(
        update={"geometry": geometry, "geometry_hash": geometry.hash(), "diagnostics": None}
    )
    shared = tmp_path / "shared.safetensors"
    OscarRecipe(**{name: tensor[:, 1:] for name, tensor in whole.tensors().items()}, metadata=metadata).save(shared)
    with serving(model, shared)() as llm:
        expected = ask(llm)
    with serving(model, shared)(tensor_parallel_size=2) as llm:
        check_same(expected, ask(llm))
        check_seen(expected, misplaced(llm, TENSORS, "the other layer"))


def test_two_ranks_calibrate_to_the_recipe_of_one(tiny: Path, of_one: OscarRecipe, tmp_path: Path) -> None:
    check_same_recipe(of_one, calibrated(tiny, tmp_path / "of-two.safetensors", tensor_parallel_size=2))
    first = errors(of_one)[:, 0]  # here both heads, of keys and of values, would tell
    assert ((first.flip(1) - first).abs() / first).min() > 0.04
