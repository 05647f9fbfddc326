"""Steps of random rows, what a cache holds once they are written, and its comparison with the twin and float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from caches import random_recipe

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout, unpack_codes
from oscar_vllm.kernels.views import LayerRecipe
from oscar_vllm.kernels.write.reference import write_reference


def write_triton(*args: Any) -> None:  # imported late: conftest chooses the interpreter first
    from oscar_vllm.kernels.write.triton import write_triton

    write_triton(*args)


class Caches(NamedTuple):
    history: torch.Tensor
    window: torch.Tensor


class Tokens(NamedTuple):
    """What one step writes: rows, where to, and how."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    window_slots: torch.Tensor
    recipe: LayerRecipe


def recipe_of(
    heads: int,
    dim: int,
    rounds: int = 0,
    clip: float = 1.0,
    gain: float = 1.0,
    device: str = "cpu",
    moments: bool = False,
) -> LayerRecipe:
    recipe = random_recipe(heads, dim, torch.Generator().manual_seed(torch.seed() % (1 << 62)))
    full = torch.full((heads,), clip)
    # one head without a clip beside heads with one
    full[-1] = 1.0 if heads > 1 else clip
    recipe = recipe._replace(key_clip=full, value_clip=full.clone(), rounds=rounds, moments=moments)
    recipe = recipe._replace(key_gain=torch.full((heads,), gain), value_gain=torch.full((heads,), gain))
    return LayerRecipe(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in recipe))


