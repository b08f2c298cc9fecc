r"""What a policy trained on one task still is elsewhere: the KL term's purpose, measured.

Runs of the recorded populations on the language model are trained again, then read at states
that the *reference* visits: its own completions of questions of the task and of others
(:mod:`analysis.studies.language.skills`). The mean over them of

.. math:: \mathrm{KL}(\pi_{\mathrm{ref}} \Vert \pi_\theta)(s) =
    E_{a \sim \pi_{\mathrm{ref}}}[\log \pi_{\mathrm{ref}}(a|s) - \log \pi_\theta(a|s)]

is by how many nats a token what the reference would say has become less likely. Where there is a
right answer, the probability that the policy gives it is exact too: no answer is sampled.

The recorded table of the book is made, run by run, in an hour and a half on two cores by::

    python -c "from analysis.studies.language import retention; retention.record()"
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import pandas as pd
import safetensors.torch
import torch
from torch import Tensor
from tqdm import tqdm

from analysis.records import recording
from analysis.records.config import Run
from analysis.records.language import LanguageConfig
from analysis.records.manifests import as_written
from analysis.records.preset import Preset
from analysis.records.retention import PREDICTIONS, RECORDED
from analysis.studies.language.skills import Skill, skills_of
from analysis.studies.presets.language import smollm2_coefficients, smollm2_short
from analysis.sweeps.provenance import current_provenance
from analysis.sweeps.record import record_tables, tidy
from analysis.sweeps.reproduction import mismatches
from analysis.training.environment import Environment
from analysis.training.environment_of import environment_of
from analysis.training.population import uniforms
from analysis.training.precision import dtype_of
from analysis.training.pretrained.folders import folder_of
from analysis.training.pretrained.llama import LlamaPolicy
from analysis.training.pretrained.lora import Adapters
from analysis.training.pretrained.questions import tokenizer_of
from analysis.training.pretrained.tasks import TextTask
from analysis.training.pretrained.weights import Llama, load_llama
from analysis.training.rollout import completion_inputs, sample, token_logp
from analysis.training.trainer import PopulationTrainer
from kl_term.files import replace_file, require_writable, sha256_bytes
from kl_term.kl.divergences import forward_kl, reverse_kl

#: States whose vocabularies are summed at a time.
STATES = 256

#: Recorded populations, and those of their variants that are read: no KL term, and the four that
#: stay near the reference, at two coefficients where there are two.
VARIANTS: dict[str, tuple[Preset, tuple[tuple[str, float], ...]]] = {
    "smollm2_short": (
        smollm2_short(),
        (
            ("none", 0.0),
            ("k2_loss", 0.3),
            ("k3_loss", 0.3),
            ("exact_loss", 0.3),
            ("k1_reward", 0.3),
        ),
    ),
    "smollm2_coefficients": (
        smollm2_coefficients(),
        (("k3_loss", 0.1), ("exact_loss", 0.5), ("k1_reward", 0.5)),
    ),
}


class Probe:
    """One skill: what the reference says to its questions, and the right answers.

    Args:
        model: the frozen weights.
        config: of the run: the size of its adapters, the temperature.
        skill: the questions.
        seed: of the reference's completions.
    """

    def __init__(self, model: Llama, config: LanguageConfig, skill: Skill, seed: int):
        self.name = skill.name
        task = TextTask(
            skill.prompts,
            lambda place, tokens: 0.0,  # completions are read, never scored
            end_tokens=[skill.end],
            completion_length=skill.longest,
        )
        self.policy = LlamaPolicy(model, config.lora, config.forward, task.shared)
        self.temperature = config.temperature
        count = len(skill.prompts)
        each_once = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        self.prompts = task.prompts(each_once.view(1, -1, 1))
        shape = (1, count, skill.group_size, skill.longest)
        noise = torch.from_numpy(uniforms(seed, "sampling", 0, shape)).to(dtype_of(config))
        said = sample(self.policy, {}, task, self.prompts, noise, config.temperature)
        self.inputs, self.mask = said.inputs, said.mask
        self.ref_logits = self._logits({}, self.inputs)[self.mask]
        self.answers = None
        if skill.answers is not None:
            self.answers, self.answered = _padded(skill.answers, skill.end)
            self.opened = completion_inputs(self.answers, task.bos_token)

    @torch.no_grad()
    def read(self, adapters: Adapters) -> dict[str, float | str]:
        """``forward_kl`` and ``reverse_kl``, means over the reference's states (nats per token),
        and ``right``, the mean probability of the right answer; NaN where there is none."""
        logits = self._logits(adapters, self.inputs)[self.mask]
        both = list(zip(logits.split(STATES), self.ref_logits.split(STATES), strict=True))
        means = {
            kl.__name__: torch.cat([kl(*(part.double() for part in pair)) for pair in both])
            for kl in (forward_kl, reverse_kl)
        }
        return {
            "skill": self.name,
            "states": len(logits),
            **{name: values.mean().item() for name, values in means.items()},
            "right": self._right(adapters),
        }

    def _right(self, adapters: Adapters) -> float:
        if self.answers is None:
            return float("nan")
        logits = self._logits(adapters, self.opened)
        logp = token_logp(logits, self.answers, temperature=1.0)
        return torch.where(self.answered, logp, 0.0).sum(dim=-1).exp().mean().item()

    def _logits(self, adapters: Adapters, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return self.policy.logits(adapters, self.prompts, inputs) / self.temperature


def _padded(answers: Sequence[Sequence[int]], end: int) -> tuple[Tensor, Tensor]:
    """Answers [1, P, 1, T], filled with ``end``, and which of their tokens are theirs."""
    longest = max(map(len, answers))
    rows = torch.tensor([[*answer, *[end] * (longest - len(answer))] for answer in answers])
    lengths = torch.tensor([len(answer) for answer in answers])
    own = torch.arange(longest) < lengths.unsqueeze(-1)
    return rows[None, :, None], own[None, :, None]


@cache
def environment() -> Environment:
    """On which the recorded populations train; they share model and task.

    Raises:
        Unavailable: the model or an optional package cannot be had.
    """
    return environment_of(smollm2_short().config)


@cache
def probes() -> list[Probe]:
    """What runs are read with, from the task to what is furthest from it.

    Raises:
        Unavailable: the model or an optional package cannot be had.
    """
    config = smollm2_short().config
    folder = folder_of(config.model)
    model = load_llama(folder, dtype_of(config), "cpu")
    skills = skills_of(config.task, tokenizer_of(folder))
    return [Probe(model, config, skill, seed) for seed, skill in enumerate(skills)]


def runs(seeds: Iterable[int] = smollm2_short().seeds) -> list[tuple[str, Run]]:
    """The recording and the run, seed by seed."""
    return [
        (name, run)
        for seed in seeds
        for name, (preset, variants) in VARIANTS.items()
        for run in preset.runs
        if run.seed == seed and (run.variant.name, run.variant.beta) in variants
    ]


def trained(of: tuple[str, Run], work: Path) -> Path:
    """A file with the adapters of a recorded run, trained again unless ``work`` has it.

    Beside them stands how many numbers of its curves differ from the recorded ones.
    """
    name, run = of
    file = work / f"{name}_{run.variant.name}_{run.variant.beta:g}_{run.seed}.safetensors"
    if not file.is_file():
        torch.set_num_threads(1)
        trainer = PopulationTrainer(VARIANTS[name][0].config, [run], environment())
        curves = as_written(tidy(trainer.run()))
        both = recording.compared(recording.load(recording.folder_of(name)).curves, curves)
        result = {
            "adapters": trainer.weights.detach(),
            "differing": torch.tensor(len(mismatches(both))),
        }
        replace_file(file, safetensors.torch.save(result))
    return file


def read(run: Run, file: Path) -> list[dict[str, float | str]]:
    """What the probes read of a run whose adapters are in ``file``, one row each."""
    torch.set_num_threads(1)
    adapters = probes()[0].policy.unflatten(safetensors.torch.load_file(file)["adapters"])
    fields = {"variant": run.variant.name, "beta": run.variant.beta, "seed": run.seed}
    return [fields | probe.read(adapters) for probe in probes()]


def record(seeds: Sequence[int] = smollm2_short().seeds, *, processes: int = 2) -> None:
    """Train and read the runs of some seeds, and record the table.

    Adapters that were trained once are kept in ``sweeps/kept-...``: a record that was stopped
    goes on.

    Raises:
        Unavailable: the model or an optional package cannot be had.
    """
    torch.set_num_threads(1)
    provenance = current_provenance(smollm2_short().config)
    work = Path("sweeps") / f"kept-{sha256_bytes(provenance.model_dump_json().encode())[:16]}"
    require_writable(work)
    chosen = runs(seeds)
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        files = list(tqdm(pool.map(partial(trained, work=work), chosen), total=len(chosen)))
        parts = pool.map(read, (run for _, run in chosen), files)
        rows = [row for part in tqdm(parts, total=len(chosen)) for row in part]
    differing = sum(int(safetensors.torch.load_file(file)["differing"]) for file in files)
    tables = {
        "kept.csv": pd.DataFrame(rows),
        "reference.csv": pd.DataFrame([probe.read({}) for probe in probes()]),
    }
    record_tables(
        RECORDED,
        tables,
        smollm2_short().config,
        preset="smollm2_kept",
        seeds=seeds,
        differing=differing,
        predictions=list(PREDICTIONS),
        configuration={n: preset.model_dump(mode="json") for n, (preset, _) in VARIANTS.items()},
    )
