"""Dumping the log-probs of a run: one call inside a trainer, one line of JSON a sequence."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kl_term.errors import UserError
from kl_term.files import replacing

DECIMALS = 7


@dataclass
class Dump:
    """Where a trainer's rollouts go, and how much of them.

    Padding is left out. One file a process: ``rollouts-0.jsonl``; of parquet a file a batch.

    Raises:
        UserError: a number below one, or another format.
    """

    folder: str | Path
    every: int = 1  #: generation batches: of the first of so many, all steps are dumped
    tokens: int | None = None  #: budget of each process; no further rollout is dumped beyond it
    format: Literal["jsonl", "parquet"] = "jsonl"
    rank: int = 0  #: of this process
    written: int = field(default=0, init=False)  #: tokens, so far
    _files: int = field(default=0, init=False)
    _last: int | None = field(default=None, init=False)  #: generation that was dumped last

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        if self.every < 1 or (self.tokens is not None and self.tokens < 1):
            raise UserError(f"Dump: every={self.every} and tokens={self.tokens} must be positive")
        if self.format not in ("jsonl", "parquet"):
            raise UserError(f"Dump: format={self.format!r}: give jsonl or parquet")

    @classmethod
    def of(cls, given: str | Path | Dump | None, rank: int) -> Dump | None:
        """The dump of one process, of a folder or of what a user gave."""
        if given is None:
            return None
        return replace(given if isinstance(given, Dump) else cls(given), rank=rank)

    @property
    def path(self) -> Path:
        """The file of this process; of parquet, what the names of its files begin with."""
        return self.folder / f"rollouts-{self.rank}.{self.format}"

    def begin(self, *, resumed: bool) -> None:
        """Make the folder; refuse one that holds another run, unless this run is resumed.

        Raises:
            UserError: it holds rollouts of this process.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        held = [path for path in (*self._parts(), self.path) if path.is_file()]
        if not resumed and any(path.stat().st_size for path in held):
            raise UserError(
                f"{held[0]} holds the rollouts of another run: name a new folder, or remove it"
            )

    def write(self, *, step: int, generation: int, **fields: Tensor | None) -> None:
        """Append a batch, unless another generation's turn, or of a new one beyond the budget.

        A batch that no reference has scored is left out.

        Args:
            step: number of the optimizer step.
            generation: number of the generation batch that the rows are of, from 0.
            fields: as of :func:`append_rollouts`.
        """
        spent = self.tokens is not None and self.written >= self.tokens
        unscored = fields.get("ref_logp") is None
        if unscored or generation % self.every or (spent and generation != self._last):
            return
        self._last = generation
        if self.format == "jsonl":
            self.written += append_rollouts(self.path, step=step, **fields)
        else:
            name = f"rollouts-{self.rank}-{step:08d}-{self._files:04d}.parquet"
            self._files += 1
            self.written += write_parquet(self.folder / name, step=step, **fields)

    def forget_from(self, step: int) -> None:
        """Drop a step and all later ones: a run that is resumed dumps them again."""
        for part in self._parts():
            if int(part.stem.split("-")[2]) >= step:
                part.unlink()
        _forget_lines(self.path, step)

    def _parts(self) -> list[Path]:
        return sorted(self.folder.glob(f"rollouts-{self.rank}-*.parquet"))


def append_rollouts(path: str | Path, *, step: int, **fields: Tensor | None) -> int:
    """Append a batch to a JSONL file that ``kl-term diagnose`` reads; returns its tokens.

    With a ``mask``, what follows a row's last counted token is left out.

    Args:
        path: the file; made if absent. Give each process (rank) a file of its own.
        step: number of the optimizer step.
        fields: [B, T] or [B] tensors named as in :data:`kl_term.diagnosis.names.NAMES`,
            ``logp`` or ``old_logp`` and ``ref_logp`` among them. None where there is none.

    Raises:
        UserError: no log-probs of policy or reference, or a field's first axis differs from that
            of the others.
    """
    present, lengths = _present(fields)
    lists = {
        name: (tensor.double() if tensor.is_floating_point() else tensor).tolist()
        for name, tensor in present.items()
    }
    with open(path, "a+b") as file:  # a process that was killed may have left half a line
        if file.tell() and file.seek(-1, 2) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")
        for row, length in enumerate(lengths):
            if length == 0:
                continue  # nothing of it counts
            line = {name: _rounded(values[row], length) for name, values in lists.items()}
            file.write(json.dumps({"step": int(step), **line}).encode() + b"\n")
    return sum(lengths)


