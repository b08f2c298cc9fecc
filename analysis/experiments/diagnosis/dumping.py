"""Dumping the log-probs of a run: one call inside a trainer, one line of JSON a sequence."""

from __future__ import annotations

import json
from pathlib import Path

from torch import Tensor

from analysis.errors import Refused

DECIMALS = 7


def append_rollouts(path: str | Path, *, step: int, **fields: Tensor | None) -> None:
    """Append a batch to a JSONL file that ``analysis diagnose`` reads.

    Args:
        path: the file; made if absent. Give each process (rank) a file of its own.
        step: number of the optimizer step.
        fields: [B, T] or [B] tensors named as in :data:`analysis.experiments.diagnosis.columns`,
            ``logp`` or ``old_logp`` and ``ref_logp`` among them. None where there is none.

    Raises:
        Refused: a field's first axis differs from that of the others.
    """
    present = {name: tensor for name, tensor in fields.items() if tensor is not None}
    sizes = {name: len(tensor) for name, tensor in present.items()}
    if len(set(sizes.values())) != 1:
        raise Refused(f"append_rollouts: fields differ in batch size: {sizes}")
    lists = {name: tensor.detach().to("cpu").double().tolist() for name, tensor in present.items()}
    size = next(iter(sizes.values()))
    with open(path, "a+b") as file:  # a process that was killed may have left half a line
        if file.tell() and file.seek(-1, 2) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")
    with open(path, "a", encoding="utf-8") as file:
        for row in range(size):
            line = {name: _rounded(values[row]) for name, values in lists.items()}
            file.write(json.dumps({"step": int(step), **line}) + "\n")


def refuse_another_run(path: Path) -> None:
    """Refuse to begin a run in a file that holds one already: two runs are not one dump.

    Raises:
        Refused: the file holds something.
    """
    if path.is_file() and path.stat().st_size:
        raise Refused(f"{path} holds the rollouts of another run: name a new folder, or remove it")


def _rounded(value: float | list[float]) -> float | list[float]:
    if isinstance(value, list):
        return [round(item, DECIMALS) for item in value]
    return round(value, DECIMALS)


#: What to add to each framework, at the snapshots this book read.
SNIPPETS: dict[str, str] = {
    "trl": """\
from trl import GRPOConfig
from analysis.integrations.trl import KLGRPOTrainer  # pip install 'kl-term[trl]'

trainer = KLGRPOTrainer(  # takes what GRPOTrainer takes, and trains as it does
    model, reward, GRPOConfig(beta=0.01), train_dataset=dataset, dump_rollouts="dump"
)
trainer.train()  # then: analysis diagnose dump
""",
    "verl": """\
# for verl's RayPPOTrainer: where it is the legacy trainer, set trainer.use_v1=False
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from analysis.experiments.diagnosis.dumping import append_rollouts

class DumpingTrainer(RayPPOTrainer):  # before the update, so logp is old_logp
    def _update_actor(self, batch):
        tensors = batch.batch
        append_rollouts(
            "rollouts.jsonl",
            step=self.global_steps,
            old_logp=tensors["old_log_probs"],
            ref_logp=tensors["ref_log_prob"],  # actor.use_kl_loss or algorithm.use_kl_in_reward
            sampler_logp=tensors.get("rollout_log_probs"),  # rollout.calculate_log_probs=True
            mask=tensors["response_mask"],
            advantage=tensors["advantages"],
            reward=tensors["token_level_scores"].sum(-1),
        )
        return super()._update_actor(batch)
""",
    "openrlhf": """\
# in openrlhf/trainer/ray/ppo_actor.py, training_step, after "# loss function"
from analysis.experiments.diagnosis.dumping import append_rollouts

# step counts the batches of one rollout and begins again at the next
self.rollouts_dumped = getattr(self, "rollouts_dumped", 0) + (step == 0)
append_rollouts(
    f"rollouts-{self.strategy.get_rank()}.jsonl",
    step=self.rollouts_dumped,
    logp=action_log_probs,
    old_logp=experience.action_log_probs,
    ref_logp=experience.base_action_log_probs,
    sampler_logp=experience.rollout_log_probs,
    mask=experience.action_mask,
    advantage=experience.advantages,
)
""",
}
