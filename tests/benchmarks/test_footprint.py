"""Memory and launches that are counted without a GPU: what they grow with."""

from __future__ import annotations

import pytest

from analysis.studies.presets import make_preset
from benchmarks.footprint import Footprint, update_of
from tests.training.conftest import llama

LLAMA = llama(
    vocab_size=512, width=16, inner=24, num_layers=2, num_heads=4, num_kv_heads=2, tied=True
)


def counted(name: str, seeds: int) -> Footprint:
    made = make_preset(name, {"num_seeds": seeds, "num_prompts": 2, "group_size": 2})
    return update_of(made.model_copy(update={"variants": made.variants[:1]}), LLAMA)


@pytest.mark.slow
def test_a_run_more_is_some_logits_more_and_no_launch_and_a_token_more_is_a_launch_more():
    one, two = (counted("smollm2_worked_sums", seeds) for seeds in (1, 2))
    logits = 4 * 2 * 2 * 80 * LLAMA.vocab_size / 1e9
    assert 4 < (two.gigabytes - one.gigabytes) / logits < 24
    assert two.operations == pytest.approx(one.operations, rel=0.02)
    short = counted("smollm2_reward_long", 2)
    assert two.operations > 80 / 6 / 3 * short.operations
    assert two.gigabytes > 80 / 6 / 3 * short.gigabytes
