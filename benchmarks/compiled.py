"""What compiling a loss costs: ``python -m benchmarks.compiled [--backend inductor]``.

Prints two ratios, each a median over rounds behind one that is not counted: the first call with
the guard that is traced over one without, and a later call of the compiled loss over an eager one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch._dynamo
from torch import Tensor

from kl_term import kl_loss, policy_loss
from kl_term.checks import trusted


def loss(logp: Tensor, ref_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """GRPO's, with both terms."""
    old_logp = logp.detach()
    policy = policy_loss(logp, old_logp=old_logp, advantages=advantages, mask=mask)
    return policy.loss + 0.01 * kl_loss(logp, ref_logp, mask=mask).sum()


def seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def ratios(backend: str, rounds: int) -> tuple[float, float]:
    """Of the first call and of later ones."""
    batch = torch.randn(2, 16, 256)
    given = (batch[0].requires_grad_(), batch[1], torch.randn(16), torch.ones(16, 256).bool())
    first: dict[bool, list[float]] = {False: [], True: []}
    later: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(1 + rounds):
        for is_trusted in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(loss, backend=backend, fullgraph=True)
            with trusted() if is_trusted else nullcontext():
                first[is_trusted].append(seconds(lambda step=compiled: step(*given)))
        for eager in (False, True):
            step = loss if eager else torch.compile(loss, backend=backend, fullgraph=True)
            step(*given)
            repeated = (step for _ in range(200))
            later[eager].append(seconds(lambda steps=repeated: [one(*given) for one in steps]))

    def middle(times: list[float]) -> float:
        return statistics.median(times[1:])  # before, torch loads what it compiles with

    return middle(first[False]) / middle(first[True]), middle(later[False]) / middle(later[True])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tracing, running = ratios(options.backend, options.rounds)
    print(f"first call, with the guard over without: {tracing:.2f}")
    print(f"later calls, compiled over eager:        {running:.2f}")


if __name__ == "__main__":
    main()
