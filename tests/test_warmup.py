"""What steps behind a context launch, the warm-up has compiled. No GPU: launches are noted instead of made."""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch.overrides import TorchFunctionMode
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata

from oscar_vllm.backend import flash, metadata, prefill_cuda, warmup
from oscar_vllm.backend.attention import OscarImpl
from oscar_vllm.backend.context_plan import plan_prefill
from oscar_vllm.backend.metadata import OscarMetadataBuilder
from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.config import OscarConfig
from oscar_vllm.kernels.launch import Launch
from oscar_vllm.kernels.merge import triton as merge
from oscar_vllm.kernels.transform import triton as transform
from oscar_vllm.kernels.views import LayerRecipe
from oscar_vllm.kernels.write import triton as write

META = torch.device("meta")
PROCESSORS = 132
Variant = tuple[Any, ...]


class OnGpu(torch.Tensor):
    """A tensor without data that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class EverythingOnGpu(TorchFunctionMode):
    """Makes every tensor an :class:`OnGpu`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made.as_subclass(OnGpu) if isinstance(made, torch.Tensor) and made.is_meta else made


def variant(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    """What Triton compiles a kernel for, alignment of pointers aside."""
    settings = kernel.kwargs if hasattr(kernel, "kwargs") else vars(kernel)  # the interpreter's, or a compiled one's
    free = settings["do_not_specialize"] or ()
    kinds: list[Any] = []
    for x, (name, parameter) in zip(args, inspect.signature(kernel.fn).parameters.items(), strict=True):
        if isinstance(x, torch.Tensor):
            kinds.append(x.dtype)
        elif x is None or parameter.annotation is tl.constexpr:
            kinds.append(x)
        elif isinstance(x, float) or name in free:
            kinds.append(type(x))
        else:
            kinds.append(1 if x == 1 else f"int, divisible by 16: {x % 16 == 0}")
    return (kernel.fn.__name__, *kinds, *options.items())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Variant]]:
    """Variants of the kernels that were launched so far."""
    noted: set[Variant] = set()

    def note(launch: Launch, grid: tuple[int, int, int], *args: Any, **options: Any) -> None:
        noted.add(variant(launch.kernel, args, options))

    def attend(query: Any, key: Any, value: Any, *rest: Any) -> torch.Tensor:
        return torch.empty(query.shape[1], query.shape[0], dtype=torch.float32, device=META)

    monkeypatch.setattr(Launch, "__call__", note)
    monkeypatch.setattr(warmup, "_warm", set())
    monkeypatch.setattr(warmup, "flash_attention", lambda dim: attend)
    monkeypatch.setattr(flash, "flash_attention", lambda dim: attend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (merge, transform, write):
        monkeypatch.setattr(module, "processor_count", lambda device: PROCESSORS)
    with EverythingOnGpu():
        yield noted


def recipe_of(heads: int, dim: int) -> LayerRecipe:
    def float32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=META)

    matrices, means = [float32(heads, dim, dim) for _ in range(4)], [float32(heads, dim) for _ in range(2)]
    return LayerRecipe(*matrices, *means, *[float32(heads) for _ in range(4)], rounds=4)


def layer(heads: int, num_heads: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> OscarImpl:
    """A layer as vLLM has it when requests run, with a recipe that the warm-up has not seen."""
    made = OscarImpl.__new__(OscarImpl)
    made.num_heads, made.num_kv_heads, made.head_size, made.scale = num_heads, heads, dim, dim**-0.5
    made.config, made.recipe, made.oracle, made.observer = OscarConfig(), recipe_of(heads, dim), None, None
    page = heads * PageLayout(dim).page_bytes
    window = torch.empty(4, page // dtype.itemsize, dtype=dtype, device=META)[:, : heads * WINDOW_TOKENS * 2 * dim]
    made.window_name = "window"
    made.layers = {"window": SimpleNamespace(kv_cache=window.unflatten(1, (heads, WINDOW_TOKENS, 2 * dim)))}

    def workspace(dtype: torch.dtype) -> list[torch.Tensor]:
        shapes = prefill_cuda.workspace_shapes(16384, num_heads, heads, dim)
        return [torch.empty(shape, dtype=dtype, device=META) for shape in shapes]

    monkeypatch.setattr(made, "_borrow_workspace", workspace)
    return made


def step(
    new: list[int], totals: list[int], is_history: bool, monkeypatch: pytest.MonkeyPatch, decode_tokens: int = 1
) -> Any:
    """A step's metadata, as the builder makes them on a GPU; up to ``decode_tokens`` new tokens are a decode."""
    builder = OscarMetadataBuilder.__new__(OscarMetadataBuilder)
    builder.device = SimpleNamespace(type="cuda")
    builder.reorder_batch_threshold, builder.is_history, builder.tile_tokens = decode_tokens, is_history, 4096
    monkeypatch.setattr(metadata, "plan_prefill", lambda *args: plan_prefill(*args[:-1], META))
    starts = torch.tensor([0, *new]).cumsum(0).int()
    return builder.build(
        0,
        CommonAttentionMetadata(
            query_start_loc=torch.empty(len(new) + 1, dtype=torch.int32, device=META),
            query_start_loc_cpu=starts,
            seq_lens=torch.empty(len(new), dtype=torch.int32, device=META),
            num_reqs=len(new),
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(totals),
            block_table_tensor=torch.empty(len(new), 1024, dtype=torch.int32, device=META),
            slot_mapping=torch.empty(sum(new), dtype=torch.int64, device=META),
            seq_lens_cpu_upper_bound=torch.tensor(totals, dtype=torch.int32),
        ),
    )


STEPS: dict[str, tuple[list[int], list[int]]] = {
    "refreshed hit": ([364], [620]),
    "refreshed hit of a long prompt, several tiles": ([300], [20000]),
    "chunk of many tokens": ([16384], [32768]),
    "rest of a long hit, a piece": ([3], [40003]),
    **{f"rest of a long hit, {n} tokens": ([n], [40000 + n]) for n in (9, 24, 40, 64)},
    "hit beside a decode": ([1, 364], [900, 620]),
    "rest of a long hit beside a decode": ([1, 40], [900, 40040]),
    "all of them": ([1, 40, 364], [900, 40040, 620]),
}
KERNELS = {
    "_write_kernel",
    "_transform_kernel",
    "_gather_kernel",
    "_combine_kernel",
    "_prepare_kernel",
    "_decode_kernel",
}
SHAPES = {
    "3 heads of 64, 1 KV head": (1, 3, 64),
    "9 heads of 64, 3 KV heads": (3, 9, 64),
    "12 heads of 128, 2 KV heads": (2, 12, 128),
    "32 heads of 128, 8 KV heads": (8, 32, 128),
    "4 heads of 256, 4 KV heads": (4, 4, 256),
}


def engine_config(max_num_seqs: int, drafted: int = 0, captured: tuple[int, ...] = ()) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafted) if drafted else None,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=captured),
    )


