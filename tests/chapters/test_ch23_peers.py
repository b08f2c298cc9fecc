"""What the page says of verl's and TRL's sums over the top k, against their own functions."""

from __future__ import annotations

import pytest
import torch

from kl_term.kl.top_k import support_divergence, top_k_tokens
from tests.released import functions_of

pytestmark = pytest.mark.peers
EXACT = {"rtol": 0, "atol": 1e-5}  # verl computes in float32


@pytest.fixture
def at_top():
    """Log-probs [4, 8] of student and teacher at the teacher's likeliest tokens."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = 2 * torch.randn(2, 4, 50, generator=generator)
    student[0] = 1.3 * teacher[0]  # sharper than the teacher: the plain forward sum is negative
    tokens = top_k_tokens(teacher, 8)
    return [x.log_softmax(-1).gather(-1, tokens) for x in (student, teacher)]


def test_verl_has_the_plain_forward_sum_and_one_line_corrects_it(at_top):
    (theirs,) = functions_of("verl", "verl/trainer/distillation/fsdp/losses.py", "kl_divergence")
    logp, ref_logp = at_top
    value = theirs(log_q=logp, log_p=ref_logp)
    how = {"direction": "forward"}
    plain = support_divergence(logp, ref_logp, correction="none", **how)
    torch.testing.assert_close(value, plain, **EXACT)
    assert (value < 0).any()  # where the clamp acts
    kld, p = ref_logp.exp() * (ref_logp - logp), ref_logp.exp()
    patched = (kld - p + logp.exp()).sum(dim=-1)
    corrected = support_divergence(logp, ref_logp, correction="unnormalised", **how)
    torch.testing.assert_close(patched, corrected, **EXACT)


@pytest.mark.parametrize(("beta", "direction"), [(0.0, "forward"), (1.0, "reverse")])
def test_trl_has_a_tail(at_top, beta, direction):
    file = "trl/experimental/server_distillation/server_distillation_trainer.py"
    functional = torch.nn.functional
    tail, jsd = functions_of("trl", file, "_add_tail_bucket", "_jsd_divergence", F=functional)
    valid = torch.ones_like(at_top[0], dtype=torch.bool)
    (student, mask), (teacher, _) = (tail(x, valid) for x in at_top)
    value = jsd(student, teacher, beta, mask).sum(-1)
    expected = support_divergence(*at_top, direction=direction, correction="tail")
    torch.testing.assert_close(value, expected, **EXACT)
    other = support_divergence(*at_top, direction="forward" if beta else "reverse")
    assert (value - other).abs().max() > 1e-2
