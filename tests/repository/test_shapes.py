"""The annotated shapes of the two lowest floors are true, checked at run time.

jaxtyping's import hook has to be in place before the package is imported: hence the child.
"""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import torch
from jaxtyping import TypeCheckError, install_import_hook

with install_import_hook(["analysis.kl", "analysis.objectives"], "beartype.beartype"):
    from analysis.kl import divergences, enumeration, estimators, importance, surrogates
    from analysis.objectives import advantages, losses, preference

logits, ref_logits, old_logits = torch.randn(3, 2, 4, 7)
logp, ref_logp, old_logp = -torch.rand(3, 2, 4)
mask = torch.ones(2, 4, dtype=torch.bool)
for function in (divergences.reverse_kl, divergences.forward_kl, divergences.chi_square):
    assert function(logits, ref_logits).shape == (2, 4)
assert divergences.entropy(logits).shape == (2, 4)
for name in surrogates.ESTIMATORS:
    assert surrogates.ESTIMATORS[name](logp, ref_logp).shape == (2, 4)
    for weighting in surrogates.WEIGHTINGS:
        sampled = {} if weighting == "none" else {"old_logp": old_logp}
        loss = surrogates.kl_loss(
            logp, ref_logp, **sampled, estimator=name, weighting=weighting, mask=mask
        )
        assert loss.shape == (2, 4)
    surrogates.kl_penalty(logp, ref_logp, estimator=name, mask=mask)
    surrogates.gradient_coefficient(logp, ref_logp, estimator=name)
    enumeration.gradient_moments(logits, ref_logits, old_logits, estimator=name)
for level in importance.RATIO_LEVELS:
    importance.importance_ratio(logp, old_logp, mask, level=level)
assert importance.effective_sample_size(logp, old_logp, mask).shape == (2,)
rewards = torch.randn(3, 5)
advantages.group_normalise(rewards)
advantages.group_centre(rewards)
advantages.leave_one_out(rewards)
for kind in losses.KINDS:
    losses.policy_loss(logp, old_logp=old_logp, advantages=torch.randn(2), mask=mask, kind=kind)
preference.dpo_loss(logp, ref_logp, logp, ref_logp)

try:  # the hook is really in place: a shape that the annotation forbids is caught by it
    divergences.entropy(torch.tensor([1, 2, 3]))
except TypeCheckError:
    print("checked")
"""


def test_annotated_shapes_hold():
    child = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.strip() == "checked"
