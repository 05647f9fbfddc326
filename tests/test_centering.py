"""The mean of keys as attention weighs them, against attention written out query by query."""

import torch

from oscar_vllm.calibration.centering import ATTENDED_SHARE, attended_key_mean
from oscar_vllm.calibration.criterion import Criterion
from oscar_vllm.calibration.sample import AttentionSample
from oscar_vllm.calibration.transforms import hadamard
from oscar_vllm.kernels.write.reference import quantize, transform_rows

T, H, G, D = 96, 2, 3, 16
SCALE = D**-0.5


def activations(seed: int) -> list[torch.Tensor]:
    """Query [T, H * G, D], key, value [T, H, D] float64."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, heads, D, generator=generator, dtype=torch.float64) for heads in (H * G, H, H)]


def test_keys_count_as_the_history_is_read() -> None:
    plain = activations(0)[1].mean(0)
    samples = [AttentionSample.take(*activations(seed), SCALE) for seed in (1, 2)]
    key, total = torch.zeros(H, D, dtype=torch.float64), torch.zeros(H, 1, dtype=torch.float64)
    for sample in samples:
        history = sample.history()
        for h in range(H):
            for g in range(G):
                for n, position in enumerate(sample.position.tolist()):
                    q = sample.query[h, g, n] * SCALE
                    weights = (sample.key[h, : position + 1] @ q).softmax(0) * history[n, : position + 1]
                    key[h] += weights @ sample.key[h, : position + 1]
                    total[h] += weights.sum()
    given = attended_key_mean(plain, [Criterion(sample) for sample in samples])
    torch.testing.assert_close(given, torch.lerp(plain, key / total, ATTENDED_SHARE), rtol=1e-4, atol=1e-5)


def test_without_samples_the_mean_is_plain() -> None:
    plain = activations(0)[1].mean(0)
    assert torch.equal(attended_key_mean(plain, []), plain)


def test_a_head_that_never_reads_its_history_keeps_the_plain_mean() -> None:
    q, k, v = activations(0)
    k[: T // 16, 1] = 1e3 * q[0, G]  # sinks that take all of head 1's attention
    q[:, G:] = q[0, G]
    plain = k.mean(0)
    given = attended_key_mean(plain, [Criterion(AttentionSample.take(q, k, v, SCALE))])
    torch.testing.assert_close(given[1], plain[1])
    assert (given[0] - plain[0]).abs().max() > 0.01


def test_keys_that_are_read_most_get_the_finest_steps() -> None:
    """Half of the keys lie far off and are read, half are not; a row's step follows its distance from the mean."""
    q, k, v = activations(0)
    read = torch.arange(T) % 2 == 0
    far = torch.nn.functional.normalize(torch.randn(D, generator=torch.Generator().manual_seed(7)).double(), dim=0)
    k += torch.where(read, 12.0, -12.0)[:, None, None] * far
    q += 4 * far
    plain, one = k.mean(0), torch.ones(H)
    attended = attended_key_mean(plain, [Criterion(AttentionSample.take(q, k, v, SCALE))])
    steps = []
    for mean in (attended, plain):
        rows = transform_rows(k.float(), hadamard(D).float().expand(H, D, D), mean.float())
        steps.append(quantize(rows, one, one, 2, moments=True)[1].float()[read].mean(0))
    assert (steps[0] < 0.8 * steps[1]).all()
