"""Robust regression of times finds non-negative coefficients from noisy samples, or falls back to the guess."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

#: What the guess weighs against one sample that a coefficient explains wholly. It decides only what samples leave open.
_GUESS_WEIGHT = 0.01

#: No coefficient falls below this share of its guess: a time that is lost in noise does not become free.
_LEAST = 1e-3

#: A coefficient counts as measured when its standard error is below this share of it.
_MEASURED = 0.25

#: Scatter is never believed to be less than this: equal samples are repetition, not proof.
_LEAST_SCATTER = 0.05

#: Tukey's biweight: 95 % of least squares' efficiency on normal noise, and no weight beyond 4.7 deviations.
_TUKEY = 4.685

_ROUNDS = 25


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """`values` [k], and whether samples or the guess made each (`measured` [k]). `scatter`: typical relative error."""

    values: Array
    measured: npt.NDArray[np.bool_]
    scatter: float


def fit(design: Callable[[Array], Array], times: Array, weights: Array, guess: Array) -> Fit:
    """Coefficients c such that `design(c) @ c` is about `times` [n], errors counted as shares of the time.

    `design(c)` [n, k] may depend on the coefficients: which of two terms counts where the slower one does. `weights`
    [n] say how much a sample counts, `guess` [k] is positive and stands where the samples say too little. Interference
    only ever makes a transfer slower, so the first rounds minimise absolute errors as shares of the measured time, in
    which a sample ten times too slow weighs like one that is wrong by its own size; later rounds leave it out.
    """
    shares, pull = np.ones(len(guess)), np.full(len(guess), _GUESS_WEIGHT)
    rows, scatter, influence = design(guess) * guess, _LEAST_SCATTER, weights
    for number in range(2 * _ROUNDS):
        expected = np.maximum(rows @ shares, np.finfo(np.float64).tiny)
        if number < _ROUNDS:
            errors = np.abs(times - expected) / times
            influence = weights / np.maximum(errors, 1e-3) / times**2
        else:
            errors = (times - expected) / expected
            scatter = max(_LEAST_SCATTER, 1.4826 * _weighted_median(np.abs(errors), weights))
            near = np.clip(1 - (errors / (_TUKEY * scatter)) ** 2, 0, None) ** 2
            influence = weights * near / expected**2
        pull = _GUESS_WEIGHT / np.maximum(shares, 1) ** 2
        shares = _least_squares(rows, times, influence, pull)
        rows = design(shares * guess) * guess
    curvature = (rows * influence[:, None]).T @ rows + np.diag(pull)
    errors = scatter * np.sqrt(np.diag(np.linalg.inv(curvature)))
    return Fit(shares * guess, errors < _MEASURED * shares, scatter)


def _least_squares(rows: Array, times: Array, influence: Array, pull: Array) -> Array:
    """Shares of the guess, none below the least, drawn to 1 with the weight `pull` [k]."""
    shares, free = np.ones(rows.shape[1]), np.ones(rows.shape[1], np.bool_)
    while free.any():
        left = times - rows[:, ~free] @ shares[~free]
        part = rows[:, free]
        curvature = (part * influence[:, None]).T @ part + np.diag(pull[free])
        shares[free] = np.linalg.solve(curvature, part.T @ (influence * left) + pull[free])
        worst = np.flatnonzero(free)[np.argmin(shares[free])]
        if shares[worst] >= _LEAST:
            break
        shares[worst], free[worst] = _LEAST, False
    return shares


def _weighted_median(values: Array, weights: Array) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])