def launched_by(
    steps: list[tuple[list[int], list[int]]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    drafted: int,
    launched: set[Variant],
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[set[Variant], set[Variant]]:
    """Variants that the warm-up launches, and those that these steps launch besides."""
    heads, num_heads, dim = shape
    config = OscarConfig()
    batches = warmup.decode_batches(engine_config(256, drafted))
    with set_default_torch_dtype(dtype):  # as vLLM has it while it loads weights
        warmup.warm_up(recipe_of(heads, dim), num_heads, dtype, dim**-0.5, config.sink, config.recent, batches)
    warm = set(launched)
    impl = layer(heads, num_heads, dim, dtype, monkeypatch)
    history = torch.empty(4, heads, PAGE_TOKENS, PageLayout(dim).token_bytes, dtype=torch.uint8, device=META)
    for new, totals in steps:
        window = step(new, totals, False, monkeypatch, 1 + drafted)
        monkeypatch.setattr(impl, "_window_metadata", lambda window=window: window)
        rows = torch.empty(sum(new), num_heads + 2 * heads, dim, dtype=dtype, device=META)
        query, key, value = rows.split([num_heads, heads, heads], 1)
        out = torch.empty(sum(new), num_heads, dim, dtype=dtype, device=META)
        impl.forward(None, query, key, value, history, step(new, totals, True, monkeypatch, 1 + drafted), out)
    return warm, launched - warm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_steps_behind_a_context_launch_what_the_warm_up_launched(
    shape: tuple[int, int, int], dtype: torch.dtype, launched: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    warm, more = launched_by(list(STEPS.values()), shape, dtype, 0, launched, monkeypatch)
    assert {name for name, *_ in warm} >= KERNELS
    assert more == set()


@pytest.mark.parametrize("drafted", [0, 1, 3, 7], ids=lambda n: f"{n} drafted")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decodes_of_any_batch_launch_what_the_warm_up_compiled(
    shape: tuple[int, int, int], drafted: int, launched: set[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [1, 2, 3, 5, 8, 11, 16, 17, 23, 33, 45, 64, 66, 100, 127, 128, 129, 200, 256]
    steps = [([new] * n, [900 + new] * n) for n in sizes for new in (1, 1 + drafted)]
    _, more = launched_by(steps, shape, torch.bfloat16, drafted, launched, monkeypatch)
    assert more == set()


def test_decode_batches_are_those_of_graphs_and_of_steps_without_one() -> None:
    assert warmup.decode_batches(engine_config(5)) == {(1, 1), (2, 1), (4, 1), (8, 1)}
    assert warmup.decode_batches(engine_config(1, drafted=3, captured=(4, 12))) == {
        *((requests, 1) for requests in (1, 4, 12)),
        *((requests, 4) for requests in (1, 3)),
    }


def test_a_variant_is_what_triton_compiles_for() -> None:
    """Another dtype, constant or divisibility is another variant, another number is not."""

    def kernel(x, y, count, stride, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        pass

    made = SimpleNamespace(fn=kernel, do_not_specialize=["count"])
    x = torch.empty(1)
    base = variant(made, (x, None, 3, 64, 128), {"num_warps": 4})
    assert variant(made, (torch.empty(5), None, 16, 320, 128), {"num_warps": 4}) == base
    for other in ((x.half(), None, 3, 64, 128), (x, x, 3, 64, 128), (x, None, 3, 1, 128), (x, None, 3, 60, 128)):
        assert variant(made, other, {"num_warps": 4}) != base
    assert variant(made, (x, None, 3, 64, 256), {"num_warps": 4}) != base
    assert variant(made, (x, None, 3, 64, 128), {"num_warps": 8}) != base


ONE_CHUNK = {
    "max_num_seqs": 1,
    "enable_prefix_caching": False,
    "long_prefill_token_threshold": 0,
    "max_num_batched_tokens": 2049,
    "max_model_len": 2049,
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, False),
        ({"max_num_seqs": 2}, True),
        ({"enable_prefix_caching": True}, True),
        ({"long_prefill_token_threshold": 512}, True),
        ({"max_num_batched_tokens": 2048}, True),
    ],
    ids=["one request in one chunk", "several requests", "prefix hits", "long prompts cut", "chunks"],
)
def test_only_an_engine_that_never_sees_a_context_has_nothing_to_compile(
    change: dict[str, Any], expected: bool
) -> None:
    options = SimpleNamespace(**(ONE_CHUNK | change))
    config = SimpleNamespace(scheduler_config=options, cache_config=options, model_config=options)
    assert warmup.has_contexts(config) is expected
