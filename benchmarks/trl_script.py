"""TRL's GRPOTrainer at the sizes of the benchmark, in a Python of its own that has TRL.

It is run by path and imports nothing of this package. It writes ``ready``, then trains some updates
and writes how long they took, in seconds, whenever it reads a line.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time

OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
os.environ |= dict.fromkeys(OFFLINE, "1")
PROTOCOL = os.fdopen(os.dup(1), "w")  # what libraries print goes to stderr
os.dup2(2, 1)

WARM_UP = 3


def write(text: str) -> None:
    PROTOCOL.write(f"{text}\n")
    PROTOCOL.flush()


def make_model(spec: dict, tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=spec["vocab_size"],
            hidden_size=spec["width"],
            num_hidden_layers=spec["num_layers"],
            num_attention_heads=spec["num_heads"],
            # Three matrices where the other trainers have two: the same number of weights.
            intermediate_size=round(2 * spec["mlp_factor"] * spec["width"] / 3),
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def make_tokenizer(spec: dict):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*(str(digit) for digit in range(10)), "=", ".", "<pad>", "<unk>"]
    words += [f"<{index}>" for index in range(len(words), spec["vocab_size"])]
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        padding_side="left",
        pad_token="<pad>",
        eos_token=".",
        unk_token="<unk>",
    )


def sorted_right(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    pairs = zip(prompts, completions, strict=True)
    return [float(c.split()[: len(p.split()) - 1] == sorted(p.split()[:-1])) for p, c in pairs]


def main() -> None:
    spec = json.loads(sys.argv[1])
    import torch

    torch.set_num_threads(spec["threads"])
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Paced(TrainerCallback):
        """Waits for a line before every few updates, and says how long those took."""

        started = 0.0

        def on_step_begin(self, args, state, control, **_):
            done = state.global_step - WARM_UP
            if done >= 0 and done % spec["updates"] == 0:
                if spec["device"] == "cuda":
                    torch.cuda.synchronize()
                took = {"seconds": time.perf_counter() - self.started}
                write(json.dumps(took) if done else "ready")
                if not sys.stdin.readline():
                    os._exit(0)
                self.started = time.perf_counter()

    tokenizer = make_tokenizer(spec)
    draw = random.Random(0)
    digits = [[str(draw.randrange(10)) for _ in range(spec["num_digits"])] for _ in range(4096)]
    data = Dataset.from_list([{"prompt": " ".join([*d, "="])} for d in digits])
    with tempfile.TemporaryDirectory() as folder:
        make_model(spec, tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        steps = spec["completion_length"]
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=sorted_right,
            train_dataset=data,
            processing_class=tokenizer,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=spec["device"] == "cpu",
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=spec["num_prompts"] * spec["group_size"],
                num_generations=spec["group_size"],
                max_completion_length=steps,
                generation_kwargs={"min_new_tokens": steps},
                beta=spec["beta"],
                learning_rate=spec["learning_rate"],
                max_steps=10**6,
                logging_steps=10**5,
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            callbacks=[Paced()],
        )
        trainer.train()


if __name__ == "__main__":
    main()
