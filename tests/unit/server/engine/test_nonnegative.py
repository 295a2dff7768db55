"""The conditions that make a point the solution (Karush, Kuhn, Tucker), on problems with active and inactive bounds."""

import numpy as np
import pytest

from server.engine.nonnegative import nonnegative_least_squares


@pytest.mark.parametrize("seed", range(40))
def test_no_nonnegative_point_is_nearer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rng.integers(8, 30), rng.integers(1, 9)))
    wanted = rng.normal(size=len(matrix))
    x = nonnegative_least_squares(matrix, wanted)
    gradient = matrix.T @ (matrix @ x - wanted)
    assert (x >= 0).all()
    assert (gradient >= -1e-8).all()
    assert abs(gradient * x).max() < 1e-8


def test_an_exact_solution_is_found() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.uniform(size=(12, 6))
    solution = np.array([0.0, 1.0, 2.0, 0.0, 3.0, 0.5])
    assert nonnegative_least_squares(matrix, matrix @ solution) == pytest.approx(solution, abs=1e-9)


def test_what_only_negative_coefficients_could_explain_is_left() -> None:
    assert nonnegative_least_squares(np.eye(3), -np.ones(3)).tolist() == [0, 0, 0]
