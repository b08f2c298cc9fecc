"""One process of two: trains with TRL's trainer and with ours, and writes what each logged."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from trl import GRPOTrainer

from kl_term.integrations.trl import KLGRPOTrainer, KLTerm
from tests.integrations import tiny_trl

TRAINERS = {
    "trl": (GRPOTrainer, {}),
    "ours": (KLGRPOTrainer, {}),
    "exact": (KLGRPOTrainer, {"kl_term": KLTerm(estimator="exact")}),
    "reward": (KLGRPOTrainer, {"kl_term": KLTerm(estimator="k1", placement="reward")}),
}


def main(model: str, folder: str) -> None:
    torch.set_num_threads(1)
    for name, (kind, options) in TRAINERS.items():
        given = tiny_trl.arguments(
            model,
            folder,
            per_device_train_batch_size=4,
            num_iterations=2,
            max_steps=4,
            learning_rate=1e-3,
        )
        if kind is KLGRPOTrainer:
            options = options | {"dump_rollouts": Path(folder, f"dump-{name}")}
        trainer = kind(**given, **options)
        trainer.train()
        rank = trainer.accelerator.process_index
        Path(folder, f"{name}-{rank}.json").write_text(json.dumps(trainer.state.log_history))
    os._exit(0)  # all is written, and taking the group down was seen to hang on a busy machine


if __name__ == "__main__":
    main(*sys.argv[1:])
