"""Every recorded population is its preset as it stands, by the code as it stands, and whole."""

from __future__ import annotations

import pytest

from analysis.experiments.ablations import ablation, recording, summaries
from analysis.experiments.ablations.catalogue import CATALOGUE, FIRST_SEED, make_preset
from analysis.experiments.ablations.source import source_of

#: Trained live, for a GPU, or to try out a machine.
UNRECORDED = {"quick", "smollm2", "llama_smoke"}
#: Recorded a second time on other seeds, which decide a claim: see ``first_seed``.
FRESH = ("kdrl", "distillation", "distillation_sparse")
RECORDED = [name for name in CATALOGUE if name not in UNRECORDED]
RECORDED += [f"{name}_fresh" for name in FRESH]


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_is_of_its_preset_with_every_member_healthy(name):
    recorded = recording.load(recording.folder_of(name))
    fresh = name.endswith("_fresh")
    overrides = {FIRST_SEED: recorded.preset.seeds[0]} if fresh else {}
    assert recorded.preset == make_preset(name.removesuffix("_fresh"), overrides)
    assert recorded.manifest["failures"] == []
    assert len(recorded.finals) == len(recorded.preset.members)


@pytest.mark.parametrize("name", RECORDED)
def test_a_recording_is_of_the_code_as_it_is_or_was_reproduced_by_it(name):
    folder = recording.folder_of(name)
    recorded = recording.load(folder)
    assert source_of(recorded.preset.config) in recorded.sources, (
        f"the training code has changed since {folder.name}: run analysis reproduce --seal "
        f"{folder.name}; if numbers changed, record it again with analysis sweep {name} "
        f"--record results/{folder.name}"
    )


def test_the_same_population_on_another_processor_says_the_same():
    first = recording.load(recording.RECORDED)
    elsewhere = recording.load(recording.RECORDED_ELSEWHERE)
    assert elsewhere.preset == first.preset and elsewhere.manifest["failures"] == []
    assert elsewhere.manifest["device"] != first.manifest["device"]
    assert set(elsewhere.sources) & set(first.sources), "not of one code"
    assert (elsewhere.finals["reverse_kl"] != first.finals["reverse_kl"]).mean() > 0.9, "other runs"
    here, there = (
        summaries.judged(summaries.paired(run.finals, ablation.COMPARISONS, beta=0.3), 1)
        for run in (first, elsewhere)
    )
    both = here.merge(there, on=["arm", "other", "metric"], suffixes=("", "_elsewhere"))
    opposed = both["differs"] & both["differs_elsewhere"]
    opposed &= both["mean"] * both["mean_elsewhere"] < 0
    assert len(both) == 16 and not opposed.any()
