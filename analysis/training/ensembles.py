r"""Several reward models: what a run is rewarded with, and where they disagree.

With scores :math:`R_1, \dots, R_k` of one answer, their mean :math:`\bar R` and

.. math:: s^2 = \frac1{k - 1} \sum_j (R_j - \bar R)^2

the *spread* :math:`s`, a run is rewarded with

.. math:: R_1 \;(\text{first}), \quad \bar R \;(\text{mean}), \quad
    \min_j R_j \;(\text{worst}), \quad \bar R - 2 s \;(\text{penalised}).

Mean and worst are those of Coste et al. (2310.02743) and Eisenstein et al. (2312.09244); the first
subtract the variance where ``penalised`` subtracts the standard deviation, so that its weight has
no unit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from analysis.records.config import Run, RunConfig
from analysis.records.variants import PENALTY, Ensemble, refuse_members
from analysis.training.environment import Environment, Scores
from analysis.training.metrics import mean_spread
from analysis.training.population import Groups, Rows

#: Of the start's answers, whose spread ``beyond`` lies beyond.
QUANTILE = 0.95


def spread(members: Tensor) -> Tensor:
    """[...]: standard deviation of scores [..., k], over k - 1.

    Summed member by member, so that a run's does not depend on its company.
    """
    scores = members.unbind(dim=-1)
    mean = sum(scores) / len(scores)
    squares = sum((score - mean).square() for score in scores)
    return (squares / (len(scores) - 1)).sqrt()


def combined(ensemble: Ensemble, members: Tensor) -> Tensor:
    """[...]: the reward of an ensemble from the scores [..., k] of its members."""
    scores = members.unbind(dim=-1)
    if ensemble == "first":
        return scores[0]
    if ensemble == "worst":
        return members.amin(dim=-1)
    mean = sum(scores) / len(scores)
    return mean if ensemble == "mean" else mean - PENALTY * spread(members)


def bounds(spreads: Tensor) -> Tensor:
    """[K, 2]: mean of the spreads [K, B] of each start's answers, and their 95th percentile."""
    place = int(QUANTILE * (spreads.shape[1] - 1))
    upper = spreads.sort(dim=1).values[:, place]
    return torch.stack([spreads.mean(dim=1), upper], dim=1)


class Ensembles:
    """Who is rewarded with which members, and on which answers its KL term acts.

    Args:
        starts: [M], the start of each run.

    Raises:
        ValueError: a variant reads several reward models, and there are none or one.
    """

    def __init__(
        self, config: RunConfig, runs: Sequence[Run], environment: Environment, starts: Tensor
    ) -> None:
        variants = [run.variant for run in runs]
        for variant in variants:
            refuse_members(variant, config.members)
        spreads = environment.start_spreads
        if config.members > 1 and spreads is None:
            raise ValueError("there are several reward models: give an environment start_spreads")
        device = environment.start.device
        self.rewards: Groups[Ensemble | None] = Groups([v.ensemble for v in variants], device)
        self.places: Groups[str] = Groups([v.kl_on for v in variants], device)
        #: Does a KL term act on some answers only?
        self.gated = any(variant.kl_on != "all" for variant in variants)
        #: [M, 2], of the start of each run; None without several members.
        self.bounds = None if spreads is None else spreads[starts]

    def of_runs(self, scores: Scores) -> Scores:
        """The scores of several members, rewards as each run's variant says, and their spread."""
        members = scores.members

        def of_group(ensemble: Ensemble | None, rows: Rows) -> Tensor:
            return scores.rewards[rows] if ensemble is None else combined(ensemble, members[rows])

        apart = spread(members)
        beyond = (apart > self.bounds[:, 1].view(-1, 1, 1)).to(apart.dtype)
        rewards = self.rewards.map(of_group)
        return scores._replace(rewards=rewards, spread=apart, beyond=beyond)

    def acting(self, scores: Scores, done: Tensor) -> Tensor | None:
        """[M, P, G, 1] bool, the answers on which each run's KL term acts; None = all of all.

        Args:
            scores: of :meth:`of_runs`.
            done: [M, P], the finished groups.
        """
        if not self.gated:
            return None
        mean = mean_spread(scores, done)

        def of_group(place: str, rows: Rows) -> Tensor:
            beyond = scores.beyond[rows] > 0
            if place == "beyond":
                return beyond
            if place == "all":
                return torch.ones_like(beyond)
            grown = mean[rows] > self.bounds[rows][:, 0]
            return grown.view(-1, 1, 1).expand_as(beyond)

        return self.places.map(of_group).unsqueeze(-1)
