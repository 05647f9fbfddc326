"""Tensor and pipeline parallelism on two GPUs, with full CUDA graphs: the answers and the recipe of one GPU.

Random weights, and a recipe whose heads and layers differ in every part.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import Answer, agreed, answers, random_prompts
from engines import engine, graphs
from safetensors.torch import load_file, save_file
from same_recipe import check_same_recipe
from tiny_model import write_checkpoint, write_tokenizer

from oscar_vllm.backend.attention import OscarImpl
from oscar_vllm.kernels.views import LayerRecipe
from oscar_vllm.recipe import OscarRecipe
from oscar_vllm.recipe_format import CLIPS, GAINS, MATRICES, MEANS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")]

LENGTHS = (40, 200, 700, 1500)
"""Tokens of the prompts. Of the first two nothing is read from INT2; the last is prefilled in chunks."""
INSIDE = 2
CACHED = [0, 0, 384, 1152]
"""Tokens that are taken from the prefix cache when the prompts are asked again: whole pages, less the recent window."""
ANSWER = 24
ROUNDING = 0.05
"""How far log-probabilities may be from those of one GPU: a sum over two ranks rounds otherwise (0.016 on a CPU)."""
GRAPHS = graphs(1, 2, 4)
SHAPES: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""More than one KV head on each of two ranks, as kernels are compiled anew for a single one."""
DAMPED = {"q_proj": 0.4, "o_proj": 0.6}
OPTIONS: dict[str, Any] = {"dtype": "float16", "disable_custom_all_reduce": True}
"""In float16, so that seldom a code is another for rounding alone."""
BUDGET = {"max_num_batched_tokens": 1024}
"""Takes what is computed of all prompts on their hits: chunks would end elsewhere with two stages' steps in flight."""
TWO_RANKS, TWO_STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
PARTS = {"matrices": MATRICES, "means": MEANS, "clips": CLIPS, "gains": GAINS}


@pytest.fixture(scope="module", autouse=True)
def _two_gpus() -> Iterator[None]:
    """Workers in processes of their own, which do not inherit a CUDA context; NVLink's multicast is left alone.

    A host may share its NVLink switch, where multicast of one program can stop the others.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "30")
        patch.setenv("NCCL_NVLS_ENABLE", "0")
        patch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        for way in ("SYMM_MEM", "FLASHINFER"):
            patch.setenv(f"VLLM_ALLREDUCE_USE_{way}", "0")
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention is flatter and damped, so that one code that rounding makes another decides little."""
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), **SHAPES)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        weights[name] *= next((factor for part, factor in DAMPED.items() if part in name), 1.0)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return write_tokenizer(folder)


def calibrated(model: Path, out: Path, **options: Any) -> OscarRecipe:
    from vllm import envs

    from oscar_vllm.calibration.run import calibrate
    from oscar_vllm.calibration.text import default_text

    settings: dict[str, Any] = {"max_model_len": 513, "max_num_batched_tokens": 513, "gpu_memory_utilization": 0.05}
    settings |= OPTIONS | {"kv_cache_memory_bytes": 200 * 2**20} | options
    with pytest.MonkeyPatch.context() as patch:
        envs.disable_envs_cache()
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        return calibrate(str(model), text=default_text(), tokens=1024, out=out, **settings)[0]


@pytest.fixture(scope="module")
def of_one(model: Path, tmp_path_factory: pytest.TempPathFactory) -> OscarRecipe:
    """The recipe that one GPU calibrates."""
    return calibrated(model, tmp_path_factory.mktemp("recipe") / "of-one.safetensors")


