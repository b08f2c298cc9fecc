"""Every trainer's row by hand: its coefficient in plain arithmetic, expectations in plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from analysis.chapters import ch14_frameworks as chapter
from analysis.chapters.ch14_frameworks import answers
from analysis.chapters.ch14_frameworks import tables as shown
from analysis.chapters.ch14_frameworks.one_state import TERMS, term_of
from analysis.chapters.ch14_frameworks.prices import expected_price
from analysis.chapters.ch14_frameworks.trainers import OPTIONS, PATHS, Option, Path, registry
from analysis.chapters.ch14_frameworks.trainers.formulas import to_go
from analysis.evidence.policies import moved_logits, normal_draws
from kl_term.audit import audit
from kl_term.audit.states import descends, known_gradients, mean_gradient
from kl_term.kl.enumeration import expected_gradient, relative_error
from kl_term.kl.sequences import enumerate_sequences

EXACT = 1e-12
#: Derivative of a token's term by its log-prob: of the log-ratio to the reference and to the
#: sampler.
COEFFICIENTS: dict[str, Callable[[float, float], float]] = {
    "k1": lambda l, _: 1.0,
    "k2": lambda l, _: l,
    "k3": lambda l, _: 1 - math.exp(-l),
    "abs": lambda l, _: math.copysign(1, l),
    "live k1": lambda l, rho: math.exp(rho) * (l + 1),
    "live k2": lambda l, rho: math.exp(rho) * (l * l / 2 + l),
    "live k3": lambda l, rho: math.exp(rho) * l,
    "held k3": lambda l, rho: math.exp(rho) * (1 - math.exp(-l)),
    "held k2": lambda l, rho: math.exp(rho) * l,
    "at most 2, k3": lambda l, rho: min(math.exp(rho), 2) * (1 - math.exp(-l)),
    "score k1": lambda l, _: l + 1,
    "score k2": lambda l, _: l * l / 2 + l,
    "score k3": lambda l, _: l,
    "exchanged k1": lambda l, _: -1.0,
    "exchanged k2": lambda l, _: l,
    "exchanged k3": lambda l, _: math.exp(l) - 1,
}
VERL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
VERL |= {"abs": "abs"}
SLIME = {
    "k1": "k1",
    "k2": "k2",
    "low_var_kl": "k3",
    "k1, use-unbiased-kl": "live k1",
    "k2, use-unbiased-kl": "live k2",
    "low_var_kl, use-unbiased-kl": "live k3",
}
FLAG = "use_bias_correction_kl"
APPROXIMATED = "k3, use_on_policy_kl_approximation"
#: What each setting's coefficient is, by reading. RPG and prime-rl have tests of their own.
SETTINGS = {
    "TRL": {FLAG: "live k3", "without": "k3"},
    "Liger": {"default": "k3", FLAG: "live k3"},
    "Unsloth": {f"{FLAG}, TRL 1.10 on": "live k3", "older TRL": "k3"},
    "Axolotl": {"default": "k3", FLAG: "live k3"},
    "ms-swift": {
        "default": "k3",
        "rollout_importance_sampling_mode=token_truncate": "at most 2, k3",
    },
    "OpenRLHF": {"k1": "k1", "k2": "k2", "k3": "k3", "k3, unbiased_gradient": "held k2"},
    "slime": SLIME,
    "miles": SLIME,
    "ROLL": {"k3": "k3"},
    "verl": VERL | {"low_var_kl+": "k2"},
    "verl-distillation": VERL,
    "EasyR1": VERL | {"low_var_kl, examples/config.yaml": "k3"},
    "RAGEN": VERL,
    "rLLM": VERL,
    "RLinf-FSDP": {
        "low_var_kl": "exchanged k3",
        "kl": "exchanged k1",
        "mse": "exchanged k2",
        "abs": "abs",
    },
    "RLinf-Megatron": VERL,
    "SkyRL": VERL,
    "torchrl": {"kl_to_ref_coeff": "k3"},
    "torchrl-distillation": {'kl_direction="reverse"': "k3"},
    "torchforge": {"default": "k3"},
    "torchtune": {"GRPOSimpleLoss": "k3"},
    "NeMo-RL": {
        "k1": "score k1",
        "k2": "score k2",
        "k3": "score k3",
        APPROXIMATED: "live k3",
        "k3, to 0.6.0": "k3",
        f"{APPROXIMATED}, to 0.6.0": "held k3",
    },
    "open-instruct": {"0": "k1", "1": "k2", "2": "k3", "3": "live k1"},
    "rlhf-book": {"kl1": "exchanged k1", "kl2": "exchanged k2", "kl3": "exchanged k3"},
    "Tunix": {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"},
    "MaxText": {"through Tunix": "k1", "experimental/rl": "k3"},
    "OAT": {"beta": "k3"},
}
#: What is taken off the advantage: the estimator, whom a token pays for, the group's baseline.
CHARGES = {
    ("TRL", "RLOO"): ("k1", "answer", "others"),
    ("ms-swift", "kl_in_reward, rloo"): ("k1", "answer", "others"),
    ("OpenRLHF", "rloo"): ("k1", "to go", "nobody"),
    ("OpenRLHF", "dr_grpo"): ("k1", "to go", "nobody"),
    ("slime", "k1, reinforce_plus_plus"): ("k1", "to go", "nobody"),
    ("slime", "k1, reinforce_plus_plus_baseline"): ("k1", "own", "nobody"),
    ("miles", "k1, reinforce_plus_plus"): ("k1", "to go", "nobody"),
    ("miles", "k1, reinforce_plus_plus_baseline"): ("k1", "own", "nobody"),
    ("ROLL", "kl"): ("k1", "to go", "nobody"),
    ("ROLL", "mse"): ("k2", "to go", "nobody"),
    ("AReaL", "k1"): ("k1", "to go", "nobody"),
    ("AReaL", "k1, no reference"): ("logp", "to go", "nobody"),
    ("verl", "kl, GRPO before its spread"): ("k1", "answer", "all"),
    ("verl", "kl, rloo"): ("k1", "answer", "others"),
    ("verl", "kl, reinforce_plus_plus"): ("k1", "to go", "nobody"),
    ("verl-distillation", "k3"): ("k3", "own", "nobody"),
    ("verl-distillation", "k1"): ("k1", "own", "nobody"),
    ("EasyR1", "kl, GRPO before its spread"): ("k1", "answer", "all"),
    ("EasyR1", "kl, rloo"): ("k1", "answer", "others"),
    ("EasyR1", "kl, reinforce_plus_plus"): ("k1", "to go", "nobody"),
    ("rLLM", "distillation"): ("k1", "own", "nobody"),
    ("RLinf", "k2, the shipped REINFORCE++"): ("k2", "to go", "nobody"),
    ("RLinf", "kl"): ("k1", "to go", "nobody"),
    ("SkyRL", "k3"): ("k3", "answer", "all"),
    ("SkyRL", "k1"): ("k1", "answer", "all"),
    ("SkyRL", "k3, rloo"): ("k3", "answer", "others"),
    ("SkyRL", "k3, reinforce_plus_plus"): ("k3", "to go", "nobody"),
    ("NeMo-RL", "k3, REINFORCE++"): ("k3", "own", "nobody"),
    ("NeMo-RL", "k1, REINFORCE++"): ("k1", "own", "nobody"),
    ("Tunix", "low_var_kl, PPO"): ("k3", "discounted", "nobody"),
    ("Tunix", "kl, PPO"): ("k1", "discounted", "nobody"),
    ("OAT", "kl_penalty_coef"): ("k1", "to go", "nobody"),
    ("tinker-cookbook", "default"): ("k1", "own", "nobody"),
    ("tinker-cookbook", "kl_discount_factor=1"): ("k1", "to go", "nobody"),
}
BY_HAND = [
    option
    for option in OPTIONS
    if not option.reference_is_sampler and option.framework != "prime-rl"
]
IN_LOSS = [path for path in PATHS if path.placement == "loss"]
IN_REWARD = [path for path in PATHS if path.placement == "reward"]


def named(option: Option) -> str:
    return f"{option.framework} {option.setting}"


def of(framework: str, placement: str = "loss") -> Path:
    (path,) = (p for p in PATHS if (p.framework, p.placement) == (framework, placement))
    return path


@pytest.fixture(scope="module")
def at():
    """Policies whose ratio to the sampler stays below two, that no clamp of a ratio binds."""
    return chapter.states(12, 7, drift=0.5, staleness=0.15, seed=3)


@pytest.fixture(scope="module")
def table(at):
    return chapter.audit(at).set_index(["framework", "setting"])


@pytest.fixture(scope="module")
def tree():
    return answers.tree(
        drift=0.6, staleness=0.2, seed=2, sequences=enumerate_sequences(3, 3, eos=1)
    )


# At one state.


@pytest.mark.parametrize("option", BY_HAND, ids=named)
def test_a_setting_has_the_gradient_that_its_coefficient_has_by_hand(at, option):
    """Sum over the vocabulary in plain loops, the derivative of a softmax written out."""
    coefficient = COEFFICIENTS[SETTINGS[option.framework][option.setting]]
    gradient = mean_gradient(option.loss, at)
    expected = torch.zeros_like(gradient)
    for row, logits in enumerate(zip(*at, strict=True)):
        policy, reference, sampler = (x.softmax(-1).tolist() for x in logits)
        for a, p in enumerate(policy):
            weight = sampler[a] * coefficient(math.log(p / reference[a]), math.log(p / sampler[a]))
            for j, other in enumerate(policy):
                expected[row, j] += weight * ((a == j) - other)
    assert (gradient - expected).abs().max() < EXACT * expected.abs().max()
    assert (gradient + expected).abs().max() > expected.abs().max()


def test_every_setting_is_done_by_hand():
    assert {option.framework for option in BY_HAND} == {*SETTINGS}
    entered = {(path.framework, setting) for path in IN_REWARD for setting in path.settings}
    twins = ("gae", "reinforce", "reinforce_baseline", "group_norm")
    same = {("OpenRLHF", name) for name in twins} | {("SkyRL", "k2")}
    assert entered - same == set(CHARGES)


def test_the_terms_that_settings_turn_out_to_be(at):
    terms = {
        "k1": "k1_loss",
        "k2": "k2_loss",
        "k3": "k3_loss",
        "live k1": "k1_loss_attached",
        "live k2": "k2_loss_attached",
        "live k3": "k1_loss_attached",  # the same mean gradient at one state
        "held k2": "k1_loss_attached",
        "held k3": "k3_loss_detached",
        "score k3": "k2_loss",
    }
    for option in BY_HAND:
        said = SETTINGS[option.framework][option.setting]
        term = term_of(option, at)
        if said in terms:
            expected = expected_gradient(*at, **term.at_one_state)
            assert relative_error(mean_gradient(option.loss, at), expected).max() < 1e-11
            by_hand = next(t for t in TERMS if t.name == terms[said])
            same = expected_gradient(*at, **by_hand.at_one_state)
            assert relative_error(same, expected).max() < 1e-11
        elif said in ("abs", "score k1", "score k2", "exchanged k1", "exchanged k3"):
            assert term is None, option


# Over whole answers and batches of two.


def by_hand(path: Path, setting: str, at: answers.Tree) -> torch.Tensor:
    """The gradient of two answers' mean by loops over batches, tokens and logits."""
    policy, reference, sampler = (
        x.softmax(-1).tolist() for x in (at.logits, at.ref_logits, at.old_logits)
    )
    rows = [
        [(s, a) for s, a, m in zip(*row, strict=True) if m]
        for row in zip(
            at.sequences.states.tolist(),
            at.sequences.tokens.tolist(),
            at.sequences.mask.tolist(),
            strict=True,
        )
    ]
    chances = [math.prod(sampler[s][a] for s, a in row) for row in rows]
    gradient = torch.zeros_like(at.logits)
    for pair in product(range(len(rows)), repeat=2):
        batch = [rows[i] for i in pair]
        weights = _weights(path.divisor, [len(row) for row in batch])
        chance = math.prod(chances[i] for i in pair)
        if path.placement == "reward":
            owed = _owed(CHARGES[path.framework, setting], batch, sampler, reference)
        for i, row in enumerate(batch):
            for t, (s, a) in enumerate(row):
                log_rho = math.log(policy[s][a] / sampler[s][a])
                if path.placement == "reward":
                    slope = owed[i][t] * math.exp(log_rho)
                else:
                    named = SETTINGS[path.framework][setting]
                    slope = COEFFICIENTS[named](math.log(policy[s][a] / reference[s][a]), log_rho)
                for j, other in enumerate(policy[s]):
                    gradient[s, j] += chance * weights[i] * slope * ((a == j) - other)
    return gradient