def write_parquet(path: Path, *, step: int, **fields: Tensor | None) -> int:
    """A batch as one parquet file, a row a sequence, in float32; returns its tokens.

    Args, Raises: as of :func:`append_rollouts`; and a UserError without pyarrow.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(
            "a dump as parquet needs pyarrow: pip install 'kl-term[diagnose]', or give jsonl"
        ) from None
    present, lengths = _present(fields)
    counted = torch.tensor(lengths)
    kept = counted > 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), counted[kept].cumsum(0)]).int().numpy()
    columns: dict[str, Any] = {"step": pyarrow.array([int(step)] * int(kept.sum()))}
    for name, tensor in present.items():
        plain = tensor.float() if tensor.is_floating_point() else tensor.long()
        if plain.dim() == 1:
            columns[name] = pyarrow.array(plain[kept].numpy())
        else:
            inside = torch.arange(plain.shape[1]) < counted[:, None]
            columns[name] = pyarrow.ListArray.from_arrays(offsets, plain[inside].numpy())
    if kept.any():
        parquet.write_table(pyarrow.table(columns), path)
    return sum(lengths)


def _present(fields: dict[str, Tensor | None]) -> tuple[dict[str, Tensor], list[int]]:
    """The fields that are there, on the CPU, and how many tokens of each row are dumped."""
    present = {n: tensor.detach().to("cpu") for n, tensor in fields.items() if tensor is not None}
    for name, either in (("logp", ("logp", "old_logp")), ("ref_logp", ("ref_logp",))):
        if not present.keys() & set(either):
            raise UserError(f"append_rollouts: {name} is None or not given: there is no KL without")
    sizes = {name: len(tensor) for name, tensor in present.items()}
    if len(set(sizes.values())) != 1:
        raise UserError(f"append_rollouts: fields differ in batch size: {sizes}")
    if "mask" not in present:
        longest = max((t.shape[1] for t in present.values() if t.dim() > 1), default=0)
        return present, [longest] * next(iter(sizes.values()))
    places = torch.arange(1, present["mask"].shape[-1] + 1)
    return present, (present["mask"].bool() * places).amax(-1).tolist()


def _forget_lines(path: Path, step: int) -> None:
    if not path.is_file():
        return
    with open(path, "rb") as rows, replacing(path) as kept:
        for row in rows:
            try:
                earlier = json.loads(row)["step"] < step
            except ValueError:  # torn by the end of the process that wrote it
                continue
            if earlier:
                kept.write(row)


def _rounded(value: Any, length: int) -> Any:
    if isinstance(value, list):
        return [round(item, DECIMALS) for item in value[:length]]
    return round(value, DECIMALS)


#: What to add to each framework, at the snapshots this book read.
SNIPPETS: dict[str, str] = {
    "plain": """\
# In a loop of your own, after the loss of each optimizer step: all [B, T], or [B].
from kl_term.diagnosis.dumping import append_rollouts

append_rollouts(
    "rollouts.jsonl",
    step=step,
    logp=logp, old_logp=old_logp, ref_logp=ref_logp, mask=mask,
    sampler_logp=engine_logp, lag=lag,  # the engine's, and updates since its weights; or None
    token=ids, group=prompt_index, reward=rewards, advantage=advantages,
    entropy=entropy, kl_term=beta * kl,  # what the KL adds to the loss of each token, or None
)  # then: kl-term diagnose rollouts.jsonl --framework plain
# Or a batch without this package: torch.save({"logp": logp, "ref_logp": ref_logp}, "batch.pt")
""",
    "trl": """\
from trl import GRPOConfig
from kl_term.integrations.trl import KLGRPOTrainer  # pip install 'kl-term[trl]'

trainer = KLGRPOTrainer(  # takes what GRPOTrainer takes, and trains as it does
    model, reward, GRPOConfig(beta=0.01), train_dataset=dataset, dump_rollouts="dump"
)
trainer.train()  # then: kl-term diagnose dump
""",
    "verl": """\
