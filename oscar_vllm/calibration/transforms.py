"""Transforms of keys and values from their covariances: OSCAR's rotation and the geometric-mean transform.

Sources: OSCAR (arXiv 2605.17757) for ``rotation``; the geometric mean of positive matrices in R. Bhatia, *Positive
Definite Matrices* (2007), chapter 4, for ``geometric_mean_transform``.
"""

import torch

DRIFT_ROUNDS = 2
"""Times that what drifts across the first axis is looked at again; a third changes nothing."""


def hadamard(size: int) -> torch.Tensor:
    """[size, size] float64: the normalized Sylvester-Hadamard matrix (symmetric, orthogonal).

    Raises:
        ValueError: ``size`` is not a power of two.
    """
    _check_power_of_two(size)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    matrix = torch.full((1, 1), size**-0.5, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.kron(step, matrix)
    return matrix


def bit_reversal(size: int) -> torch.Tensor:
    """[size] int64: each index with its log2(size) bits in reverse order. Its own inverse.

    Raises:
        ValueError: ``size`` is not a power of two.
    """
    _check_power_of_two(size)
    order = torch.zeros(1, dtype=torch.int64)
    while order.numel() < size:
        order = torch.cat([2 * order, 2 * order + 1])
    return order


def rotation(covariance: torch.Tensor) -> torch.Tensor:
    """OSCAR's rotation R = U H P of each covariance; rows are rotated as ``x @ R``.

    U holds the eigenvectors by falling eigenvalue, H is the normalized Sylvester-Hadamard matrix, and P puts column i
    of U H at the bit-reversed index of i. Every channel of the rotated rows then has the same energy, the mean
    eigenvalue. A covariance without full rank (or of all zeros) still gives a rotation: the eigenvectors of a repeated
    eigenvalue are any orthonormal basis of its space.

    Args:
        covariance: [..., D, D], symmetric up to rounding, D a power of two; computed in float64.

    Returns:
        [..., D, D] float32, orthogonal within 1e-6.

    Raises:
        ValueError: an entry that is not finite, or D is not a power of two.
    """
    vectors, _ = _eigen(covariance)
    size = covariance.shape[-1]
    matrix = (vectors @ hadamard(size).to(vectors.device))[..., bit_reversal(size).to(vectors.device)]
    # One Newton step towards the nearest orthogonal matrix removes what rounding eigh left; the cast then rounds once.
    matrix = 1.5 * matrix - 0.5 * matrix @ (matrix.mT @ matrix)
    return matrix.float()


def geometric_mean_transform(
    stored_covariance: torch.Tensor,
    weight: torch.Tensor,
    axes: torch.Tensor | None = None,
    *,
    drift: torch.Tensor | None = None,
    ridge: float = 1e-2,
    max_condition: float = 32.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The transform that minimizes the expected error of rows quantized with one step a row.

    Rows x with covariance C are stored as ``x @ stored``, and the error of a restored row counts as e W eᵀ. The step
    follows the spread of the stored row, so the expected error is proportional to tr(T⁻ᵀ W T⁻¹) · tr(T C Tᵀ) with
    stored = Tᵀ H. It is least where TᵀT = M with M C M = W, that is M = C⁻¹ # W, the geometric mean, which leaves
    the axes of T free. They are the eigenvectors of ``axes`` in the space of T, and H spreads each over all channels.
    That matters because the levels of a row lie symmetrically: a row along one axis becomes a row of two values, +a and
    -a, which two bits hold exactly. So the axes are best those of the rows that attention reads most: for values the
    covariance of the attention output. (SmolLM2-135M, layer 8: the output error falls to a twentieth.)

    One axis costs nothing at all: H spreads the first evenly with one sign, so that what a row has along it is the same
    in every channel, and the row's minimum holds it in 16 bits. ``drift`` says which direction needs that most; what
    drifts across that direction is spread like the rest of the rows, and counts to C.

    For keys C is the centered key covariance and W that of the queries, and a query is read as ``q @ read``
    (``key = stored, query = read``). For values C is the centered value covariance and W the output weights' Gram
    matrix (or I), and an output is mapped back by ``readᵀ`` (``value = stored, output = read^T``).

    Args:
        stored_covariance: [..., D, D] C, computed in float64, D a power of two.
        weight: [..., D, D] W, computed in float64; its scale does not matter.
        axes: [..., D, D] covariance whose eigenvectors, in the space of T, are spread evenly; None: that of the rows.
        drift: [..., N, D] what rows may have on top of those that C was measured on, or None. The direction that most
            of it lies in, in the space of T, becomes the first axis.
        ridge: added to both, in units of their mean eigenvalue. It alone bounds the condition number of the result by
            sqrt((D + ridge) / ridge).
        max_condition: further bound, by raising the smallest eigenvalues of M: BF16 windows and queries live in the
            same space, and lose bits to a bad condition.

    Returns:
        (stored, read), [..., D, D] float32 each, with ``stored @ read^T = I`` within 1e-5. Stored rows keep the mean
        energy of x.

    Raises:
        ValueError: an entry that is not finite, D is not a power of two, or ridge is not positive.
    """
    if not (ridge > 0 and max_condition >= 1):
        raise ValueError(f"ridge must be positive and max_condition at least 1, not {ridge} and {max_condition}.")
    weight = _regularize(weight, ridge)
    axes = None if axes is None else _regularize(axes, ridge)
    stored = _balance(_regularize(stored_covariance, ridge), weight, axes, drift, max_condition)
    if drift is not None:
        for _ in range(DRIFT_ROUNDS):
            rows = drift.double() @ stored
            rest = (rows - rows.mean(-1, keepdim=True)) @ torch.linalg.inv(stored)
            spread = stored_covariance.double() + rest.mT @ rest / rest.shape[-2]
            stored = _balance(_regularize(spread, ridge), weight, axes, drift, max_condition)
    stored = stored.float()
    # Inverted after the cast, so that the rounding of the one is undone by the other.
    read = torch.linalg.inv(stored.double()).mT
    return stored, read.float()


def _balance(
    covariance: torch.Tensor,
    weight: torch.Tensor,
    axes: torch.Tensor | None,
    drift: torch.Tensor | None,
    max_condition: float,
) -> torch.Tensor:
    """[..., D, D] float64 the transform of rows whose covariance is just ``covariance``."""
    vectors, values = _eigen(_inverse_geometric_mean(covariance, weight))
    values = values.clamp_min(values[..., :1] / max_condition**2)
    root = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT
    spread = root @ (covariance if axes is None else axes) @ root
    turn = _eigen(spread)[0] if drift is None else _axes_behind(_main_direction(drift.double() @ root), spread)
    # Keep the trace of the covariance, so that stored numbers are as large as x's.
    scale = (_trace(covariance) / _trace(root @ covariance @ root)).sqrt()[..., None, None]
    return scale * root @ turn @ hadamard(covariance.shape[-1]).to(root.device)


def _inverse_geometric_mean(covariance: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """M = C⁻¹ # W = C^-1/2 (C^1/2 W C^1/2)^1/2 C^-1/2, the positive solution of M C M = W."""
    vectors, values = _eigen(covariance)
    root = (vectors * values.sqrt().unsqueeze(-2)) @ vectors.mT
    inverse_root = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT
    vectors, values = _eigen(root @ weight @ root)
    middle = (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)) @ vectors.mT
    return inverse_root @ middle @ inverse_root


def _main_direction(rows: torch.Tensor) -> torch.Tensor:
    """[..., D] the unit vector that most of the energy of rows [..., N, D] lies along."""
    return _eigen(rows.mT @ rows)[0][..., 0]


def _axes_behind(first: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """[..., D, D] orthogonal: ``first`` [..., D], then the eigenvectors of what the covariance is across it."""
    size = covariance.shape[-1]
    eye = torch.eye(size, dtype=covariance.dtype, device=covariance.device)
    across = eye - first.unsqueeze(-1) * first.unsqueeze(-2)
    # Along the first, more than anything else has, so that it comes first among the eigenvectors and is exact.
    most = 1 + 2 * _trace(covariance)[..., None, None]
    return _eigen(across @ covariance @ across + most * (eye - across))[0]


def _regularize(matrix: torch.Tensor, ridge: float) -> torch.Tensor:
    """C / mean eigenvalue + ridge I in float64, so that scales do not matter; a matrix of zeros becomes I."""
    _check_finite(matrix)
    matrix = matrix.double()
    size = matrix.shape[-1]
    eye = torch.eye(size, dtype=torch.float64, device=matrix.device)
    mean = (_trace(matrix) / size)[..., None, None]
    return torch.where(mean > 0, matrix / torch.where(mean > 0, mean, 1.0), eye) + ridge * eye


def _eigen(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvectors (columns) and eigenvalues by falling eigenvalue, in float64."""
    _check_finite(matrix)
    matrix = matrix.double()
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    values, vectors = values.flip(-1), vectors.flip(-1)
    # The sign of an eigenvector is an accident of the library: fix it, so that a recipe can be made again.
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0), values


def _trace(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def _check_finite(matrix: torch.Tensor) -> None:
    if not torch.isfinite(matrix).all():
        raise ValueError("A covariance holds a number that is not finite; look for NaN in the model's activations.")


def _check_power_of_two(size: int) -> None:
    if size < 1 or size & (size - 1):
        raise ValueError(f"{size} is not a power of two, which a Hadamard rotation needs.")
