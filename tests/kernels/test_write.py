"""The write kernel against its twin and float64, and what it must leave alone."""

import pytest
import torch
from written import (
    Caches,
    check_against_twin,
    empty_caches,
    exact_rows,
    recipe_of,
    step,
    stored_rows,
    write_triton,
    written,
)

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.write.reference import write_reference

DTYPES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")]
QUANTIZERS = [
    pytest.param(0, False, 1.0, 1.0, id="minmax"),
    pytest.param(0, False, 0.96, 1.0, id="clip96"),
    pytest.param(0, False, 0.5, 1.0, id="clip50"),
    pytest.param(4, False, 1.0, 1.09, id="refit"),
    pytest.param(4, False, 0.92, 1.05, id="refit-clip92"),
    pytest.param(0, True, 0.92, 1.05, id="moments-clip92"),
    pytest.param(2, True, 1.0, 1.09, id="moments-refit"),
    pytest.param(2, True, 0.96, 1.05, id="moments-refit-clip96"),
]
STARTS = [
    pytest.param(0, False, id="range"),
    pytest.param(4, False, id="range-refit"),
    pytest.param(0, True, id="moments"),
    pytest.param(2, True, id="moments-refit"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rounds", "moments", "clip", "gain"), QUANTIZERS)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"),
    [
        pytest.param(1, 1, 64, id="1-token"),
        pytest.param(17, 3, 64, id="D64"),
        pytest.param(33, 2, 128, id="D128"),
        pytest.param(5, 1, 256, id="D256"),
    ],
)
def test_codes_scales_and_windows_match_the_twin(
    device: str,
    tokens: int,
    heads: int,
    dim: int,
    rounds: int,
    moments: bool,
    clip: float,
    gain: float,
    dtype: torch.dtype,
) -> None:
    recipe = recipe_of(heads, dim, rounds, clip, gain, device, moments)
    check_against_twin(step(tokens, heads, dim, recipe, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rounds", "moments", "clip", "gain"), QUANTIZERS)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(4097, 8, 128), (4097, 3, 64), (1000, 2, 256), (63, 8, 128), (9000, 1, 128)]
)
def test_large_steps_match_the_twin(
    tokens: int, heads: int, dim: int, rounds: int, moments: bool, clip: float, gain: float, dtype: torch.dtype
) -> None:
    recipe = recipe_of(heads, dim, rounds, clip, gain, "cuda", moments)
    check_against_twin(step(tokens, heads, dim, recipe, dtype, "cuda"))


@pytest.mark.parametrize("dim", [64, 128])
def test_only_the_bytes_of_the_written_tokens_change(device: str, dim: int) -> None:
    layout = PageLayout(dim)
    tokens = step(40, 2, dim, recipe_of(2, dim, rounds=4, device=device), device=device)
    changed = torch.zeros_like(empty_caches(tokens).history, dtype=torch.bool).flatten(2)
    for fill in (0x00, 0xFF):
        caches = written(write_triton, tokens, empty_caches(tokens, fill))
        changed |= caches.history.flatten(2) != fill
        assert (caches.window[0].view(torch.uint8) == fill).all(), "the null block of the window"
    owned = torch.zeros_like(changed)
    for slot in tokens.slots[tokens.slots >= PAGE_TOKENS].tolist():
        row = slot % PAGE_TOKENS
        for at, size in (
            (layout.key_codes, layout.code_bytes),
            (layout.value_codes, layout.code_bytes),
            (layout.key_meta, 4),
            (layout.value_meta, 4),
        ):
            owned[slot // PAGE_TOKENS, :, at + row * size : at + (row + 1) * size] = True
    assert not owned[0].any()
    assert torch.equal(changed, owned)


def test_padded_strides(device: str) -> None:
    """K and V as slices of one wider projection, and caches with gaps between heads and blocks."""
    heads, dim, count = 2, 64, 21
    tokens = step(count, heads, dim, recipe_of(heads, dim, rounds=4, device=device), device=device)
    fused = torch.full((count, 3 * heads + 1, dim), float("nan"), dtype=torch.bfloat16, device=device)
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads : 3 * heads]
    key.copy_(tokens.key)
    value.copy_(tokens.value)
    plain = written(write_triton, tokens)
    page = plain.history[0, 0].numel()
    blocks = plain.history.shape[0]
    storage = torch.full((heads, blocks * (page + 32) + 64), 255, dtype=torch.uint8, device=device)
    history = storage.as_strided(plain.history.shape, (page + 32, storage.stride(0), dim // 2 + 8, 1))
    rows = torch.full((plain.window.shape[0], heads, WINDOW_TOKENS, 2 * dim + 8), float("nan"), device=device)
    window = rows.to(torch.bfloat16)[..., : 2 * dim]
    written(write_triton, tokens._replace(key=key, value=value), Caches(history, window))
    assert torch.equal(history, plain.history)
    assert torch.equal(window.nan_to_num(7.0), plain.window.nan_to_num(7.0))
    assert (storage[:, -64:] == 255).all()


@pytest.mark.parametrize(("rounds", "moments"), STARTS)
@pytest.mark.parametrize("clip", [1.0, 0.9])
def test_rows_that_are_not_finite_read_as_nan_alone(device: str, rounds: int, moments: bool, clip: float) -> None:
    tokens = step(20, 1, 64, recipe_of(1, 64, rounds, clip, device=device, moments=moments), device=device, skip=False)
    bad = {3: float("nan"), 8: float("inf"), 13: float("-inf")}
    for row, x in bad.items():
        tokens.key[row, 0, 5] = x
    codes, scale, minimum = stored_rows(written(write_triton, tokens).history, tokens.slots, 64)
    for row in range(20):
        for kind in range(2):
            expected = row in bad and kind == 0
            assert bool(scale[row, kind, 0].isnan()) == expected
            assert bool(minimum[row, kind, 0].isnan()) == expected
            if expected:
                assert (codes[row, kind] == 0).all()


@pytest.mark.parametrize(("rounds", "moments"), STARTS)
@pytest.mark.parametrize("clip", [1.0, 0.92])
def test_rows_that_are_constant_tiny_or_huge(device: str, rounds: int, moments: bool, clip: float) -> None:
    """Identity transform, so that the stored row is known."""
    dim = 64
    eye = torch.eye(dim, device=device)[None].contiguous()
    recipe = recipe_of(1, dim, rounds, clip, device=device, moments=moments)._replace(
        key=eye, value=eye, key_mean=torch.zeros(1, dim, device=device), value_mean=torch.zeros(1, dim, device=device)
    )
    tokens = step(6, 1, dim, recipe, device=device, skip=False)
    tokens.key[0] = 3.0
    tokens.key[1] = 0.0
    tokens.key[2] *= 1e-39  # subnormal
    tokens.key[3] *= 1e6  # steps beyond fp16
    tokens.key[4, 0, 7] = 60.0 * 2
    tokens.key[5] = torch.tensor([0.0, 1.0, 2.0, 6.0] * (dim // 4), device=device)  # a tie at 1.0 when unclipped
    tokens.value[4:] = torch.arange(dim, device=device)  # of random ones, one row in 200 has a code at a tie
    codes, scale, minimum = stored_rows(written(write_triton, tokens).history, tokens.slots, dim)
    restored = codes * scale[..., None] + minimum[..., None]
    assert torch.isfinite(restored).all()
    assert (codes[:2, 0] == 0).all()
    assert (scale[:2, 0] == 0).all()
    assert (restored[0, 0] == 3.0).all()
    assert (restored[1, 0] == 0.0).all()
    assert (restored[2, 0].abs() <= 1e-7).all()
    assert scale[3, 0, 0] <= 65504
    assert minimum[3, 0, 0] >= -65504
    twin_codes, twin_scale, twin_minimum = stored_rows(written(write_reference, tokens).history, tokens.slots, dim)
    for row in (4, 5):
        assert torch.equal(codes[row], twin_codes[row])
        torch.testing.assert_close(scale[row], twin_scale[row], rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(minimum[row], twin_minimum[row], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("rounds", "clip", "gain"), [(0, 1.0, 1.0), (4, 1.0, 1.09), (4, 0.92, 1.05)])
def test_wide_values_saturate_about_their_middle(device: str, rounds: int, clip: float, gain: float) -> None:
    """Decode takes value scales up to 255: wider rows keep their middle, and their codes follow."""
    tokens = step(40, 2, 64, recipe_of(2, 64, rounds, clip, gain, device=device), device=device, skip=False)
    tokens = tokens._replace(value=tokens.value * 600 + 50)
    check_against_twin(tokens)
    history = written(write_triton, tokens).history
    codes, scale, minimum = stored_rows(history, tokens.slots, 64)
    assert scale[:, 1].max() == 255
    assert (scale[:, 1] == 255).float().mean() > 0.9
    rows = exact_rows(tokens)[:, 1]
    if rounds == 0:
        middle = (rows.amax(-1) + rows.amin(-1)) / 2
        assert ((minimum[:, 1] + 1.5 * scale[:, 1] - middle).abs() < 2.0).all()
    inside = (rows - minimum[:, 1, :, None]).div(scale[:, 1, :, None]).add(0.5).floor().clamp(0, 3)
    if gain == 1.0:
        assert (inside != codes[:, 1]).double().mean() < 1e-2


def test_a_mean_far_above_the_spread(device: str) -> None:
    """Key biases put a constant a hundred times the spread into some channels; centering must not lose the rest."""
    recipe = recipe_of(2, 128, rounds=4, device=device)
    mean = recipe.key_mean.clone()
    mean[:, 7], mean[:, 90] = 150.0, -90.0
    recipe = recipe._replace(key_mean=mean)
    check_against_twin(step(64, 2, 128, recipe, torch.float16, device))


def test_two_runs_are_bit_equal(device: str) -> None:
    tokens = step(50, 2, 128, recipe_of(2, 128, 4, 0.94, 1.05, device), device=device)
    first, second = written(write_triton, tokens), written(write_triton, tokens)
    assert torch.equal(first.history, second.history)
    assert torch.equal(first.window.view(torch.uint8), second.window.view(torch.uint8))


def test_no_tokens_is_no_launch(device: str) -> None:
    tokens = step(0, 2, 64, recipe_of(2, 64, device=device), device=device)
    assert (written(write_triton, tokens).history == 255).all()