def step(
    tokens: int,
    heads: int,
    dim: int,
    recipe: LayerRecipe,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    skip: bool = True,
) -> Tokens:
    """Random rows for random slots of both caches; about one in seven is padding or lies in the null block."""
    key = (torch.randn(tokens, heads, dim) * 2 + recipe.key_mean.cpu()).to(device, dtype)
    value = torch.randn(tokens, heads, dim).to(device, dtype)
    blocks, window_blocks = -(-tokens // PAGE_TOKENS) + 2, -(-tokens // WINDOW_TOKENS) + 2
    slots = torch.randperm((blocks - 1) * PAGE_TOKENS)[:tokens] + PAGE_TOKENS
    window_slots = torch.randperm((window_blocks - 1) * WINDOW_TOKENS)[:tokens] + WINDOW_TOKENS
    if skip and tokens > 1:
        slots[torch.rand(tokens) < 0.1] = -1
        null = torch.rand(tokens) < 0.05
        slots[null] = torch.randint(PAGE_TOKENS, (int(null.sum()),))
        window_slots[torch.rand(tokens) < 0.3] = -1
        null = torch.rand(tokens) < 0.3
        window_slots[null] = torch.randint(WINDOW_TOKENS, (int(null.sum()),))
    return Tokens(key, value, slots.to(device), window_slots.to(device), recipe)


def empty_caches(tokens: Tokens, fill: int = 255) -> Caches:
    """Both caches full of one byte value."""
    count, heads, dim = tokens.key.shape
    device = tokens.key.device
    blocks = -(-count // PAGE_TOKENS) + 3
    window_blocks = -(-count // WINDOW_TOKENS) + 3
    history = torch.full((blocks, heads, PAGE_TOKENS, dim // 2 + 8), fill, dtype=torch.uint8, device=device)
    window = torch.full((window_blocks, heads, WINDOW_TOKENS, 4 * dim), fill, dtype=torch.uint8, device=device)
    return Caches(history, window.view(tokens.key.dtype))


def written(writer: Callable[..., None], tokens: Tokens, caches: Caches | None = None) -> Caches:
    caches = caches or empty_caches(tokens)
    writer(tokens.key, tokens.value, *caches, tokens.slots, tokens.window_slots, tokens.recipe)
    return caches


def stored_rows(
    history: torch.Tensor, slots: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, minimum) of the slots: [N, 2, H, D] and twice [N, 2, H], K then V."""
    layout = PageLayout(dim)
    pages = history.cpu()[slots.cpu() // PAGE_TOKENS].flatten(2)
    row = (slots.cpu() % PAGE_TOKENS).tolist()
    both = []
    for codes_at, meta_at in ((layout.key_codes, layout.key_meta), (layout.value_codes, layout.value_meta)):
        size = layout.code_bytes
        codes = torch.stack([pages[i, :, codes_at + r * size : codes_at + (r + 1) * size] for i, r in enumerate(row)])
        meta = torch.stack([pages[i, :, meta_at + r * 4 : meta_at + (r + 1) * 4] for i, r in enumerate(row)])
        both.append((unpack_codes(codes), meta.contiguous().view(torch.float16).double()))
    codes = torch.stack([c for c, _ in both], 1)
    meta = torch.stack([m for _, m in both], 1)
    return codes.double(), meta[..., 0], meta[..., 1]


def exact_rows(tokens: Tokens) -> torch.Tensor:
    """[T, 2, H, D] float64 transformed rows, K then V."""
    recipe = tokens.recipe
    both = ((tokens.key, recipe.key_mean, recipe.key), (tokens.value, recipe.value_mean, recipe.value))
    return torch.stack([torch.einsum("thd,hde->the", x.double() - m.double(), a.double()) for x, m, a in both], 1).cpu()


def magnitudes(tokens: Tokens) -> torch.Tensor:
    """[T, 2, H, D] sums of the absolute terms of :func:`exact_rows`, which rounding errors are relative to."""
    recipe = tokens.recipe
    key, value = tokens.key.abs() + recipe.key_mean.abs(), tokens.value.abs() + recipe.value_mean.abs()
    both = ((key, recipe.key.abs()), (value, recipe.value.abs()))
    return torch.stack([torch.einsum("thd,hde->the", x.double(), a.double()) for x, a in both], 1).cpu()


def check_against_twin(tokens: Tokens) -> None:
    dim = tokens.key.shape[-1]
    got, want = written(write_triton, tokens), written(write_reference, tokens)
    live = tokens.slots[tokens.slots >= PAGE_TOKENS]
    codes, scale, minimum = stored_rows(got.history, live, dim)
    twin_codes, twin_scale, twin_minimum = stored_rows(want.history, live, dim)
    assert (codes - twin_codes).abs().max() <= 1
    flips = max(4, 1e-4 * codes.numel())
    assert (codes != twin_codes).sum() <= flips
    # A code that flips in an early round of the refit moves its row's scale even where the last codes agree: what the
    # float32 of the transform decides is again a code, so the number of codes sets the bound, not the number of rows.
    for mine, twin in ((scale, twin_scale), (minimum, twin_minimum)):
        close = (mine - twin).abs() <= 2e-3 * torch.maximum(twin.abs(), twin_scale)
        assert (~close).sum() <= flips
    rows = exact_rows(tokens)[(tokens.slots >= PAGE_TOKENS).cpu()]
    error = (codes * scale[..., None] + minimum[..., None] - rows).norm()
    twin_error = (twin_codes * twin_scale[..., None] + twin_minimum[..., None] - rows).norm()
    assert abs(error - twin_error) <= 1e-3 * twin_error
    # windows: within one step of the 16-bit type, and what a matrix in two parts of that type loses, of the exact row
    real = ((tokens.window_slots >= WINDOW_TOKENS) & (tokens.slots >= PAGE_TOKENS)).cpu()
    slots = tokens.window_slots.cpu()[real]
    held = got.window.cpu()[slots // WINDOW_TOKENS, :, slots % WINDOW_TOKENS].double()
    exact = torch.cat(exact_rows(tokens)[real].unbind(1), -1)
    size = torch.cat(magnitudes(tokens)[real].unbind(1), -1)
    step = torch.finfo(tokens.key.dtype).eps
    lost = 2.0**-17 if tokens.key.dtype == torch.bfloat16 else 2.0**-22
    assert ((held - exact).abs() <= step * exact.abs() + lost * size).all()
    untouched = torch.ones(got.window.shape[:3:2], dtype=torch.bool)
    untouched[slots // WINDOW_TOKENS, slots % WINDOW_TOKENS] = False
    rest = got.window.view(torch.uint8).cpu().transpose(1, 2)[untouched]
    assert (rest == 255).all()
