"""The KL to another reference than the one that is meant."""

from __future__ import annotations

import pandas as pd
from torch import Tensor

from analysis.evidence.policies import normal_draws
from kl_term.kl.sequences import Sequences, enumerate_sequences, sequence_kl, token_logp


def reference_reward(ref_logits: Tensor, other_logits: Tensor, sequences: Sequences) -> Tensor:
    r"""The reward [N] that a KL to another reference adds, per unit of beta.

    .. math:: \mathrm{KL}(\pi \Vert \mathrm{ref}') = \mathrm{KL}(\pi \Vert \mathrm{ref})
        - \mathbb{E}_{y \sim \pi} \log \frac{\mathrm{ref}'(y)}{\mathrm{ref}(y)}

    Args:
        ref_logits, other_logits: [states, vocab], the reference that is meant, and the other.
    """
    ref_logp, other_logp = (token_logp(x, sequences) for x in (ref_logits, other_logits))
    return (other_logp - ref_logp).sum(-1)


def other_reference_table(
    *, spread: float = 1.2, drift: float = 0.5, seed: int = 0
) -> pd.DataFrame:
    """For each reference that may be scored: the KL that is read at the start, where the policy is
    the reference that is meant, and how far from it the policy ends without any reward (nats an
    answer, both at temperature 1)."""
    sequences = enumerate_sequences(3, 4, eos=2)
    meant, moved = normal_draws((2, sequences.num_states, 3), seed=seed)
    meant, other = spread * meant, spread * meant + drift * moved
    rows = []
    for case, scored, temperature, end in (
        ("both divided by 1.5", meant / 1.5, 1.5, meant),
        ("policy divided by 1.5, reference not", meant, 1.5, meant * 1.5),
        ("policy divided by 0.6, reference not", meant, 0.6, meant * 0.6),
        ("another template", other, 1.0, other),
        ("the adapter as it was loaded, or merged", meant, 1.0, meant),
        ("the base model under a trained adapter", other, 1.0, other),
    ):
        start = sequence_kl(meant / temperature, scored, sequences).item()
        reached = sequence_kl(end, meant, sequences).item()
        assert sequence_kl(end / temperature, scored, sequences).abs() < 1e-12
        rows.append({"case": case, "start": start, "reached": reached})
    return pd.DataFrame(rows)
