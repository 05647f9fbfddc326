"""The criteria against attention computed in full, and that the search finds what is better by them."""

import pytest
import torch

from oscar_vllm.calibration.criterion import Criterion, restored_parts
from oscar_vllm.calibration.sample import RECENT, AttentionSample
from oscar_vllm.calibration.search import MOMENTS, ROUNDS, Error, Transform, search
from oscar_vllm.calibration.transforms import hadamard
from oscar_vllm.kernels.write.reference import dequantize, quantize, transform_rows

T, H, G, D = 96, 2, 3, 16
SCALE = D**-0.5


def activations(seed: int = 0, tokens: int = T) -> list[torch.Tensor]:
    """Query [T, H * G, D], key, value [T, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, D, generator=generator) for heads in (H * G, H, H)]


def take(seed: int = 0, tokens: int = T) -> AttentionSample:
    return AttentionSample.take(*activations(seed, tokens), SCALE)


def full_attention(
    sample: AttentionSample, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query by query in float64: log weights [H, G, N, T] (exact keys and restored ones), outputs [H, G, N, D]."""
    history = sample.history()
    exact, restored = (torch.full((H, G, len(sample.position), T), -torch.inf, dtype=torch.float64) for _ in range(2))
    output = torch.zeros(H, G, len(sample.position), D, dtype=torch.float64)
    for h in range(H):
        for g in range(G):
            for n, position in enumerate(sample.position.tolist()):
                q = sample.query[h, g, n].double() * SCALE
                mixed_key = torch.where(history[n, :, None], key[h], sample.key[h]).double()[: position + 1]
                mixed_value = torch.where(history[n, :, None], value[h], sample.value[h]).double()[: position + 1]
                exact[h, g, n, : position + 1] = (sample.key[h, : position + 1].double() @ q).log_softmax(0)
                restored[h, g, n, : position + 1] = (mixed_key @ q).log_softmax(0)
                output[h, g, n] = exact[h, g, n, : position + 1].exp() @ mixed_value
    return exact, restored, output


@pytest.fixture(scope="module")
def parts() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    sample = take()
    names = ("key_middle", "key_step", "value_middle", "value_step")
    noise = torch.randn(4, H, T, D, generator=generator)
    near = {"key_step": sample.key, "value_step": sample.value}
    return {name: 0.2 * noise[i] + near.get(name, 0.0) for i, name in enumerate(names)}


def test_key_error_is_the_divergence_of_the_softmax(parts: dict[str, torch.Tensor]) -> None:
    sample, gains = take(), torch.tensor([0.8, 1.1])
    given = Criterion(sample).key_error(parts["key_middle"], parts["key_step"], gains)
    for index, gain in enumerate(gains.tolist()):
        key = parts["key_middle"] + gain * parts["key_step"]
        exact, restored, _ = full_attention(sample, key, sample.value)
        divergence = torch.where(exact.isfinite(), exact.exp() * (exact - restored), 0.0).sum(-1).mean((1, 2))
        torch.testing.assert_close(given[index].double(), divergence, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True], ids=["identity", "output weights"])
def test_value_error_is_that_of_the_projected_output(parts: dict[str, torch.Tensor], weighted: bool) -> None:
    sample, gains = take(), torch.tensor([0.8, 1.1])
    weight = (
        torch.randn(H, D, 40, generator=torch.Generator().manual_seed(6)) if weighted else torch.eye(D).expand(H, D, D)
    )
    criterion = Criterion(sample, weight @ weight.mT if weighted else None)
    given = criterion.value_error(parts["value_middle"], parts["value_step"], gains)
    projected = full_attention(sample, sample.key, sample.value)[2] @ weight.double()[:, None]
    variance = (projected - projected.mean((1, 2), keepdim=True)).square().sum(-1).mean((1, 2))
    for index, gain in enumerate(gains.tolist()):
        value = parts["value_middle"] + gain * parts["value_step"]
        restored = full_attention(sample, sample.key, value)[2] @ weight.double()[:, None]
        error = (restored - projected).square().sum(-1).mean((1, 2))
        torch.testing.assert_close(given[index].double(), error / variance, rtol=1e-3, atol=1e-6)


def test_exact_rows_cost_nothing() -> None:
    sample = take()
    criterion, zero, one = Criterion(sample), torch.zeros(H, T, D), torch.ones(1)
    assert criterion.key_error(zero, criterion.key, one).max() < 1e-6
    assert criterion.value_error(zero, criterion.value, one).max() < 1e-9
    # Softmax does not see a vector common to all keys, as long as the windows carry it too.
    assert criterion.key_error(zero + 1, criterion.key, one).min() > 1e-4