def _weights(divisor: str, lengths: list[int]) -> list[float]:
    """Of a token of each answer."""
    return {
        "token_mean": [1 / sum(lengths)] * 2,
        "seq_mean_token_mean": [1 / 2 / n for n in lengths],
        "seq_mean_token_sum": [1 / 2] * 2,
        "padded_mean": [1 / 2 / max(lengths)] * 2,
    }[divisor]


def _owed(said, batch, sampler, reference) -> list[list[float]]:
    estimator, pays_for, baseline = said
    values = {
        "k1": lambda l: l,
        "k2": lambda l: l * l / 2,
        "k3": lambda l: math.exp(-l) - 1 + l,
    }
    tokens = [
        [
            math.log(sampler[s][a])
            if estimator == "logp"
            else values[estimator](math.log(sampler[s][a] / reference[s][a]))
            for s, a in row
        ]
        for row in batch
    ]
    totals = [sum(row) for row in tokens]
    less = {"nobody": [0, 0], "others": totals[::-1], "all": [sum(totals) / 2] * 2}[baseline]
    owed = []
    for i, row in enumerate(tokens):
        if pays_for == "answer":
            owed.append([totals[i] - less[i]] * len(row))
        elif pays_for == "own":
            owed.append(row)
        else:
            factor = 0.95 if pays_for == "discounted" else 1.0
            later = [
                sum(factor ** (u - t) * row[u] for u in range(t, len(row))) for t in range(len(row))
            ]
            owed.append(later)
    return owed


