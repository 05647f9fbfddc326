"""What a quantizer costs the attention of held-out text: the criteria that the search minimizes.

Both look at what attention makes of the error rather than at the error: a key's counts as the divergence of the
softmax (which sees that a least-squares fit shrinks keys, and so flattens every softmax), a value's as it arrives in
the output, weighted by attention and by the output projection.
"""

import torch

from oscar_vllm.calibration.sample import AttentionSample
from oscar_vllm.kernels.write.reference import quantize, transform_rows


class Criterion:
    """The exact attention of one layer's sample, against which restored keys and values are held. float32.

    Keys and values outside the history (sink, recent window) are exact, as they are when served.
    """

    def __init__(self, sample: AttentionSample, output_weight: torch.Tensor | None = None) -> None:
        """``output_weight`` [H, D, D]: Gram matrix of the output projection (None: the identity)."""
        H, G, N, D = sample.query.shape
        T = sample.key.shape[1]
        self.query = sample.query.float().reshape(H, G * N, D) * sample.scale
        self.key, self.value = sample.key.float(), sample.value.float()
        device = self.key.device
        causal = torch.arange(T, device=device) <= sample.position.to(device)[:, None]
        self.causal = causal.repeat(G, 1)  # [G * N, T], as the rows of the query
        self.history = sample.history().repeat(G, 1)
        self.scores = self.query @ self.key.mT
        masked = self.scores.masked_fill(~self.causal, -torch.inf)
        self.log_total = masked.logsumexp(-1)
        self.weights = (masked - self.log_total.unsqueeze(-1)).exp()
        self.read = self.weights * self.history
        eye = torch.eye(D, device=device).expand(H, D, D)
        self.metric = eye if output_weight is None else output_weight.to(device).float()
        output = self.weights @ self.value
        self.output_energy = self._energy(output - output.mean(1, keepdim=True)).clamp_min(1e-30)

    def key_error(self, middle: torch.Tensor, step: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        """Mean KL of the attention weights, nats, with keys restored as ``middle + gain * step``.

        Args:
            middle: [H, T, D]
            step: [H, T, D]
            gains: [C]

        Returns:
            [C, H]
        """
        base = torch.where(self.history, self.query @ middle.mT - self.scores, 0.0)
        slope = torch.where(self.history, self.query @ step.mT, 0.0)
        # KL(S, S') = log sum S exp(error) - sum S error: no second softmax is needed, and rows that are exact drop out.
        mean_base, mean_slope = (self.weights * base).sum(-1), (self.weights * slope).sum(-1)
        log_weights = self.scores.masked_fill(~self.causal, -torch.inf) - self.log_total.unsqueeze(-1)
        errors = []
        for gain in gains.tolist():
            total = torch.add(log_weights, base).add_(slope, alpha=gain).logsumexp(-1)
            errors.append((total - mean_base - gain * mean_slope).clamp_min(0).mean(-1))
        return torch.stack(errors)

    def value_error(self, middle: torch.Tensor, step: torch.Tensor, gains: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the projected output as a share of its variance, with values as in ``key_error``.

        Returns:
            [C, H]
        """
        base, slope = self.read @ (middle - self.value), self.read @ step
        errors = [self._energy(base + gain * slope) for gain in gains.tolist()]
        return torch.stack(errors) / self.output_energy

    def _energy(self, x: torch.Tensor) -> torch.Tensor:
        """[H] mean of x M xᵀ over the rows x [H, rows, D]."""
        return ((x @ self.metric) * x).sum(-1).mean(-1)


def restored_parts(
    rows: torch.Tensor,
    stored: torch.Tensor,
    restore: torch.Tensor,
    mean: torch.Tensor,
    clip: float,
    rounds: int,
    moments: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cache gives back of rows, in two parts: ``middle + gain * step``, since a gain moves no code.

    Args:
        rows: [H, T, D] keys or values.
        stored: [H, D, D] their transform.
        restore: [H, D, D] its inverse.
        mean: [H, D]
        clip: ratio of all heads.
        rounds: least-squares refits.
        moments: what they start from.

    Returns:
        middle, step: [H, T, D] float32, in the space of ``rows``.
    """
    H = rows.shape[0]
    one = torch.ones(H, device=rows.device)
    codes, scale, minimum = quantize(
        transform_rows(rows.transpose(0, 1), stored, mean), one * clip, one, rounds, moments=moments
    )
    scale, minimum = scale.float().T.unsqueeze(-1), minimum.float().T.unsqueeze(-1)  # [H, T, 1]
    step = (codes.transpose(0, 1) - 1.5) * scale
    # The middle is one number for a whole row: what it restores to is a multiple of the sum of the inverse's rows.
    middle = (minimum + 1.5 * scale) * restore.sum(1, keepdim=True) + mean.unsqueeze(1)
    return middle, step @ restore
