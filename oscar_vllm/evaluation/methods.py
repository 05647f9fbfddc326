"""The caches that are compared: what each is called, how vLLM is started for it, and what it stores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from oscar_vllm.config import OscarConfig
from oscar_vllm.geometry import ModelGeometry

Path = Literal["served", "reference maths"]
BF16 = "bf16"
OURS = "ours"
NO_WINDOWS = "/no-windows"
_META_BITS = 32
"""A 16-bit scale and a 16-bit minimum."""


class EvaluationError(ValueError):
    """An evaluation that cannot be run as asked; the message is one sentence."""


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    name: str
    title: str
    path: Path = "served"
    recipe: str | None = None
    """Of the OSCAR backend: the baseline it serves ("naive", "quarot", "oscar", "ours"); None for other caches."""
    cache_dtype: str | None = None
    """vLLM's ``kv_cache_dtype`` of caches of its own."""
    windows: bool = True
    """Sink and recent tokens unquantized; means nothing for caches of vLLM's own."""

    def engine_options(self) -> dict[str, Any]:
        """What ``vllm.LLM`` is started with; methods with equal options can share an engine."""
        if self.recipe is not None:
            windows = {} if self.windows else {"sink": 0, "recent": 0}
            # The worker puts every method's own recipe in place.
            return {"attention_backend": "OSCAR", "additional_config": {"oscar": {"recipe": "hadamard", **windows}}}
        return {} if self.cache_dtype is None else {"kv_cache_dtype": self.cache_dtype}

    def bits(self, geometry: ModelGeometry) -> float:
        """Bits per cached key or value element far from the windows, scales included."""
        size = geometry.head_size
        if self.name.startswith("kivi"):
            from oscar_vllm.evaluation.kivi import GROUP

            return 2 + _META_BITS / GROUP
        if self.recipe is not None:
            return 2 + _META_BITS / size
        if self.cache_dtype is None:
            return 16.0
        if self.cache_dtype.startswith("turboquant"):
            from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

            slot = TurboQuantConfig.from_cache_dtype(self.cache_dtype, size).slot_size_aligned
            # vLLM keeps the first and last two layers in 16 bits.
            whole = min(4, geometry.num_layers)
            packed = slot * 8 / (2 * size)
            return (whole * 16 + (geometry.num_layers - whole) * packed) / geometry.num_layers
        return 8.0


def _int2(name: str, title: str) -> list[Method]:
    return [
        Method(name, title, recipe=name),
        Method(name + NO_WINDOWS, f"{title}, no windows", recipe=name, windows=False),
    ]


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(BF16, "BF16 (stock backend)"),
        Method("fp8", "FP8 (vLLM)", cache_dtype="fp8"),
        Method("turboquant-4bit", "TurboQuant 4-bit (vLLM)", cache_dtype="turboquant_4bit_nc"),
        Method("turboquant-3bit", "TurboQuant 3-bit (vLLM)", cache_dtype="turboquant_3bit_nc"),
        *_int2("naive", "naive INT2"),
        *_int2("quarot", "QuaRot INT2"),
        Method("kivi", "KIVI-like INT2", path="reference maths"),
        Method("kivi" + NO_WINDOWS, "KIVI-like INT2, no windows", path="reference maths", windows=False),
        *_int2("oscar", "OSCAR as published"),
        *_int2(OURS, "oscar_vllm"),
    )
}
"""All methods by name, in the order of the table."""


def available(methods: Sequence[Method]) -> list[Method]:
    """Those that this machine and the installed vLLM can run: the caches of vLLM's own need its GPU build."""
    from vllm.config.cache import CacheDType
    from vllm.platforms import current_platform

    on_gpu = current_platform.is_cuda_alike()
    known = get_args(CacheDType)
    return [method for method in methods if method.cache_dtype is None or (on_gpu and method.cache_dtype in known)]


def choose(names: str | None) -> list[Method]:
    """The methods of a comma-separated list, the reference first; None: all that can be run here.

    Raises:
        EvaluationError: an unknown name, or a method that cannot be run here.
    """
    wanted = list(METHODS) if names is None else [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in METHODS]
    if unknown:
        raise EvaluationError(f'There is no method "{unknown[0]}"; the methods are {", ".join(METHODS)}.')
    chosen = [method for name, method in METHODS.items() if name in wanted or name == BF16]
    usable = available(chosen)
    if names is not None and len(usable) < len(chosen):
        missing = next(method for method in chosen if method not in usable)
        raise EvaluationError(
            f'The method "{missing.name}" needs a GPU and a vLLM with the cache type {missing.cache_dtype}; '
            "leave it out."
        )
    return usable


def windows_of(method: Method) -> tuple[int, int]:
    """Unquantized first and last tokens."""
    config = OscarConfig()
    return (config.sink, config.recent) if method.windows else (0, 0)