def cases(paths: list[Path]) -> list:
    return [
        pytest.param(path, setting, id=f"{path.framework} {setting}")
        for path in paths
        for setting in path.settings
        if path.framework not in ("RPG", "prime-rl")
        and (path.placement == "loss" or (path.framework, setting) in CHARGES)
    ]


@pytest.mark.parametrize(("path", "setting"), cases(IN_REWARD))
def test_a_price_by_hand(tree, path, setting):
    for where in (tree, tree.fresh()):
        gradient = answers.batch_gradient(path, setting, where)
        expected = by_hand(path, setting, where)
        assert (gradient - expected).abs().max() < EXACT * expected.abs().max()
        assert (gradient + expected).abs().max() > expected.abs().max()


@pytest.mark.parametrize(
    "framework", ["Tunix", "torchrl", "verl", "ms-swift", "TRL", "RLinf-FSDP", "miles"]
)
def test_a_divisor_by_hand(tree, framework):
    path = of(framework)
    gradient = answers.batch_gradient(path, path.default, tree)
    expected = by_hand(path, path.default, tree)
    assert (gradient - expected).abs().max() < EXACT * expected.abs().max()


# What it comes to.


def test_twenty_four_code_bases_and_more():
    assert len({path.source.repository for path in PATHS}) >= 24
    for path in PATHS:
        assert len(path.source.date.split("-")) == 3
        assert path.source.date >= "2025-10"
        assert path.divisor in answers.DIVISORS
        assert path.flag


