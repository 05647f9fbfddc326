"""Random paged caches in which everything that must not be read is NaN, and attention over them in float64."""

from dataclasses import dataclass, replace

import torch

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.views import CacheView, LayerRecipe


@dataclass
class Case:
    """One batch: what a kernel takes, and each request's effective K and V in float64."""

    query: torch.Tensor
    view: CacheView
    recipe: LayerRecipe
    scale: float
    max_query_len: int
    keys: list[torch.Tensor]
    """Per request [length, H, D] float64, transformed, as the first query token reads them."""
    values: list[torch.Tensor]
    packed: list[tuple[torch.Tensor, torch.Tensor]]
    """Per request K and V [length, H, D] float64 of the INT2 rows."""

    def seen_by(self, request: int, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [length, H, D] as a request's query token reads them: its window begins ``token`` tokens later."""
        counts = self.view.query_start.diff().tolist()
        start = len(self.keys[request]) - counts[request] - self.view.recent
        moved = slice(max(start, self.view.sink), max(start + token, self.view.sink))
        both = self.keys[request].clone(), self.values[request].clone()
        for rows, packed in zip(both, self.packed[request], strict=True):
            rows[moved] = packed[moved]
        return both

    def to(self, device: str) -> "Case":
        view = CacheView(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self.view))
        recipe = LayerRecipe(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self.recipe))
        return replace(self, query=self.query.to(device), view=_with_strides(view, self.view), recipe=recipe)


def _with_strides(moved: CacheView, original: CacheView) -> CacheView:
    """``Tensor.to`` may make a padded view dense: put the original strides back."""

    def restride(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        if new.stride() == old.stride():
            return new
        span = 1 + sum((n - 1) * s for n, s in zip(old.shape, old.stride(), strict=True))
        storage = torch.full((span,), 255, dtype=torch.uint8, device=new.device)
        if new.dtype != torch.uint8:
            storage = torch.full((span,), float("nan"), dtype=new.dtype, device=new.device)
        return storage.as_strided(old.shape, old.stride()).copy_(new)

    return moved._replace(
        history=restride(moved.history, original.history), window=restride(moved.window, original.window)
    )


def random_recipe(heads: int, dim: int, generator: torch.Generator, spread: float = 0.3) -> LayerRecipe:
    """A well-conditioned, not orthogonal recipe."""

    def matrices() -> torch.Tensor:
        q, _ = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator, dtype=torch.float64))
        stretch = torch.exp(spread * torch.randn(heads, dim, 1, generator=generator, dtype=torch.float64))
        return stretch * q

    key, value = matrices(), matrices()
    return LayerRecipe(
        key=key.float(),
        query=torch.linalg.inv(key).mT.contiguous().float(),
        value=value.float(),
        output=torch.linalg.inv(value).contiguous().float(),
        key_mean=torch.randn(heads, dim, generator=generator),
        value_mean=torch.randn(heads, dim, generator=generator),
        key_clip=torch.ones(heads),
        value_clip=torch.ones(heads),
        key_gain=torch.ones(heads),
        value_gain=torch.ones(heads),
        rounds=0,
    )


