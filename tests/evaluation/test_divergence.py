import pytest
import torch

from oscar_vllm.evaluation.divergence import Quality, Rows, compare_rows


@pytest.fixture
def logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    reference = 3 * torch.randn(50, 300, generator=generator)
    return (
        reference,
        reference + 0.1 * torch.randn(50, 300, generator=generator),
        torch.randint(300, (50,), generator=generator),
    )


def test_against_the_definition(logits: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    reference, other, targets = logits
    p, q = reference.double().softmax(-1), other.double().softmax(-1)
    rows = compare_rows(reference, other, targets)
    torch.testing.assert_close(rows.kl.double(), (p * (p / q).log()).sum(-1), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(rows.nll.double(), -q[range(50), targets].log(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rows.reference_nll.double(), -p[range(50), targets].log(), rtol=1e-5, atol=1e-6)
    assert rows.agree.tolist() == [float(a == b) for a, b in zip(p.argmax(-1), q.argmax(-1), strict=True)]
    assert 0 < rows.agree.sum() < 50


def test_nothing_lies_between_equal_logits_whatever_their_offset() -> None:
    logits = torch.randn(4, 100)
    rows = compare_rows(logits, logits + 5, torch.zeros(4, dtype=torch.int64))
    assert rows.kl.abs().max() < 1e-6
    assert rows.agree.tolist() == [1, 1, 1, 1]


def test_summary_over_parts_of_unequal_size() -> None:
    def part(kl: list[float]) -> Rows:
        return Rows(torch.tensor(kl), torch.tensor([1.0] * len(kl)), torch.tensor(kl) + 2, torch.full((len(kl),), 2.0))

    quality = Quality.of([part([1.0]), part([2.0, 3.0, 6.0])])
    assert (quality.positions, quality.kl, quality.top1, quality.nll, quality.reference_nll) == (4, 3, 1, 5, 2)
    assert quality.kl_error == pytest.approx((3.5 / 4) ** 0.5)


def test_no_position_is_refused() -> None:
    with pytest.raises(ValueError, match="No position was compared"):
        Quality.of([Rows(*[torch.zeros(0)] * 4)])