@pytest.mark.parametrize("framework", ["Tunix", "MaxText", "slime", "miles"])
def test_k1_over_a_mean_per_answer_minimises_one_over_the_length_and_knows_no_reference(
    tree, framework
):
    """Finite differences of the mean of 1/|o|, by listing answers."""
    path, fresh = of(framework), tree.fresh()
    gradient = answers.batch_gradient(path, path.default, fresh)
    other = fresh._replace(ref_logits=fresh.ref_logits.flip(-1) * 2)
    assert (answers.batch_gradient(path, path.default, other) - gradient).abs().max() < EXACT

    def mean_inverse(logits):
        logp = logits.log_softmax(-1)
        total = 0.0
        for row in zip(*fresh.sequences[:3], strict=True):
            tokens, states, mask = (x.tolist() for x in row)
            answer = [logp[s, a] for s, a, m in zip(states, tokens, mask, strict=True) if m]
            total += math.exp(sum(answer)) / len(answer)
        return total

    step, slopes = 1e-5, torch.zeros_like(gradient)
    for index in product(*map(range, gradient.shape)):
        moved = torch.zeros_like(gradient)
        moved[index] = step
        up, down = (mean_inverse(fresh.logits + sign * moved) for sign in (1, -1))
        slopes[index] = (up - down) / (2 * step)
    assert (gradient - slopes).abs().max() < 1e-9
    assert (gradient + slopes).abs().max() > 1e-2
    assert answers.over_answers(path, path.default, fresh).name == "1 / length"


