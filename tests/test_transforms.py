"""Transforms against their definitions: eigen order, equal channel energies, geometric mean, conditioning."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_vllm.calibration.transforms import bit_reversal, geometric_mean_transform, hadamard, rotation


def spd(*shape: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """Random covariances [..., D, D] whose eigenvalues span 10**spread."""
    generator = torch.Generator().manual_seed(seed)
    D = shape[-1]
    basis = torch.linalg.qr(torch.randn(*shape, D, generator=generator, dtype=torch.float64))[0]
    values = 10 ** (spread * torch.rand(*shape, generator=generator, dtype=torch.float64))
    covariance: torch.Tensor = (basis * values.unsqueeze(-2)) @ basis.mT
    return covariance


def orthogonality_error(matrix: torch.Tensor) -> float:
    eye = torch.eye(matrix.shape[-1], dtype=torch.float64)
    matrix = matrix.double()
    return max((matrix.mT @ matrix - eye).abs().max().item(), (matrix @ matrix.mT - eye).abs().max().item())


@pytest.mark.parametrize("size", [1, 2, 8, 64, 128])
def test_hadamard_is_symmetric_and_orthogonal(size: int) -> None:
    matrix = hadamard(size)
    assert torch.equal(matrix, matrix.mT)
    torch.testing.assert_close(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5))


def test_hadamard_of_four_in_sylvester_order() -> None:
    expected = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], dtype=torch.float64) / 2
    torch.testing.assert_close(hadamard(4), expected)


def test_bit_reversal() -> None:
    assert bit_reversal(8).tolist() == [0, 4, 2, 6, 1, 5, 3, 7]
    for bits in range(8):
        expected = [int(f"{i:0{bits}b}"[::-1], 2) if bits else 0 for i in range(1 << bits)]
        assert bit_reversal(1 << bits).tolist() == expected


@pytest.mark.parametrize("size", [0, 3, 48, 96])
def test_other_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"^{size} is not a power of two, which a Hadamard rotation needs.$"):
        hadamard(size)
    with pytest.raises(ValueError, match="not a power of two"):
        bit_reversal(size)


def test_rotation_of_a_known_spectrum() -> None:
    # Energies 3, 9, 1, 5 on the axes: U picks axes 1, 3, 0, 2; column i of U H goes to the bit-reversed index of i.
    covariance = torch.diag(torch.tensor([3.0, 9.0, 1.0, 5.0]))
    rows = torch.tensor([2, 0, 3, 1])  # the place of each axis in the falling order
    mixed = hadamard(4)[rows]
    expected = torch.empty_like(mixed)
    for column in range(4):
        expected[:, [0, 2, 1, 3][column]] = mixed[:, column]
    torch.testing.assert_close(rotation(covariance), expected.float())


@pytest.mark.parametrize("size", [2, 64, 128])
def test_rotation_gives_every_channel_the_mean_energy(size: int) -> None:
    covariance = spd(2, 3, size)
    R = rotation(covariance)
    assert R.shape == (2, 3, size, size)
    assert R.dtype == torch.float32
    assert orthogonality_error(R) < 1e-6
    energy = (R.double().mT @ covariance @ R.double()).diagonal(dim1=-2, dim2=-1)
    mean = covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    torch.testing.assert_close(energy, mean.expand_as(energy), rtol=1e-5, atol=0)


def test_rotation_of_a_batch_is_that_of_each() -> None:
    covariance = spd(2, 3, 16)
    torch.testing.assert_close(rotation(covariance)[1, 2], rotation(covariance[1, 2]))
    assert torch.equal(rotation(covariance), rotation(covariance))


@pytest.mark.parametrize("rank", [0, 1, 5, 63])
def test_rotation_of_a_rank_deficient_covariance(rank: int) -> None:
    rows = torch.randn(rank, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    R = rotation(rows.mT @ rows)
    assert orthogonality_error(R) < 1e-6
    if rank:
        energy = (rows @ R.double()).square().sum(0)
        torch.testing.assert_close(energy, energy.mean().expand(64), rtol=1e-4, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rotation_does_not_depend_on_the_scale(scale: float) -> None:
    torch.testing.assert_close(rotation(spd(16) * scale), rotation(spd(16)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_covariances_that_are_not_finite_are_refused(value: float) -> None:
    covariance = spd(4)
    covariance[1, 2] = value
    for transform in (
        rotation,
        lambda c: geometric_mean_transform(c, spd(4)),
        lambda c: geometric_mean_transform(spd(4), c),
    ):
        with pytest.raises(ValueError, match=r"^A covariance holds a number that is not finite; look for NaN"):
            transform(covariance)


def balance(covariance: torch.Tensor, weight: torch.Tensor, stored: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """tr(T⁻ᵀ W T⁻¹) tr(T C Tᵀ): what the expected error is proportional to (H leaves traces alone)."""
    stored, read = stored.double(), read.double()
    spread = (stored.mT @ covariance @ stored).diagonal(dim1=-2, dim2=-1).sum(-1)
    return spread * (read.mT @ weight @ read).diagonal(dim1=-2, dim2=-1).sum(-1)


def test_geometric_mean_satisfies_its_equations() -> None:
    C, W = spd(3, 16, spread=2.0), spd(3, 16, seed=1, spread=2.0)
    stored, read = geometric_mean_transform(C, W, ridge=1e-9, max_condition=1e6)
    identity = torch.eye(16, dtype=torch.float64).expand(3, 16, 16)
    torch.testing.assert_close(stored.double() @ read.double().mT, identity, rtol=0, atol=1e-5)
    M = stored.double() @ stored.double().mT  # Tᵀ H Hᵀ T
    MCM = M @ C @ M
    ratio = MCM.diagonal(dim1=-2, dim2=-1).sum(-1) / W.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(MCM, ratio[:, None, None] * W, rtol=1e-3, atol=1e-3 * MCM.abs().max().item())
    # The least value of the product over all M: (tr (C^1/2 W C^1/2)^1/2)².
    least = torch.linalg.eigvals(C @ W).real.sqrt().sum(-1).square()
    torch.testing.assert_close(balance(C, W, stored, read), least, rtol=1e-4, atol=0)


def test_geometric_mean_is_no_worse_than_any_other_transform() -> None:
    C, W = spd(16), spd(16, seed=1)
    best = balance(C, W, *geometric_mean_transform(C, W, ridge=1e-9, max_condition=1e6))
    R = rotation(W)
    assert best < balance(C, W, R, R)
    for seed in range(10):
        T = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert best < balance(C, W, T, torch.linalg.inv(T).mT)


def test_geometric_mean_stores_channels_of_equal_energy_and_keeps_the_total() -> None:
    C, W = spd(64), spd(64, seed=1)
    stored, read = geometric_mean_transform(C, W, ridge=1e-6)
    for covariance, matrix in ((C, stored), (W, read)):
        energy = (matrix.double().mT @ covariance @ matrix.double()).diagonal()
        torch.testing.assert_close(energy, energy.mean().expand(64), rtol=1e-2, atol=0)
    torch.testing.assert_close((stored.double().mT @ C @ stored.double()).trace(), C.trace(), rtol=1e-3, atol=0)


def test_geometric_mean_spreads_the_given_axes() -> None:
    """A row along an axis is stored as a row of one magnitude, which two bits hold exactly; the metric stays."""
    C, W, A = spd(16), spd(16, seed=1), spd(16, seed=2)
    stored, read = (x.double() for x in geometric_mean_transform(C, W, A, ridge=1e-9))
    plain = geometric_mean_transform(C, W, ridge=1e-9)[0].double()
    torch.testing.assert_close(stored @ stored.mT, plain @ plain.mT, rtol=1e-4, atol=1e-6)
    axes = hadamard(16) @ read.mT  # what is stored as a row of the Hadamard matrix
    spread = stored.mT @ A @ stored
    energy = hadamard(16) @ spread @ hadamard(16)
    torch.testing.assert_close(energy, torch.diag(energy.diagonal()), rtol=0, atol=1e-5 * energy.abs().max().item())
    rows = axes @ stored
    torch.testing.assert_close(rows.abs(), rows.abs().mean(-1, keepdim=True).expand(16, 16), rtol=1e-5, atol=1e-7)


def test_geometric_mean_of_equal_covariances_up_to_inversion_is_a_rotation() -> None:
    stored, read = geometric_mean_transform(torch.eye(32), 7 * torch.eye(32))
    assert orthogonality_error(stored) < 1e-6
    torch.testing.assert_close(stored, read)


@pytest.mark.parametrize("ridge", [1e-2, 1e-3])
@pytest.mark.parametrize("ranks", [(0, 0), (0, 64), (1, 1), (64, 1), (5, 3)], ids=str)
def test_condition_number_is_bounded(ranks: tuple[int, int], ridge: float) -> None:
    x, y = (torch.randn(rank, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) for rank in ranks)
    for bound in (1e9, 32.0, 4.0):
        stored, read = geometric_mean_transform(x.mT @ x, 1e6 * y.mT @ y, ridge=ridge, max_condition=bound)
        assert torch.linalg.cond(stored.double()) <= min(bound, ((64 + ridge) / ridge) ** 0.5) * (1 + 1e-4)
        error = stored.double() @ read.double().mT - torch.eye(64, dtype=torch.float64)
        assert error.abs().max() < 1e-5


def test_geometric_mean_refuses_senseless_bounds() -> None:
    with pytest.raises(ValueError, match=r"^ridge must be positive and max_condition at least 1, not 0.0 and 32.0.$"):
        geometric_mean_transform(spd(4), spd(4), ridge=0.0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.floats(0, 12), bits=st.integers(0, 6))
def test_any_spectrum_gives_a_rotation(seed: int, spread: float, bits: int) -> None:
    assert orthogonality_error(rotation(spd(1 << bits, seed=seed, spread=spread))) < 1e-6
