"""The two-bit quantizer against its definition, and rows that are hard to store."""

import itertools
import math
import statistics

import pytest
import torch

from oscar_vllm.kernels.write.reference import clip_rows, dequantize, quantize

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.usefixtures("one_seed_and_thread")


def quantize_by_definition(
    row: list[float], ratio: float, gain: float, rounds: int, moments: bool = False
) -> list[float]:
    """What a row reads as, channel by channel in Python floats; the step and minimum are rounded as they are stored."""
    threshold = sorted(abs(x) for x in row)[min(int(ratio * len(row)), len(row) - 1)]
    row = [max(-threshold, min(threshold, x)) for x in row]
    low, step = min(row), (max(row) - min(row)) / 3
    deviation = statistics.pstdev(row)
    if moments and 3 * step < 9 * deviation:
        step = 0.95 * deviation
        low = statistics.fmean(row) - 1.5 * step

    def codes() -> list[int]:
        return [0 if step == 0 else max(0, min(3, math.floor((x - low) / step + 0.5))) for x in row]

    for _ in range(rounds):
        c = codes()
        mean_c, mean_x = sum(c) / len(c), sum(row) / len(row)
        variance = sum((i - mean_c) ** 2 for i in c)
        if variance == 0:
            break
        step = sum((i - mean_c) * (x - mean_x) for i, x in zip(c, row, strict=True)) / variance
        low = mean_x - step * mean_c
    final = codes()
    middle = low + 1.5 * step
    step = step * gain
    stored = torch.tensor([step, middle - 1.5 * step], dtype=torch.float64).half().double().tolist()
    return [i * stored[0] + stored[1] for i in final]


@pytest.mark.parametrize("rounds", [0, 1, 4], ids="{} rounds".format)
@pytest.mark.parametrize("gain", [1.0, 1.09], ids="gain {}".format)
@pytest.mark.parametrize("ratio", [1.0, 0.96, 0.5], ids="clip {}".format)
@pytest.mark.parametrize("moments", [False, True], ids=["range", "moments"])
def test_quantize_against_its_definition(ratio: float, gain: float, rounds: int, moments: bool) -> None:
    # Multiples of 1/8 keep every sum exact, so that both sides see the same codes.
    rows = (torch.randn(5, 2, 64) * 32).round() / 8
    clip, gains = torch.tensor([ratio, 1.0]), torch.tensor([gain, 1.0])
    rows[0, 0, 3] = 200.0  # a row of one far element starts from its range
    read = dequantize(*quantize(rows, clip, gains, rounds, moments=moments))
    for token, head in itertools.product(range(5), range(2)):
        row, numbers = rows[token, head].tolist(), (float(clip[head]), float(gains[head]))
        expected = quantize_by_definition(row, *numbers, rounds, moments)
        assert read[token, head].tolist() == pytest.approx(expected, rel=2e-3, abs=2e-3)


@pytest.mark.parametrize(("ratio", "kept"), [(1.0, 8), (0.99, 8), (0.75, 7), (0.5, 5), (0.01, 1)], ids=lambda v: str(v))
def test_clip_keeps_the_sorted_magnitude_at_the_ratio(ratio: float, kept: int) -> None:
    row = torch.tensor([3.0, -1.0, 8.0, -7.0, 2.0, -4.0, 6.0, 5.0])
    clipped = clip_rows(row.view(1, 1, 8), torch.tensor([ratio])).flatten()
    assert clipped.tolist() == row.clamp(-kept, kept).tolist()


def test_a_refit_never_leaves_a_larger_error() -> None:
    rows, one = torch.randn(200, 1, 64), torch.ones(1)
    error = [float((dequantize(*quantize(rows, one, one, rounds)) - rows).square().sum()) for rounds in range(5)]
    assert error[1] < 0.95 * error[0]
    assert all(later <= earlier * (1 + 1e-3) for earlier, later in itertools.pairwise(error))


def test_two_refits_from_the_moments_do_what_four_from_the_range_do() -> None:
    rows, one = torch.randn(2000, 1, 128), torch.ones(1)

    def error(rounds: int, moments: bool) -> float:
        return float((dequantize(*quantize(rows, one, one, rounds, moments=moments)) - rows).square().sum())

    assert error(2, True) < error(4, False) < error(2, False)


def test_gain_widens_the_step_about_its_middle() -> None:
    rows, one = torch.randn(4, 1, 64), torch.ones(1)
    codes, scale, low = quantize(rows, one, one, 3)
    wide_codes, wide_scale, wide_low = quantize(rows, one, one * 1.5, 3)
    assert torch.equal(codes, wide_codes)
    torch.testing.assert_close(wide_scale.float(), 1.5 * scale.float(), rtol=2e-3, atol=0)
    torch.testing.assert_close(
        wide_low.float() + 1.5 * wide_scale.float(), low.float() + 1.5 * scale.float(), rtol=0, atol=4e-3
    )


@pytest.mark.parametrize("rounds", [0, 3], ids="{} rounds".format)
@pytest.mark.parametrize("value", [0.0, 1.5, -7.0])
def test_a_row_of_one_value_is_exact(value: float, rounds: int) -> None:
    codes, scale, low = quantize(torch.full((1, 1, 64), value), torch.ones(1), torch.full((1,), 1.09), rounds)
    assert not codes.any()
    assert (float(scale), float(low)) == (0.0, value)


@pytest.mark.parametrize("bad", [NAN, INF, -INF], ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("ratio", [1.0, 0.5], ids="clip {}".format)
@pytest.mark.parametrize("rounds", [0, 2], ids="{} rounds".format)
def test_a_row_that_is_not_finite_reads_as_nan_or_clipped_and_others_as_ever(
    bad: float, ratio: float, rounds: int
) -> None:
    rows, clip, one = torch.randn(3, 2, 64), torch.full((2,), ratio), torch.ones(2)
    clean = dequantize(*quantize(rows, clip, one, rounds))
    rows[1, 0, 7] = bad
    read = dequantize(*quantize(rows, clip, one, rounds))
    if ratio == 1.0 or bad != bad:
        assert bool(read[1, 0].isnan().all())
    else:
        assert bool(read[1, 0].isfinite().all()), "the clip removes an infinite channel"
    clean[1, 0] = read[1, 0] = 0
    assert torch.equal(read, clean)


@pytest.mark.parametrize("moments", [False, True], ids=["range", "moments"])
@pytest.mark.parametrize("magnitude", [1e5, 1e30], ids="{:.0e}".format)
def test_a_row_beyond_half_precision_saturates_and_stays_finite(magnitude: float, moments: bool) -> None:
    row = torch.linspace(-1, 1, 64).view(1, 1, 64) * magnitude
    codes, scale, low = quantize(row, torch.ones(1), torch.ones(1), 2, moments=moments)
    assert bool(torch.stack([scale, low]).isfinite().all())
    if magnitude < 1e6:  # beyond that the middle of the row drowns in the rounding of its ends
        assert float(low) == -65504.0
    assert codes.flatten().tolist() == sorted(codes.flatten().tolist())


def test_a_row_whose_range_overflows_reads_as_nan() -> None:
    row = torch.linspace(-1, 1, 64).view(1, 1, 64) * 3e38
    assert bool(dequantize(*quantize(row, torch.ones(1), torch.ones(1), 2)).isnan().all())