def test_no_group_and_no_divisor_turns_k1_charged_to_go_away_from_the_kl_of_answers(tree):
    """OpenRLHF's reward and TRL's RLOO, whatever the group; a divisor by length does."""
    fresh = tree.fresh()
    for size in (2, 3):
        for framework in ("TRL", "OpenRLHF", "verl"):
            path = of(framework, "reward")
            assert answers.over_answers(path, path.default, fresh, size=size).name == "reverse KL"
    divided = answers.over_answers(of("OAT", "reward"), "kl_penalty_coef", fresh)
    assert divided.name == "neither"


def test_without_a_reference_areal_rewards_entropy(tree):
    verdict = answers.over_answers(of("AReaL", "reward"), "k1, no reference", tree.fresh())
    assert verdict.name == "negative entropy"


def test_k3_as_the_price_of_a_token_ascends_the_forward_kl(tree):
    for framework in ("verl-distillation", "NeMo-RL"):
        path = of(framework, "reward")
        verdict = answers.over_answers(path, path.default, tree.fresh())
        assert verdict.name == "reverse - forward, per token"


def test_padding_dilutes_the_kl_of_torchrl(tree):
    """The same tokens beside a longer answer weigh less; the mean over tokens only counts them."""
    short = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0]])
    beside = torch.tensor([[1.0, 0, 0, 0], [1, 1, 1, 1]])
    weight = answers.padded_mean
    assert weight(short)[0, 0] == 0.5
    assert weight(beside)[0, 0] == 0.125
    assert weight(beside).sum() == 0.625


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.default], ids=lambda o: o.framework)
def test_the_whole_audit_says_of_a_default_what_the_row_says(at, option):
    """The tool that a user calls, and the enumeration behind the table."""
    fresh = at._replace(old_logits=at.logits)
    row = descends(mean_gradient(option.loss, fresh), known_gradients(fresh), tolerance=1e-9)
    found = audit(option.loss)
    assert found.minimises["fresh"]["state"] == row.known
    exchanged = [f.code for f in found.findings if f.code == "exchanged"]
    assert bool(exchanged) == (option.framework in ("rlhf-book", "RLinf-FSDP"))


