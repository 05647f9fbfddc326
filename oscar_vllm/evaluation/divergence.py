"""How far next-token distributions are from a reference's, position by position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch


class Rows(NamedTuple):
    """Figures of n positions, each [n] float32 on the CPU."""

    kl: torch.Tensor
    """KL(reference || other), nats."""
    agree: torch.Tensor
    """1 where both have the same most likely token, else 0."""
    nll: torch.Tensor
    """Negative log-likelihood of the text's next token under the other, nats."""
    reference_nll: torch.Tensor


def compare_rows(reference: torch.Tensor, other: torch.Tensor, targets: torch.Tensor) -> Rows:
    """Compare logits over the whole vocabulary, in float32 on the device of ``other``.

    Args:
        reference: [n, V] logits of any float dtype.
        other: [n, V].
        targets: [n] int64, the token that follows in the text.
    """
    log_p = reference.to(other.device).float().log_softmax(-1)
    log_q = other.float().log_softmax(-1)
    targets = targets.to(other.device)[:, None]
    rows = (
        # Summed in float64: a small KL is a small difference of large sums.
        (log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64),
        log_p.argmax(-1) == log_q.argmax(-1),
        -log_q.gather(-1, targets)[:, 0],
        -log_p.gather(-1, targets)[:, 0],
    )
    return Rows(*(row.float().cpu() for row in rows))


@dataclass(frozen=True)
class Quality:
    """Means over all compared positions."""

    positions: int
    kl: float
    """Mean KL(reference || method), nats."""
    kl_error: float
    """Standard error of that mean, positions taken as independent."""
    kl_p99: float
    """99th percentile of the positions' KL."""
    top1: float
    """Share of positions with the same most likely token."""
    nll: float
    """Mean negative log-likelihood of the text under the method, nats."""
    reference_nll: float

    @classmethod
    def of(cls, parts: Sequence[Rows]) -> Self:
        """The summary of all parts.

        Raises:
            ValueError: no position at all.
        """
        kl, agree, nll, reference_nll = (torch.cat(columns).double() for columns in zip(*parts, strict=True))
        if kl.numel() == 0:
            raise ValueError("No position was compared; give longer texts or a smaller skip.")
        return cls(
            positions=kl.numel(),
            kl=float(kl.mean()),
            kl_error=float(kl.std(correction=0) / kl.numel() ** 0.5),
            kl_p99=float(kl.quantile(0.99)),
            top1=float(agree.mean()),
            nll=float(nll.mean()),
            reference_nll=float(reference_nll.mean()),
        )