def random_case(
    lengths: list[int],
    new: list[int] | int = 1,
    *,
    heads: int = 1,
    group: int = 4,
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    sink: int = 64,
    recent: int = 256,
    missing: float = 0.0,
    value_scale: float = 0.5,
    query_spike: float = 1.0,
    strided: bool = False,
    max_query_len: int | None = None,
    seed: int | None = None,
) -> Case:
    """Build a batch.

    Args:
        lengths: tokens of each request after this step; 0 is a padding row.
        new: query tokens of each request.
        heads, group, dim, dtype: KV heads, query heads per KV head, head size, the model's dtype.
        sink, recent: window sizes in tokens.
        missing: share of the window blocks that are null, so that their tokens come from the history.
        value_scale: largest quantization step of the values.
        query_spike: factor on one channel of every query.
        strided: give the caches padded strides over blocks and heads.
        max_query_len: bucket told to the kernel; the most new tokens by default.
        seed: None draws fresh inputs.
    """
    gen = torch.Generator()
    gen.manual_seed(torch.seed() % (1 << 62) if seed is None else seed)
    counts = [new] * len(lengths) if isinstance(new, int) else new
    counts = [min(n, length) for n, length in zip(counts, lengths, strict=True)]
    layout = PageLayout(dim)
    pages = [-(-length // PAGE_TOKENS) for length in lengths]
    slots = [-(-length // WINDOW_TOKENS) for length in lengths]
    spare = 3  # blocks of garbage that stale entries point at
    history = _poisoned(sum(pages) + 1 + spare, heads, (PAGE_TOKENS, layout.token_bytes), torch.uint8, strided)
    window = _poisoned(sum(slots) + 1 + spare, heads, (WINDOW_TOKENS, 2 * dim), dtype, strided)
    page_ids = torch.randperm(sum(pages), generator=gen) + 1 + spare
    slot_ids = torch.randperm(sum(slots), generator=gen) + 1 + spare
    block_table = torch.randint(1, 1 + spare, (len(lengths), max(pages) + 2), generator=gen, dtype=torch.int32)
    window_table = torch.randint(1, 1 + spare, (len(lengths), max(slots) + 2), generator=gen, dtype=torch.int32)
    keys, values, packed = [], [], []
    for r, length in enumerate(lengths):
        at, wat = sum(pages[:r]), sum(slots[:r])
        block_table[r, : pages[r]] = page_ids[at : at + pages[r]].int()
        table = slot_ids[wat : wat + slots[r]].int()
        table[torch.rand(slots[r], generator=gen) < missing] = 0
        computed = length - counts[r]
        pos = torch.arange(length)
        ranged = (pos < sink) | (pos >= computed - recent)
        blocks = torch.arange(slots[r])
        used = torch.zeros(slots[r], dtype=torch.bool).index_fill(0, pos[ranged] // WINDOW_TOKENS, True)
        window_table[r, : slots[r]] = torch.where(used, table, window_table[r, : slots[r]])
        windowed = ranged & (table[pos // WINDOW_TOKENS] != 0)
        rows = torch.randn(2, length, heads, dim, generator=gen, dtype=torch.float64).to(dtype)
        real = blocks[used & (table != 0)]
        for j in real.tolist():
            inside = pos[j * WINDOW_TOKENS : (j + 1) * WINDOW_TOKENS]
            inside = inside[windowed[inside]]
            window[table[j], :, inside - j * WINDOW_TOKENS] = (
                rows[:, inside].permute(2, 1, 0, 3).flatten(2).to(window.dtype)
            )
        # Query tokens after the first read some of the window's oldest tokens from INT2.
        left = (pos >= sink) & (pos < computed + max(counts[r] - 1, 0) - recent)
        k, v = _fill_history(history, block_table[r, : pages[r]], length, ~windowed | left, value_scale, gen)
        packed.append((k, v))
        keys.append(torch.where(windowed[:, None, None], rows[0].double(), k))
        values.append(torch.where(windowed[:, None, None], rows[1].double(), v))
    query = torch.randn(sum(counts) + 2, heads * group, dim, generator=gen)
    query[..., int(torch.randint(dim, (1,), generator=gen))] *= query_spike
    query[sum(counts) :] = float("nan")  # rows of no request
    query_start = torch.tensor([0, *counts]).cumsum(0).int()
    view = CacheView(history, window, block_table, window_table, torch.tensor(lengths).int(), query_start, sink, recent)
    recipe = random_recipe(heads, dim, gen)
    bucket = max_query_len or max(1, *counts)
    return Case(query.to(dtype), view, recipe, dim**-0.5, bucket, keys, values, packed)


def _poisoned(blocks: int, heads: int, inner: tuple[int, int], dtype: torch.dtype, strided: bool) -> torch.Tensor:
    """[blocks, heads, *inner] of NaN; with ``strided`` heads lie outside blocks and both are padded by 32 bytes."""
    size = inner[0] * inner[1]
    pad = 16 if strided else 0
    shape = (heads, blocks * (size + pad) + pad) if strided else (blocks, heads * size)
    fill = 255 if dtype == torch.uint8 else float("nan")
    storage = torch.full(shape, fill, dtype=dtype).flatten()
    if strided:
        return storage.as_strided((blocks, heads, *inner), (size + pad, shape[1], inner[1], 1))
    return storage.view(blocks, heads, *inner)


def _fill_history(
    history: torch.Tensor,
    table: torch.Tensor,
    length: int,
    wanted: torch.Tensor,
    value_scale: float,
    gen: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write random INT2 rows of the ``wanted`` positions; K and V [length, H, D] float64 of every position."""
    heads, dim = history.shape[1], (history.shape[3] - 8) * 2
    shape = (2, len(table), heads, PAGE_TOKENS, dim)
    codes = torch.randint(0, 4, shape, generator=gen, dtype=torch.uint8)
    scale = (0.2 + torch.rand(*shape[:-1], generator=gen)).half()
    scale[1] *= value_scale
    minimum = (-1.5 * scale.float() + 0.3 * torch.randn(*shape[:-1], generator=gen) * scale.float()).half()
    quads = codes.unflatten(-1, (-1, 4)).int()
    packed = (quads * torch.tensor([1, 4, 16, 64])).sum(-1).to(torch.uint8)
    meta = torch.stack([scale, minimum], -1).view(torch.uint8)
    keep = torch.zeros(len(table) * PAGE_TOKENS, dtype=torch.bool)
    keep[:length] = wanted
    keep = keep.view(-1, 1, PAGE_TOKENS, 1)
    for i, kind in enumerate((packed, meta)):
        for j in range(2):
            size = kind.shape[-1]
            begin = PAGE_TOKENS * (i * dim // 2 + j * size)
            pages = history[table.long()].flatten(2)
            part = pages[..., begin : begin + PAGE_TOKENS * size].unflatten(2, (PAGE_TOKENS, size))
            pages[..., begin : begin + PAGE_TOKENS * size] = torch.where(keep, kind[j], part).flatten(2)
            history[table.long()] = pages.view(-1, *history.shape[1:])
    full = codes.double() * scale.double()[..., None] + minimum.double()[..., None]
    full = full.transpose(2, 3).flatten(1, 2)[:, :length]
    return full[0], full[1]


def attend_float64(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, Hq, D] output and [T, Hq] natural log-sum-exp in float64; NaN for rows of no request."""
    heads, dim = case.recipe.key.shape[:2]
    group = case.query.shape[1] // heads
    out = torch.full(case.query.shape, float("nan"), dtype=torch.float64)
    lse = torch.full(case.query.shape[:2], float("nan"), dtype=torch.float64)
    recipe = LayerRecipe(*(x.double().cpu() if isinstance(x, torch.Tensor) else x for x in case.recipe))
    query = case.query.double().cpu().unflatten(1, (heads, group))
    start = case.view.query_start.tolist()
    for r, keys in enumerate(case.keys):
        new = start[r + 1] - start[r]
        for token in range(new):
            k, v = (rows[: len(keys) - new + token + 1] for rows in case.seen_by(r, token))
            q = torch.einsum("hgd,hde->hge", query[start[r] + token], recipe.query)
            scores = torch.einsum("hgd,lhd->hgl", q, k) * case.scale
            o = torch.einsum("hgl,lhd->hgd", scores.softmax(-1), v)
            o = torch.einsum("hgd,hde->hge", o, recipe.output) + recipe.value_mean[:, None]
            out[start[r] + token] = o.reshape(-1, dim)
            lse[start[r] + token] = scores.logsumexp(-1).flatten()
    return out, lse


def relative_error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(‖got - want‖ / ‖want‖ over all rows, the worst row's)."""
    difference = (got.double().cpu() - want).norm(dim=-1)
    return float(difference.norm() / want.norm()), float((difference / want.norm(dim=-1)).max())