@pytest.mark.parametrize(
    "path", [p for p in PATHS if p.cure], ids=lambda p: f"{p.framework} {p.placement}"
)
def test_one_line_makes_of_a_default_the_reverse_kl(at, tree, path):
    """Fresh samples, at one state and over whole answers, these with a mean over many tokens."""
    if path.placement == "loss":
        (option,) = (o for o in Option.of(path) if o.setting == path.cure)
        fresh = at._replace(old_logits=at.logits)
        found = descends(mean_gradient(option.loss, fresh), known_gradients(fresh), tolerance=1e-9)
        assert found.said == "reverse KL"
    if path.framework == "Tunix" and path.placement == "reward":
        return  # GAE's discount, of which the next test
    by_tokens = replace(path, divisor="token_mean")
    cured, shipped = (
        answers.over_answers(by_tokens, setting, tree.fresh())
        for setting in (path.cure, path.default)
    )
    assert cured.of == "reverse KL" != shipped.of


def test_a_discounted_price_is_no_kl_of_answers_and_an_undiscounted_one_is(tree):
    """Tunix's PPO without its critic, k1: under lambda 0.95, and under 1."""
    path = replace(of("Tunix", "reward"), divisor="token_mean")
    assert answers.over_answers(path, "kl, PPO", tree.fresh()).name == "neither"
    whole = replace(path, formula=lambda logp, ref, mask, **_: to_go(logp - ref, mask))
    assert answers.over_answers(whole, "kl, PPO", tree.fresh()).name == "reverse KL"


def test_whoever_has_no_reverse_kl_by_default_gets_a_line(table):
    for path in IN_LOSS:
        if path.default and path.default not in path.samples_of_reference:
            wrong = table.fresh_descends[path.framework, path.default] != "reverse KL"
            assert bool(path.remedy) == wrong, path.framework


def test_nemo_rl_had_no_score_term_before_its_pull_request_2506(table):
    now, before = (table.loc[("NeMo-RL", name)] for name in ("k3", "k3, to 0.6.0"))
    assert now.fresh_descends == "reverse KL"
    assert before.fresh_descends == "forward KL"
    held = table.loc[("NeMo-RL", f"{APPROXIMATED}, to 0.6.0")]
    assert held.fresh_descends == held.stale_descends == "forward KL"


def test_the_engines_weight_of_ms_swift_keeps_the_forward_kl(table):
    weighted = table.loc[("ms-swift", "rollout_importance_sampling_mode=token_truncate")]
    assert weighted.fresh_descends == weighted.stale_descends == "forward KL"


def test_a_baseline_before_the_kl_has_another_price_in_a_group_than_in_the_mean():
    """OpenRLHF's rloo and dr_grpo; TRL's leave-one-out is exact in both."""
    size, beta = 5, 0.3
    rewards, kl = normal_draws((2, size), seed=4)
    for name, group, mean in (
        ("before leave-one-out", 1, 1),
        ("after leave-one-out", (size - 1) / size, 1),
        ("after centring", 1, size / (size - 1)),
    ):
        placement = chapter.PLACEMENTS[name][1]
        by_reward, by_kl = chapter.slopes(placement, rewards, kl, beta)
        assert by_kl / by_reward / beta == pytest.approx(group, abs=1e-9)
        price = expected_price(placement, beta=beta, size=size, seed=1)
        assert price == pytest.approx(mean, abs=1e-12)


def test_a_trainer_costs_one_function(monkeypatch, tree):
    paths: list[Path] = []
    monkeypatch.setattr(registry, "PATHS", paths)

    @registry.loss("mine me/mine loss.py 1.0 2026-11-26", {"k1": {}}, beta=0.1, flag="none")
    def mine(logp, ref_logp, old_logp):
        return logp - ref_logp

    (path,) = paths
    (option,) = Option.of(path)
    assert option.default and option.framework == "mine" and path.is_on
    table = answers.answers_table(paths, tree)
    assert table.framework.tolist() == ["mine"]
    assert table.fresh[0].name == "nothing"


