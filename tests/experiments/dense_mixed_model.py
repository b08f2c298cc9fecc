"""The hierarchical fit by other algebra: one covariance matrix of all runs, searched directly."""

from __future__ import annotations

import numpy as np
from scipy.linalg import solve_triangular
from scipy.optimize import minimize

#: Variances of start, seed, difference and rest from which the search begins.
FIRST = (2.5e-3, 4e-4, 9e-4, 1e-4)


def coefficients(
    x: np.ndarray, y: np.ndarray, one: np.ndarray, seed: np.ndarray, starts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients [6] of both quadratics and their covariance.

    Args:
        x: [N], what the curves are over, centred.
        y: [N], what they give.
        one: [N], 1 for the first variant, 0 for the other.
        seed: [N]; a run has the start of its seed modulo ``starts``.
    """
    design = np.column_stack([w * x**power for w in (one, 1 - one) for power in range(3)])
    same_start = np.equal.outer(seed % starts, seed % starts).astype(float)
    sign = one - 0.5
    parts = [
        same_start,
        np.equal.outer(seed, seed).astype(float),
        same_start * np.outer(sign, sign),
        np.eye(len(x)),
    ]
    basis, _ = np.linalg.qr(design, mode="complete")
    contrasts = basis[:, design.shape[1] :]  # blind to the curves: their likelihood is REML's
    seen = [contrasts.T @ part @ contrasts for part in parts]
    centred = contrasts.T @ y

    def criterion(logs: np.ndarray) -> float:
        """Minus the log-density of a normal, up to a constant."""
        covariance = sum(np.exp(log) * part for log, part in zip(logs, seen, strict=True))
        root = np.linalg.cholesky(covariance)
        scaled = solve_triangular(root, centred, lower=True)
        return np.log(np.diag(root)).sum() + scaled @ scaled / 2

    options = {"xatol": 1e-3, "fatol": 1e-6, "maxiter": 800, "maxfev": 800}
    bounds = [(-18.0, 0.0)] * len(parts)
    first = np.log(FIRST)
    logs = minimize(criterion, first, method="Nelder-Mead", options=options, bounds=bounds).x
    whole = sum(np.exp(log) * part for log, part in zip(logs, parts, strict=True))
    precision = np.linalg.inv(whole)
    spread = np.linalg.inv(design.T @ precision @ design)
    return spread @ design.T @ precision @ y, spread
