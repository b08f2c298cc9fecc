"""Everything that a diagnosis measures, in one pass over the rollouts."""

from __future__ import annotations

from kl_term.diagnosis import divergence, groups, integrity, lags, packed, resets, terms, updates
from kl_term.diagnosis.advantages import measure_advantages
from kl_term.diagnosis.engine import engine_response, measure_engine
from kl_term.diagnosis.schema import Measured, Rollouts, Settings, Tail
from kl_term.diagnosis.statistics import tail_index


def measure(rollouts: Rollouts, settings: Settings | None = None) -> Measured:
    """Measure rollouts; nothing here judges."""
    settings = settings or Settings()
    by_step = updates.kl_by_step(rollouts)
    top_sequences, shares = divergence.sequence_shares(rollouts)
    numbers = {"masked_share": 1 - rollouts.tokens / max(1, rollouts.rows)}
    if rollouts.unscored:
        numbers["unscored_share"] = rollouts.unscored / rollouts.tokens
    completions = int(rollouts.units.completion.max()) + 1
    numbers["repeated_share"] = 1 - completions / rollouts.sequences
    numbers |= lags.measure_lags(rollouts, settings)
    numbers |= lags.rescored_steps(rollouts)
    numbers |= divergence.coefficient_gap(rollouts)
    if rollouts.entropy is not None:
        numbers["entropy"] = float(rollouts.entropy.mean())
    numbers |= divergence.dead_zones(rollouts)
    numbers |= shares
    numbers |= divergence.off_policy(rollouts, settings)
    numbers |= measure_engine(rollouts)
    numbers |= integrity.alignment(rollouts)
    numbers |= integrity.bases(rollouts)
    numbers |= integrity.constant_ends(rollouts)
    numbers |= integrity.impossible_tokens(rollouts)
    numbers |= integrity.sequence_ends(rollouts)
    numbers |= integrity.masked_when_scored(rollouts)
    numbers |= integrity.clamped_log_ratios(rollouts)
    numbers |= updates.start(rollouts)
    numbers |= updates.growth(by_step)
    numbers |= resets.measure_resets(rollouts)
    numbers |= updates.advantage_signs(rollouts)
    numbers |= packed.measure_packed(rollouts)
    numbers |= groups.measure_groups(rollouts, settings)
    numbers |= measure_advantages(rollouts, settings)
    numbers |= terms.measure_term(rollouts, settings)
    intervals = updates.update_response(rollouts, settings)
    intervals |= divergence.surprise_gap(rollouts, settings)
    intervals |= engine_response(rollouts, settings)
    intervals |= updates.reward_growth(rollouts, settings)
    intervals |= groups.padding_gap(rollouts, settings)
    for column in ("logp", "ref_logp", "old_logp", "sampler_logp"):
        logp = getattr(rollouts, column)
        if logp is not None and (column != "old_logp" or rollouts.has_old_logp):
            shares = integrity.grid_shares(logp)
            numbers |= {integrity.on_grid(column, grid): shares[grid] for grid in shares}
    return Measured(
        rollouts,
        settings,
        divergence.kl_estimates(rollouts, settings),
        _tails(rollouts),
        divergence.identities(rollouts, settings),
        top_sequences,
        by_step,
        intervals,
        numbers,
    )


def _tails(rollouts: Rollouts) -> list[Tail]:
    found = [tail_index("reference/policy", rollouts.ref_logp - rollouts.logp)]
    weight = rollouts.logp - rollouts.behaviour_logp
    if weight.any():
        found.append(tail_index("policy/sampler", weight))
    return found