def test_a_verdict_names_a_multiple_and_not_its_opposite(tree):
    known = answers.Known.at(tree)
    (reverse,) = known.answers["reverse KL"]
    verdict = answers.judged(3 * reverse, known)
    assert verdict.name == "reverse KL"
    assert verdict.scale == pytest.approx(3)
    assert answers.judged(-reverse, known).name == "minus reverse KL"
    (shorter,) = known.lengths["1 / length"]
    assert answers.judged(-shorter, known).name == "neither"
    noise = moved_logits(reverse, 1e-3, seed=0)
    assert answers.judged(noise, known).name == "neither"


# What the page shows.


@pytest.fixture(scope="module")
def verdicts(tree):
    return shown.verdicts(PATHS, tree)


def test_every_default_stands_once_in_each_of_the_two_tables(verdicts):
    for by in ("minimises", "over_answers"):
        groups = shown.grouped(verdicts, by)
        for placement in ("loss", "reward"):
            names = [n.strip() for cell in groups[placement] for n in cell.split(",") if n != "–"]
            expected = verdicts[verdicts.placement == placement].framework
            assert sorted(name.rstrip("*") for name in names) == sorted(expected)
    per_token = shown.grouped(verdicts).set_index("minimises")
    assert "Tunix*" in per_token.loss["nothing: the reference drops out"]
    whole = shown.grouped(verdicts, "over_answers").set_index("minimises")
    assert "Tunix*" in whole.loss["one over the length: longer answers"]
    assert "SkyRL*" in whole.loss["no divergence"]
    assert "TRL*" in whole.reward["the reverse KL"]


def test_a_line_for_whoever_needs_one_with_links_to_its_threads(verdicts):
    text = shown.remedies(PATHS, verdicts).data
    lines = text.splitlines()
    wrong = verdicts[verdicts.minimises != "the reverse KL"]
    assert len(lines) == len(wrong)
    assert "[SkyRL #805](https://github.com/NovaSky-AI/SkyRL/issues/805) (open)" in text
    assert not any(line.startswith("- **TRL**") for line in lines)
    for path in PATHS:
        for thread in path.threads:
            name, status = thread.split()
            assert name.count("#") == name.count("/") == 1
            assert status in ("open", "closed", "merged")


def test_ticks_stand_where_the_errors_are(table):
    figure = shown.ticks(table.reset_index())
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == ["OpenRLHF", "verl", "TRL"]
    verl_rows = table.loc["verl"]
    at_line = [line.get_xdata() for line in axes.lines if list(line.get_ydata()) == [1, 1]]
    assert len(at_line) == len(verl_rows) + 1  # and the line that they stand on
    drawn = sorted(max(xs) for xs in at_line if max(xs) != 1 or min(xs) != 0)
    errors = verl_rows[["fresh_error", "stale_error"]].clip(lower=0.03).max(axis=1)
    assert drawn == pytest.approx(sorted(errors))


def test_zones_keep_every_clamped_setting():
    zones = chapter.dead_zones()
    groups = shown.zones(zones)
    named = [name for cell in groups.settings for name in cell.split("; ")]
    clamped = zones.dropna(subset=["below", "above"], how="all")
    assert sorted(named) == sorted(clamped.framework + " " + clamped.setting)


def test_the_force_of_a_price_depends_on_whose_mean_is_taken_off(tree):
    """In pairs: half of it less the mean of both, all of it less the other or less nobody."""
    prices = shown.every_price(PATHS, tree).set_index(["framework", "setting"])
    assert len(prices) == sum(len(path.settings) for path in IN_REWARD)
    for row, force, name in (
        (("verl", "kl, GRPO before its spread"), 0.5, "reverse KL"),
        (("verl", "kl, rloo"), 1, "reverse KL"),
        (("OpenRLHF", "dr_grpo"), 1, "reverse KL"),
        (("slime", "k1, reinforce_plus_plus_baseline"), 1, "reverse KL, per token"),
    ):
        assert prices.loc[row, "summed"] == name
        assert prices.loc[row, "force"] == pytest.approx(force, rel=1e-12)
    for setting in ("k3", "k3, rloo"):  # the second is what TRL's issue 7086 asks of its RLOO
        assert prices.loc[("SkyRL", setting), "summed"] == "–"
