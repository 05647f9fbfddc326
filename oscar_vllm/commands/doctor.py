"""``oscar doctor``: what a bug report asks for first."""

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.markup import escape

from oscar_vllm.commands.common import console, one_sentence


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _plugins() -> str:
    names = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    allowed = os.environ.get("VLLM_PLUGINS")
    if "oscar" not in names:
        raise RuntimeError("MISSING: reinstall oscar-vllm")
    if allowed is not None and "oscar" not in allowed.split(","):
        raise RuntimeError(f"BLOCKED by VLLM_PLUGINS={allowed}: add oscar to it")
    return "installed"


def _vllm() -> str:
    import vllm

    return str(vllm.__version__)


def _supported() -> str:
    from oscar_vllm.plugin import SUPPORTED_VLLM, check_vllm_version

    check_vllm_version(_vllm())
    return f"yes ({', '.join(SUPPORTED_VLLM)})"


def _backend() -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from oscar_vllm.plugin import register

    register()
    return str(AttentionBackendEnum["OSCAR"].get_path())


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{torch.cuda.device_count()} x {properties.name}, compute capability {properties.major}.{properties.minor}, "
        f"{properties.total_memory / 2**30:.0f} GiB"
    )


def _flash() -> str:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "PyTorch's, on the CPU"
    from oscar_vllm.backend.flash import is_available, vllm_version

    version = vllm_version(128)
    if version is not None:
        return f"vLLM's FlashAttention {version}"
    return "xformers' (vLLM's FlashAttention is not there)" if is_available(128) else "none; install xformers"


def _recipe(model: str) -> str:
    from vllm.transformers_utils.config import get_config

    from oscar_vllm.backend.recipes import recipe_path
    from oscar_vllm.geometry import ModelGeometry
    from oscar_vllm.recipe import OscarRecipe

    config = get_config(model, trust_remote_code=False)
    geometry = ModelGeometry.from_hf_config(config.get_text_config())
    path = recipe_path(None, model, geometry)
    recipe = OscarRecipe.load(path)
    recipe.check_geometry(geometry)
    return f"{recipe.content_hash()[:12]}, {recipe.metadata.method}, {recipe.metadata.tokens:,} tokens, {path}"


def _kernels() -> str:
    import torch

    from oscar_vllm.selftest import run_selftest

    start = time.perf_counter()
    result = run_selftest(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    text = (
        f"on {result.device}: {result.differing_bytes:.1e} of the bytes differ from the reference, attention is off by "
        f"{result.attention_error:.1e}, {time.perf_counter() - start:.1f} s"
    )
    if not result.passed:
        raise RuntimeError(f"FAILED {text}")
    return text


@one_sentence
def doctor(
    model: Annotated[str | None, typer.Argument(help="Also look for this model's recipe.")] = None,
) -> None:
    """Versions, device, recipe and a self-test of the kernels: put its output into a bug report."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("oscar-vllm", lambda: _version("oscar-vllm")),
        ("Python", lambda: f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", lambda: _version("torch")),
        ("Triton", lambda: _version("triton")),
        ("vLLM", _vllm),
        ("vLLM is a version that OSCAR supports", _supported),
        ("plugin", _plugins),
        ("attention backend", _backend),
        ("device", _device),
        ("prefill attention", _flash),
        ("kernels", _kernels),
    ]
    if model is not None:
        checks.append((f"recipe of {model}", lambda: _recipe(model)))
    failed = 0
    for name, check in checks:
        try:
            text, style = escape(check()), "green"
        except Exception as error:  # a sick installation fails in any way: say which, go on
            failed += 1
            text, style = escape(f"{type(error).__name__}: {error}"), "red"
        console.print(f"{name}: [{style}]{text}[/{style}]", soft_wrap=True, highlight=False)
    if failed:
        raise typer.Exit(1)
