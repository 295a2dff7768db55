"""Least squares with coefficients that are not negative, for a handful of unknowns. Knows nothing of what they mean."""

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
TOLERANCE = 1e-12


def nonnegative_least_squares(matrix: Vector, wanted: Vector) -> Vector:
    """x `[n]` >= 0 that makes |matrix x - wanted| smallest, of matrix `[m, n]` with independent columns, wanted `[m]`.

    Lawson and Hanson's active set method (Solving Least Squares Problems, 1974, chapter 23).
    """
    size = matrix.shape[1]
    x = np.zeros(size)
    free = np.zeros(size, dtype=bool)
    scale = float(np.abs(matrix.T @ wanted).max(initial=0.0))
    for _ in range(3 * size):
        gradient = matrix.T @ (wanted - matrix @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= TOLERANCE * scale:
            break
        free[int(gradient.argmax())] = True
        trial = _solve(matrix, wanted, free)
        while free.any() and trial[free].min() <= 0:
            falling = free & (trial <= 0)
            step = float((x[falling] / (x[falling] - trial[falling])).min())
            x += step * (trial - x)
            free &= x > TOLERANCE
            x[~free] = 0.0
            trial = _solve(matrix, wanted, free)
        x = trial
    return x


def _solve(matrix: Vector, wanted: Vector, free: npt.NDArray[np.bool_]) -> Vector:
    x = np.zeros(matrix.shape[1])
    x[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
    return x