def test_sample_is_bounded_and_every_query_has_a_history() -> None:
    for tokens in (64, 500, 5000):
        sample = take(tokens=tokens)
        assert sample.key.shape[1] <= 1024
        assert sample.query.shape[:2] == (H, G)
        history = sample.history()
        assert history.any(1).all()
        assert not history[:, 0].any()
        # Up to the token before the recent window, which decoding counts from the query itself.
        last = (history * torch.arange(history.shape[1])).amax(1)
        assert torch.equal(last, sample.position - min(RECENT, history.shape[1] // 4) - 1)
    q, k, v = activations(tokens=5000)
    at = int(sample.position[3])
    torch.testing.assert_close(sample.query[1, 2, 3], q[at, G + 2])
    torch.testing.assert_close(sample.key[1, at], k[at, 1])
    torch.testing.assert_close(sample.value[0, at], v[at, 0])


@pytest.mark.parametrize("join", ["heads", "queries"])
def test_samples_of_ranks_join(join: str) -> None:
    q, k, v = activations()
    whole = take()
    if join == "heads":
        ranks = [(q[:, h * G : (h + 1) * G], k[:, h : h + 1], v[:, h : h + 1]) for h in range(H)]
        joined = AttentionSample.join_heads([AttentionSample.take(*rank, SCALE) for rank in ranks])
    else:  # each rank holds all KV heads here and one query head of each
        ranks = [(q[:, g::G], k, v) for g in range(G)]
        joined = AttentionSample.join_queries([AttentionSample.take(*rank, SCALE) for rank in ranks])
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(joined.state_dict()[name], tensor)
    with pytest.raises(ValueError, match=r"^The parts of a layer's sample are of different sequences;"):
        AttentionSample.join_heads([whole, take(tokens=T - 1)])


@pytest.mark.parametrize("clip", [1.0, 0.75])
@pytest.mark.parametrize(("rounds", "moments"), [(0, False), (4, False), (2, True)], ids=["range", "refit", "moments"])
def test_parts_are_what_the_cache_gives_back(clip: float, rounds: int, moments: bool) -> None:
    rows = activations()[1]
    generator = torch.Generator().manual_seed(3)
    matrix = torch.eye(D) + 0.1 * torch.randn(H, D, D, generator=generator)
    inverse, mean = torch.linalg.inv(matrix), torch.randn(H, D, generator=generator)
    middle, step = restored_parts(rows.transpose(0, 1), matrix, inverse, mean, clip, rounds, moments)
    for gain in (1.0, 1.2):
        codes, scale, minimum = quantize(
            transform_rows(rows, matrix, mean), torch.full((H,), clip), torch.full((H,), gain), rounds, moments=moments
        )
        served = torch.bmm(dequantize(codes, scale, minimum).transpose(0, 1), inverse) + mean[:, None]
        torch.testing.assert_close(middle + gain * step, served, rtol=0, atol=2e-2)  # scales and minima are fp16


def test_search_keeps_the_best_of_every_head() -> None:
    """Head 0 has rows of two values, which need no clip; head 1 has outliers that a clip spares the other channels."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(H, T, D, generator=generator)
    rows[0] = rows[0].sign() * rows[0, :, :1].abs()
    rows[1, :, 3] = 40 * rows[1, :, 3].sign()
    sample = take()
    criterion = Criterion(AttentionSample(sample.query, rows, rows, sample.position, SCALE))
    eye = torch.eye(D).expand(H, D, D)
    same = Transform("eye", eye, eye)
    options = {"published": same, "published_clip": 0.9, "clips": (1.0, 0.9)}
    choice = search([criterion.value_error], [rows], torch.zeros(H, D), same, **options)
    assert choice.clip[0] == 1.0
    assert choice.gain[0] == 1.0
    assert choice.error[0] < 1e-4
    alone = [
        search([criterion.value_error], [rows], torch.zeros(H, D), same, **options | {"clips": (clip,)}).error[1]
        for clip in (1.0, 0.9)
    ]
    assert choice.error[1] == min(alone)
    assert choice.clip[1] == pytest.approx((1.0, 0.9)[alone.index(min(alone))])
    assert (choice.baseline >= choice.error).all()


def test_search_is_never_worse_than_its_candidates() -> None:
    criterion, mean = Criterion(take()), torch.zeros(H, D)
    mix = hadamard(D).float().expand(H, D, D)
    transform = Transform("H", mix, mix)
    clips, gains = (1.0, 0.9), (0.9, 1.0, 1.1, 1.2)
    options = {"published": transform, "published_clip": 0.96, "clips": clips, "gains": gains}
    choice = search([criterion.key_error], [criterion.key], mean, transform, **options)
    for clip in clips:
        parts = restored_parts(criterion.key, mix, mix, mean, clip, ROUNDS, MOMENTS)
        assert (choice.error <= criterion.key_error(*parts, torch.tensor(gains)) + 1e-9).all()
    further = search([criterion.key_error], [criterion.key], mean, transform, overshoot=1, **options)
    assert torch.equal(further.clip, choice.clip)
    at = [gains.index(pytest.approx(gain)) for gain in choice.gain.tolist()]
    assert further.gain.tolist() == pytest.approx([gains[min(index + 1, 3)] for index in at])
    assert (further.error >= choice.error).all()
    parts = restored_parts(criterion.key, mix, mix, mean, 0.96, 0)
    torch.testing.assert_close(choice.baseline, criterion.key_error(*parts, torch.ones(1))[0])


def test_search_takes_the_mean_of_all_sequences() -> None:
    """The gain that is best for one of two sequences is not kept where it costs the other more."""
    eye = torch.eye(D).expand(H, D, D)
    same = Transform("eye", eye, eye)
    rows = [torch.randn(H, T, D), torch.randn(H, T, D)]

    def error(best: float, weight: float) -> Error:
        def of(middle: torch.Tensor, step: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
            return weight * (gains - best).square()[:, None].expand(-1, H)

        return of

    options = {"published": same, "published_clip": 0.96, "gains": (1.0, 1.1, 1.2)}
    first, second = error(1.0, 1.0), error(1.2, 3.0)
    alone = search([first], rows[:1], torch.zeros(H, D), same, **options)
    both = search([first, second], rows, torch.zeros(H, D), same, **options)
    assert alone.gain.tolist() == [1.0] * H
    assert both.gain.tolist() == pytest.approx([1.1] * H)
    assert both.error.tolist() == pytest.approx([(0.01 + 3 * 0.01) / 2] * H)
    assert both.baseline.tolist() == pytest.approx([3 * 0.04 / 2] * H)
