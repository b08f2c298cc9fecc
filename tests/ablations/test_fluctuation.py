from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.experiments.ablations.summaries import fluctuation


def curves(values: np.ndarray) -> pd.DataFrame:
    rows = {"arm": "a", "beta": 0.1, "seed": 0, "kl_estimator": "k2"}
    return pd.DataFrame({"update": np.arange(len(values)) * 5, "reverse_kl": values, **rows})


def test_a_trend_is_no_fluctuation_and_noise_is_its_relative_spread():
    trend = fluctuation(curves(np.linspace(1.0, 2.0, 400)), ["reverse_kl"])["reverse_kl"].item()
    noise = 2.0 + 0.3 * np.random.default_rng(0).normal(size=4000)
    both = fluctuation(curves(noise), ["reverse_kl"])["reverse_kl"].item()
    assert trend < 2e-3
    assert both == pytest.approx(0.15, rel=0.05)


def test_only_the_last_share_counts():
    values = np.concatenate([np.tile([1.0, 9.0], 50), np.ones(100)])
    assert fluctuation(curves(values), ["reverse_kl"])["reverse_kl"].item() == 0.0
    assert fluctuation(curves(values), ["reverse_kl"], share=1.0)["reverse_kl"].item() > 0.5
