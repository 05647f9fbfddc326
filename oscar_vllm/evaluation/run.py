"""``oscar eval`` from end to end: as few engines as possible, every method over the same texts and prompts."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from oscar_vllm.calibration.text import held_out_text, text_hash
from oscar_vllm.evaluation.divergence import Quality
from oscar_vllm.evaluation.generation import answering, find_needles, solve
from oscar_vllm.evaluation.humaneval import FILLER_TOKENS, NEW_TOKENS
from oscar_vllm.evaluation.kivi import kivi_quality
from oscar_vllm.evaluation.methods import BF16, Method, windows_of
from oscar_vllm.evaluation.plan import SKIP, Inputs, Plan, prepare_inputs
from oscar_vllm.evaluation.recipes import prepare_recipes
from oscar_vllm.evaluation.sandbox import Sandbox
from oscar_vllm.evaluation.served import compare, record, teacher_forcing, use_recipe
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import OscarRecipe

CHUNK = 64
Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


def evaluate(plan: Plan, say: Say, keep: Keep = lambda figures: None) -> dict[str, Any]:
    """Run the plan and return its figures, ready for JSON.

    Args:
        plan: what to evaluate.
        say: called with what is being done.
        keep: called with the figures so far whenever a method is done, so that an interrupted run leaves something.

    Raises:
        EvaluationError: the plan asks for what cannot be had here.
    """
    tokenizer, geometry, context = _load(plan.model)
    inputs = prepare_inputs(plan, tokenizer, context)
    sandbox = Sandbox.strongest() if inputs.problems else None
    used = [*(plan.methods if plan.tokens else ()), *plan.tasks]
    figures: dict[str, Any] = {
        "model": Path(plan.model).name,
        "geometry": geometry.model_dump(),
        "methods": {m.name: {"title": m.title, "path": m.path, "bits": m.bits(geometry)} for m in used},
        "text_hash": text_hash(held_out_text()),
        **_versions(),
    }
    with tempfile.TemporaryDirectory(prefix="oscar-eval-") as scratch:
        folder = Path(scratch)
        names = {m.recipe for m in used if m.recipe is not None}
        recipes = prepare_recipes(plan.model, geometry, names, folder, ours=plan.recipe, say=say, **plan.engine_options)
        figures["recipes"] = {name: _describe(path) for name, path in recipes.items() if Path(path).is_file()}
        if inputs.texts:
            for figures["distribution"] in _distribution(plan, inputs.texts, recipes, folder / "logits", say):
                keep(figures)
        if inputs.longest:
            for part in _tasks(plan, inputs, sandbox, recipes, say):
                figures |= part
                keep(figures)
    return figures


def _distribution(
    plan: Plan, texts: list[list[int]], recipes: dict[str, str], folder: Path, say: Say
) -> Iterator[dict[str, Any]]:
    """The figures after every method."""
    length = len(texts[0])
    rules = {"skip": SKIP, "chunk": CHUNK}

    def start(**options: Any) -> AbstractContextManager[Any]:
        return teacher_forcing(plan.model, longest=length, chunk=CHUNK, **plan.engine_options, **options)

    rows: dict[str, Quality] = {}

    def so_far() -> dict[str, Any]:
        in_order = {method.name: asdict(rows[method.name]) for method in plan.methods if method.name in rows}
        return {**rules, "texts": len(texts), "length": length, "rows": in_order}

    for method, llm in _served(plan.methods, start, recipes, say):
        say(f"{method.title}: {len(texts)} texts of {length} tokens")
        if method.name == BF16:
            record(llm, texts, folder, **rules)
        else:
            rows[method.name] = compare(llm, texts, folder, **rules)
            yield so_far()
    reference = [method for method in plan.methods if method.path == "reference maths"]
    if reference:
        say("reference maths")
        windows = [windows_of(method) for method in reference]
        qualities = kivi_quality(plan.model, texts, windows, **rules)
        rows |= {method.name: quality for method, quality in zip(reference, qualities, strict=True)}
    yield so_far()


def _tasks(
    plan: Plan, inputs: Inputs, sandbox: Sandbox | None, recipes: dict[str, str], say: Say
) -> Iterator[dict[str, Any]]:
    """The figures after every method."""
    needles, problems = inputs.needles, inputs.problems

    def start(**options: Any) -> AbstractContextManager[Any]:
        return answering(plan.model, longest=inputs.longest, **plan.engine_options, **options)

    figures: dict[str, Any] = {}
    if sandbox is not None:
        figures["humaneval_setting"] = {
            "filler_tokens": FILLER_TOKENS,
            "shortest_prompt": min(len(problem.prompt) for problem in problems),
            "new_tokens": NEW_TOKENS,
            "sandbox": asdict(sandbox),
        }
    for method, llm in _served(plan.tasks, start, recipes, say):
        if needles:
            say(f"{method.title}: {len(needles)} needle prompts")
            figures.setdefault("needle", {})[method.name] = find_needles(llm, needles)
        if sandbox is not None:
            say(f"{method.title}: {len(problems)} HumanEval problems")
            figures.setdefault("humaneval", {})[method.name] = solve(llm, problems, sandbox)
        yield figures


def _served(
    methods: Sequence[Method], start: Callable[..., AbstractContextManager[Any]], recipes: dict[str, str], say: Say
) -> Iterator[tuple[Method, Any]]:
    """Each served method with an engine set up for it; methods with equal options share one."""
    served = [method for method in methods if method.path == "served"]
    # The reference comes first; the sort is stable.
    served.sort(key=lambda method: (method.name != BF16, method.recipe is not None, not method.windows))
    for options, group in groupby(served, Method.engine_options):
        members = list(group)
        say(f"{members[0].title}: starting vLLM")
        with start(**options) as llm:
            for method in members:
                if method.recipe is not None:
                    use_recipe(llm, recipes[method.recipe])
                yield method, llm


def _load(model: str) -> tuple[Any, ModelGeometry, int]:
    from transformers import AutoTokenizer
    from vllm.transformers_utils.config import get_config

    config = get_config(model, trust_remote_code=False)
    geometry = ModelGeometry.from_hf_config(config)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or 2048
    # The evaluation cuts a long text into prompts; the tokenizer need not warn of its length.
    return AutoTokenizer.from_pretrained(model, model_max_length=1 << 30), geometry, context


def _describe(path: str) -> dict[str, Any]:
    recipe = OscarRecipe.load(path)
    keep = ("method", "centered", "rounds", "tokens", "text_hash")
    return {"hash": recipe.content_hash(), **recipe.metadata.model_dump(include=set(keep))}


def _versions() -> dict[str, Any]:
    import platform

    import torch
    import vllm
    from vllm.platforms import current_platform

    # Asked of the driver: opening the GPU here would keep a part of its memory from the engines.
    device = f"CPU {platform.machine()}" if current_platform.is_cpu() else current_platform.get_device_name()
    return {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version(), "device": device}
