"""The choices that make a KL term, each with its names: the one list of them."""

from __future__ import annotations

from typing import Literal, get_args

#: The estimators with a value, and every choice: :mod:`kl_term.kl.estimators` has their table.
Value = Literal["k1", "k2", "k3", "k3_clip", "k4"]
Estimator = Literal["none", Value, "minimax01", "exact", "forward", "cross_entropy"]
Placement = Literal["loss", "reward"]
Level = Literal["token", "sequence"]
Weighting = Literal["none", "attached", "detached"]
Ratio = Literal["token", "prefix", "sequence", "geometric"]
Credit = Literal["to_go", "immediate", "whole"]
Direction = Literal["reverse", "forward"]
#: Whose likeliest tokens a sum over the top k runs over, and what makes a divergence of it.
Support = Literal["reference", "policy"]
Correction = Literal["none", "unnormalised", "tail", "renormalised"]
#: A weight of the control variate that is no number, but what earlier batches fit.
Fitted = Literal["fitted"]

VALUES: tuple[Value, ...] = get_args(Value)
#: Those that sum over the vocabulary, and those that read the sampled token alone.
VOCABULARY_NAMES: tuple[Estimator, ...] = ("exact", "forward")
TOKEN_NAMES: tuple[Estimator, ...] = (*VALUES, "minimax01")
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
LEVELS: tuple[Level, ...] = get_args(Level)
WEIGHTINGS: tuple[Weighting, ...] = get_args(Weighting)
RATIO_LEVELS: tuple[Ratio, ...] = get_args(Ratio)
CREDITS: tuple[Credit, ...] = get_args(Credit)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
SUPPORTS: tuple[Support, ...] = get_args(Support)
CORRECTIONS: tuple[Correction, ...] = get_args(Correction)
#: Credits that a token can be given: its own, or its own and all that follow.
TOKEN_CREDITS: tuple[Credit, ...] = ("immediate", "to_go")
