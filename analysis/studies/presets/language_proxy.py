"""SmolLM2 on a learned proxy of its reward: which KL terms keep the truth, and what is said.

Committed before its first run; trained seed by seed, each in about half an hour of a core, or at
once on a GPU::

    analysis sweep smollm2_proxy -o first_seed=10000 -o num_seeds=1     # and so on, by seed
    analysis sweep smollm2_proxy --device cuda --record results/smollm2_proxy_cuda
"""

from __future__ import annotations

from analysis.records.language import ArithmeticTask, LanguageConfig, RewardHead
from analysis.records.preset import Pilot, Preset
from analysis.records.variants import Variant
from analysis.studies.presets.designed import design
from analysis.studies.presets.final_policies import BY_SEED
from analysis.studies.presets.language import LORA, model_of
from analysis.studies.presets.parts import NO_KL
from analysis.studies.presets.registry import fresh_seeds, preset
from kl_term.kl.choice import KLChoice

BETAS = (0.1, 0.4)
TERMS = (
    KLChoice(estimator="exact"),
    KLChoice(estimator="k2"),
    KLChoice(estimator="k3"),
    KLChoice(estimator="k1", placement="reward"),
)
NUM_SEEDS = 10
#: Of the first seed's labels; those of the pilots are of 0.
FIRST_LABELS = 10


@preset
def smollm2_proxy(*, weights: str = "packaged") -> Preset:
    """Four KL terms at two coefficients, and none, on a head that was fitted to a hundred answers.

    Ten heads of other labels, one for each seed.
    """
    return Preset(
        config=LanguageConfig(
            model=model_of(weights),
            task=ArithmeticTask(name="chain_sum"),
            reward_model=RewardHead(labels=100, seed=FIRST_LABELS, count=NUM_SEEDS),
            lora=LORA,
            updates=24,
            num_prompts=6,
            group_size=6,
            learning_rate=5e-4,
            log_every=4,
            final_answers=360,
        ),
        variants=(NO_KL, *(Variant(kl=term, beta=beta) for beta in BETAS for term in TERMS)),
        seeds=fresh_seeds(10_000, NUM_SEEDS),
        predictions=_PROXY.sentences,
        design=_PROXY,
    )


_FAST = Pilot(
    tried=(
        "No KL term at step size 1e-3, six prompts of eight answers, seed 0, stopped after 13 "
        "updates. The head of label seed 0: on 400 other answers of the start, of which a third "
        "are right, its scores correlate with being right by 0.46; by 0.43 with 50 labels, 0.53 "
        "with 200, 0.55 with 400."
    ),
    runs=1,
    seen=(
        "At updates 0, 4, 8, 12: gold 0.42, 0.33, 0.17, 0.02, proxy 0.31, 0.50, 0.68, 0.67, "
        "reverse KL 0, 0.4, 1.1, 4.3 nats a token. The start says ' 10' and ends the line; at the "
        "last update it said '65-------------------', or one number that is wrong. 7 s of a busy "
        "core an update."
    ),
    chosen="100 labels, half the step size, and fewer answers an update.",
)
_SLOW = Pilot(
    tried=(
        "The same head at 5e-4, four prompts of six answers, seed 1, 25 updates: no KL term, and "
        "the exact KL at 0.1 and 0.4."
    ),
    runs=3,
    seen=(
        "24 answers to four questions an update, so gold is uncertain by 0.1 and more. At updates "
        "0, 8, 12, 20, 24: 0.54, 0.54, 0.25, 0.13, 0 without a term, at 0, 0.6, 1.2, 2.5, 3.0 nats "
        "a token, while the proxy went from 0.49 to 0.82 and 0.76; 0.54, 0.63, 0.25, 0.29, 0 at "
        "0.1, at 0, 0.3, 0.9, 0.7, 1.6 nats; 0.54, 0.71, 0.50, 0.42, 0.63 at 0.4, at 0.09 to 0.22 "
        "nats. Lost runs say numbers that are too large, a space behind them (' 42 ', ' 25 '), or "
        "a difference in place of a result (' 50 - 0'). 4 s of a busy core a run's update."
    ),
    chosen="Step size, number of updates, and both coefficients.",
)
_TERMS = Pilot(
    tried=(
        "The same, seed 2, 21 updates: no KL term, k3 as a loss and k1 in the reward at 0.4. The "
        "head's label seed is that of the other pilots."
    ),
    runs=3,
    seen=(
        "At updates 4, 8, 12, 16, 20: gold 0.54, 0.29, 0.17, 0, 0 without a term, at 0.2, 0.8, "
        "1.4, 1.6, 3.2 nats; 0.54, 0.58, 0.71, 0.08, 0.42 with k3, at 0.08 to 0.23 nats; 0.54, "
        "0.54, 0.63, 0.13, 0.25 with k1 in the reward, at 0.13 to 0.30 nats. Without a term it "
        "said digits twice or more (' 77', ' 55 ', ' 66666')."
    ),
    chosen=(
        "Six prompts of six answers, 360 answers of the final policy, and heads of ten other label "
        "seeds. Differences from no KL term at 0.4 were 0.63, 0.42 and 0.25; if they have a "
        "standard deviation of 0.2 over seeds, five show one of 0.34 and ten one of 0.2 with a "
        "power of 0.8. The margin is that of smollm2_reward_long; equivalence within it needs a "
        "standard deviation that the pilots do not promise, and may stay open."
    ),
)

_PROXY = design(
    question=(
        "On a language model whose reward model knows little of the truth, which KL term keeps how "
        "much of it, and do the terms that descend the reverse KL keep the same?"
    ),
    outcome=(
        "Gold: the share of right answers among 360 fresh ones of the final policy, to questions "
        "of the pool that it is trained on; no run sees it. A seed's difference, averaged over the "
        "coefficients named, then a t interval over seeds. Each seed has a reward model of other "
        "labels, so the interval is over these too; there is one language model, and of others it "
        "says nothing. KLs, exact and on the same answers, are compared by their logarithm, with a "
        "margin of log 1.25. Equivalent: two one-sided tests at 0.05. What the runs of the first "
        "seed say is recorded beside the reference's answers to the same questions, and decides "
        "nothing."
    ),
    margin=0.05,
    predictions={
        "exact_loss k2_loss k3_loss k1_reward > none: final_gold at 0.4": (
            "without a term the run goes where its head was never fitted"
        ),
        "exact_loss k2_loss k3_loss k1_reward < none: final_reverse_kl at 0.1 0.4": (
            "it descends a KL"
        ),
        "exact_loss k2_loss k3_loss k1_reward < none: final_proxy at 0.4": (
            "what the reward model rates highest is far away"
        ),
        "k2_loss k1_reward = exact_loss: final_gold at 0.4": "each descends the reverse KL",
        "k2_loss k1_reward = exact_loss: final_reverse_kl at 0.4": "each descends the reverse KL",
        "k3_loss < exact_loss: final_reverse_kl at 0.1 0.4": (
            "where an answer of the reference has become rare, k3 pulls the harder; on this model "
            "it ended nearest at equal coefficients when the reward was the truth"
        ),
        "k3_loss > exact_loss: final_gold at 0.1": "because it stays nearer",
    },
    stopping=BY_SEED,
    pilots=(_FAST, _SLOW, _TERMS),
)