@pytest.fixture(scope="module")
def recipe(of_one: OscarRecipe, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same with clips and gains that differ: calibration chooses much the same ones for random weights.

    Without refits, as what calibration itself serves has none: kernels are compiled for one of the two only.
    """
    clips = torch.tensor([[1.0, 0.9, 0.8, 0.7], [0.75, 0.85, 0.95, 1.0]])
    gains = torch.tensor([[1.0, 0.8, 1.5, 1.25], [1.3, 1.0, 0.8, 1.5]])
    tensors = of_one.tensors() | dict.fromkeys(CLIPS, clips) | dict.fromkeys(GAINS, gains)
    path = tmp_path_factory.mktemp("recipe") / "recipe.safetensors"
    metadata = of_one.metadata.model_copy(update={"rounds": 0, "start": "range"})
    OscarRecipe(**tensors, metadata=metadata).save(path)
    return str(path)


def alone(llm: Any, lengths: tuple[int, ...] = LENGTHS) -> list[Answer]:
    """One request after the other, so that chunks of a prompt end where they do on one GPU."""
    said = []
    for prompt in random_prompts(LENGTHS)[-len(lengths) :]:
        (answer,), cached = answers(llm, [prompt], ANSWER)
        assert cached == [0]
        said.append(answer)
    return said


@dataclass(frozen=True)
class Answers:
    """To the prompts one after the other, and then to all at once, behind what the prefix cache has of them."""

    alone: list[Answer]
    hits: list[Answer]


def ask(llm: Any) -> Answers:
    first = alone(llm)
    hits, cached = answers(llm, random_prompts(LENGTHS), ANSWER)
    assert cached == CACHED
    return Answers(first, hits)


@pytest.fixture(scope="module")
def plain(model: Path, recipe: str) -> Answers:
    """The answers of one GPU."""
    with pytest.MonkeyPatch.context() as patch, engine(str(model), patch, recipe, **OPTIONS, **BUDGET, **GRAPHS) as llm:
        return ask(llm)


def count_replays(worker: Any) -> None:
    """In a worker: count the graphs that it replays from now on."""
    replay = torch.cuda.CUDAGraph.replay
    worker.replays = 0

    def count(graph: Any) -> None:
        worker.replays += 1
        replay(graph)

    torch.cuda.CUDAGraph.replay = count


def replays(worker: Any) -> int:
    """In a worker: how many there were."""
    return int(worker.replays)


@pytest.mark.parametrize("parallel", [TWO_RANKS, TWO_STAGES], ids=["tensor", "pipeline"])
def test_two_gpus_give_the_answers_of_one(
    parallel: dict[str, int], model: Path, recipe: str, plain: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(str(model), monkeypatch, recipe, **OPTIONS, **BUDGET, **GRAPHS, **parallel) as llm:
        llm.collective_rpc(count_replays)
        given = ask(llm)
        decodes = (ANSWER - 1) * (len(LENGTHS) + 1)
        assert min(llm.collective_rpc(replays)) >= decodes, "every GPU replays graphs"
    for expected, found in ((plain.alone, given.alone), (plain.hits, given.hits)):
        assert agreed(expected, found, ROUNDING) > ANSWER * len(LENGTHS) // 2


def shares(llm: Any) -> dict[int, OscarImpl]:
    """The attention of every layer of an engine of this process."""
    from vllm.model_executor.models.utils import extract_layer_index

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    found = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    return {extract_layer_index(name): impl for name, impl in found.items() if isinstance(impl, OscarImpl)}


def of_first_rank(own: LayerRecipe, parts: tuple[str, ...]) -> LayerRecipe:
    """What two ranks have between them that both take the first one's heads."""
    half = own.key_clip.shape[0] // 2
    return own._replace(
        **{part: getattr(own, part)[:half].repeat(2, *[1] * (getattr(own, part).ndim - 1)) for part in parts}
    )


def test_another_ranks_or_stages_share_would_be_seen(
    model: Path, recipe: str, plain: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every prompt beyond the windows tells, whichever part of the recipe is wrong.

    On one GPU, where the shares of both can be given out.
    """
    expected = plain.alone[INSIDE:]
    with engine(str(model), monkeypatch, recipe, enforce_eager=True, **OPTIONS, **BUDGET) as llm:
        impls = shares(llm)
        own = {index: impl.recipe for index, impl in impls.items()}
        faults = {
            name: {index: of_first_rank(share, parts) for index, share in own.items()} for name, parts in PARTS.items()
        }
        for name, wrong in (*faults.items(), ("stage", {0: own[0], 1: own[0]}), ("none", own)):
            for index, share in wrong.items():
                impls[index].recipe = share
            llm.reset_prefix_cache()
            found = alone(llm, LENGTHS[INSIDE:])
            if name == "none":
                assert agreed(expected, found, ROUNDING) > ANSWER
                continue
            for one, other in zip(expected, found, strict=True):
                with pytest.raises(AssertionError):
                    agreed([one], [other], ROUNDING)


def test_two_ranks_calibrate_to_the_recipe_of_one(model: Path, of_one: OscarRecipe, tmp_path: Path) -> None:
    check_same_recipe(of_one, calibrated(model, tmp_path / "of-two.safetensors", **TWO_RANKS))