# verl 0.9 and later. Set actor.use_kl_loss or algorithm.use_kl_in_reward, for a reference. Import
# this in the process that runs the trainer (in your copy of main_ppo.py, beside get_trainer_cls):
import zlib
import torch
import transfer_queue as tq
from verl.trainer.ppo.v1 import PPOTrainer
from kl_term.diagnosis.dumping import append_rollouts

COLUMNS = {  # add "rollout_log_probs": "sampler_logp" with rollout.calculate_log_probs=True
    "old_log_probs": "old_logp", "ref_log_prob": "ref_logp", "entropy": "entropy",
    "response_mask": "mask", "advantages": "advantage", "rm_scores": "reward",
}
update_actor = PPOTrainer._update_actor

def dump_and_update(self, batch, metrics):  # before the update, so logp is old_logp
    where = {"keys": batch.keys, "partition_id": batch.partition_id}
    data = tq.kv_batch_get(**where, select_fields=list(COLUMNS)).to_padded_tensor()
    fields = {name: data[column] for column, name in COLUMNS.items()}
    fields["reward"] = fields["reward"].sum(-1)
    prompts = [key.rsplit("_", 2)[0] for key in batch.keys]  # a key is prompt_session_index
    fields["group"] = torch.tensor([zlib.crc32(prompt.encode()) for prompt in prompts])
    sampled = [tag["min_global_steps"] for tag in batch.tags]  # the weights that sampled
    fields["lag"] = (self.global_steps - torch.tensor(sampled)).clamp(min=0)
    append_rollouts("rollouts.jsonl", step=self.global_steps, **fields)
    return update_actor(self, batch, metrics)

PPOTrainer._update_actor = dump_and_update
""",
    "verl-updates": """\
# verl 0.9 and later, in the workers: the log-probs of each update itself, and its KL term. Name a
# module of these lines in actor_rollout_ref.model.external_lib; step counts micro-batches.
import itertools
import os
from verl.trainer.distillation import losses as distillation
from verl.workers import engine_workers
from verl.workers.utils import losses
from kl_term.diagnosis.dumping import append_rollouts

COLUMNS = {
    "old_log_probs": "old_logp", "ref_log_prob": "ref_logp", "response_mask": "mask",
    "advantages": "advantage", "rollout_log_probs": "sampler_logp",
}
step, ppo_loss = itertools.count(1), losses.ppo_loss

def dump_and_lose(config, model_output, data, dp_group=None):
    if config.use_kl_loss:
        held = data.select(*[column for column in COLUMNS if column in data]).to_padded_tensor()
        fields = {name: held[column] for column, name in COLUMNS.items() if column in held}
        logp = losses.no_padding_2_padding(model_output["log_probs"], data)
        kl = losses.kl_penalty(logp, fields["ref_logp"], config.kl_loss_type)
        fields |= {"logp": logp, "kl_term": config.kl_loss_coef * kl}
        append_rollouts(f"updates-{os.getpid()}.jsonl", step=next(step), **fields)
    return ppo_loss(config, model_output, data, dp_group)

for module in (losses, engine_workers, distillation):  # each has a name of its own for it
    module.ppo_loss = dump_and_lose
""",
    "openrlhf": """\
# With the KL in the reward, its default, OpenRLHF drops the log-probs of the reference. Delete from
# openrlhf/trainer/ppo_utils/experience_maker.py:
#             if not args.algo.kl.use_loss:
#                 base_action_log_probs = None
# Then in openrlhf/trainer/ray/ppo_actor.py, training_step, before "loss = actor_loss"
from kl_term.diagnosis.dumping import append_rollouts

import zlib

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
    reward=experience.rewards,
    # A prompt is a group; OpenRLHF drops its number. One rollout is sampled by one version.
    group=torch.tensor([zlib.crc32(prompt.encode()) for prompt in experience.prompts]),
    kl_term=kl_ctl * kl if self.args.algo.kl.use_loss else None,  # in the reward: no term here
    entropy=None  # --actor.entropy_coef 0 computes it
    if self.args.actor.entropy_coef is None
    else output.entropy[:, -experience.action_mask.shape[1] :],
)
""",
}
