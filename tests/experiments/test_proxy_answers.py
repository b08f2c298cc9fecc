"""What runs on a reward model say: the answers by another route, and runs trained as recorded."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from analysis.records import proxy_answers as records
from analysis.records import recording
from analysis.records.config import Run
from analysis.records.language import RewardHead
from analysis.records.manifests import read_manifest, write_folder
from analysis.records.preset import Preset
from analysis.records.proxy_answers import REFERENCE
from analysis.studies.language import proxy_answers
from analysis.studies.presets import PRESETS
from analysis.studies.presets.language import llama_smoke
from analysis.sweeps import in_process
from analysis.training.environment_of import environment_of
from analysis.training.trainer import PopulationTrainer
from tests.trees import on_one_thread


def small() -> Preset:
    """Two runs of two seeds, on two heads, that leave the reference at once."""
    made = llama_smoke()
    config = made.config.model_copy(
        update={"reward_model": RewardHead(labels=20, count=2), "updates": 3, "log_every": 1}
    )
    return made.model_copy(
        update={"config": config, "variants": made.variants[:2], "seeds": (6, 7)}
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("recorded") / "small_cpu"
    with on_one_thread():
        recording.save(in_process.run(small()), folder)
    return recording.load(folder)


@pytest.mark.slow
def test_the_runs_are_trained_as_recorded_and_say_what_their_policies_sample(recorded, one_thread):
    preset, environment = recorded.preset, environment_of(recorded.preset.config)
    text = proxy_answers.text_of(preset.config)
    *_, (table, differing) = proxy_answers.trained_and_asked(recorded, 7, environment, text)
    assert differing == 0
    names = [REFERENCE, *(variant.name for variant in preset.variants)]
    assert list(table["variant"].unique()) == names
    assert table.groupby("variant").size().eq(proxy_answers.ASKED).all()
    assert set(table["seed"]) == {7}

    trainer = PopulationTrainer(
        preset.config, [Run(variant=preset.variants[1], seed=7)], environment
    )
    trainer.run()
    adapters = trainer.policy.unflatten(trainer.weights.detach())
    said, reference = (
        table[table["variant"] == name].reset_index(drop=True) for name in (names[2], REFERENCE)
    )
    assert (said["answer"] != reference["answer"]).any()
    task = environment.task
    for _, row in said.head(5).iterrows():
        *prompt, opened = map(int, row["question"].split())
        answer = torch.tensor(list(map(int, row["answer"].split())))
        rest = torch.zeros(task.completion_length - len(answer), dtype=torch.long)
        completion = torch.cat([answer, rest]).view(1, 1, 1, -1)
        prompts = torch.tensor(prompt).view(1, 1, -1)
        assert opened == task.bos_token
        scores = task.score(prompts, completion, torch.tensor([1]))
        assert scores.gold.item() == row["gold"]
        assert scores.rewards.item() == pytest.approx(row["proxy"], abs=1e-5)
        inputs = torch.cat([torch.tensor([opened]), answer[:-1]]).view(1, 1, 1, -1)
        logits = trainer.policy.logits(adapters, prompts, inputs)
        logp = torch.log_softmax(logits, -1)[0, 0, 0].gather(-1, answer[:, None])
        assert logp.min() > -12, "the policy could not have said so"


@pytest.mark.slow
def test_a_run_that_comes_out_otherwise_is_counted_and_the_table_is_recorded(
    recorded, one_thread, tmp_path
):
    other = recorded._replace(curves=recorded.curves.assign(gold=0.5, proxy=0.5, reward=0.5))
    recording.save(other, tmp_path / "recorded")
    proxy_answers.record(tmp_path / "recorded", tmp_path / "answers")
    assert read_manifest(tmp_path / "answers")["differing"] > 0
    table = records.recorded(tmp_path / "answers")
    assert set(table["seed"]) == {6} and len(table) == 3 * proxy_answers.ASKED


def test_answers_are_read_as_they_were_said(tmp_path):
    said = ["007", " 42 \n", "", "nan", '"quoted", 1']
    table = pd.DataFrame({"answer": said, "proxy": 0.5})
    write_folder(
        tmp_path / "answers",
        {"answers.csv": records.as_recorded(table)},
        {"preset": "answers", "seeds": [], "device": "cpu", "versions": {}, "source": "none"},
    )
    assert records.recorded(tmp_path / "answers")["answer"].tolist() == said


def test_each_seed_of_the_design_has_a_head_that_no_pilot_had_and_noise_that_no_run_has():
    preset = PRESETS["smollm2_proxy"]()
    model = preset.config.reward_model
    assert len({seed % model.count for seed in preset.seeds}) == len(preset.seeds) == model.count
    assert model.seed > 0, "the pilots' head"
    assert proxy_answers.NOISE_SEED not in preset.seeds
