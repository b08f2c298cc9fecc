"""What a foreign function is made of: its KL term, isolated from the policy loss beside it.

The KL of a loss with a coefficient is the difference of two coefficients; of a loss with
advantages and without one, what is left at advantage zero. A function that turns rewards into
rewards or advantages is read as the loss whose policy gradient it feeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from kl_term.audit.alignment import settle_alignment
from kl_term.audit.arguments import name_of, plan_call
from kl_term.audit.batches import Batch
from kl_term.audit.calling import Foreign, Output
from kl_term.audit.divisors import settle_divisors
from kl_term.audit.groups import fewest, fewest_of_policy
from kl_term.audit.holding import coefficient_of, configurations, with_coefficient
from kl_term.audit.layouts import (
    HIGH,
    LOW,
    guess_coefficient,
    layout_of,
    probe_of,
    settle_advantages,
    settle_copies,
    settle_mixture,
    settle_top_k,
    settle_weights,
)
from kl_term.audit.lengths import settle_lengths
from kl_term.audit.padding import (
    set_padding_ids,
    settle_labels,
    settle_lists,
    settle_padding,
)
from kl_term.audit.parts import settle_parts
from kl_term.audit.paying import Payment, payment, pays
from kl_term.audit.repeating import refuse_changing
from kl_term.audit.spellings import OF_LENGTHS, OF_POLICY
from kl_term.audit.ways import settle_guesses
from kl_term.errors import UserError
from kl_term.kl.returns import reward_to_go

Kind = Literal["loss", "reward"]


class Part(NamedTuple):
    """A part of a loss on one batch."""

    value: Tensor  #: scalar, [B] or [B, T]
    gradient: Tensor  #: by the log-probs [B, T] or the logits [B, T, V] of the policy


@dataclass
class Reading:
    """A foreign function that has been called once without complaint."""

    foreign: Foreign
    kind: Kind
    shape: Literal["number", "rows", "tokens"]  #: of what it returns
    narrow: bool  #: computes in float32, or in less
    payment: Payment = field(default_factory=Payment)  #: of a reward-side function
    beta: float = 1.0  #: the coefficient asked for, where the function takes none
    switches: bool = False  #: the policy loss is another one where the coefficient is zero
    separable: bool = False  #: answers do not read each other
    fewest: int = 1  #: answers that a call needs
    fewest_of_policy: int = 1  #: answers of which one has a gradient of the policy loss
    coarse: bool = False  #: rounds to bfloat16 or float16 whatever it is given

    @property
    def tolerance(self) -> float:
        """Relative error up to which two numbers count as one."""
        return 3e-2 if self.coarse else 3e-4 if self.narrow else 1e-8

    @property
    def by_logits(self) -> bool:
        """Whether the gradient is by logits; that of what is paid is by the log-probs."""
        return self.kind == "loss" and self.foreign.by_logits

    @property
    def takes_mask(self) -> bool:
        layout = self.foreign.layout
        by_layout = layout.packed or layout.marked is not None
        return bool(self.foreign.reads & {"mask", "padding", *OF_LENGTHS}) or by_layout

    @property
    def ragged(self) -> bool:
        """Whether answers of several lengths can be given."""
        return self.takes_mask or self.shape == "tokens"

    @property
    def has_policy_part(self) -> bool:
        worth = {"advantages", "rewards", "token_rewards"}
        return self.kind == "loss" and bool(self.foreign.reads & worth)

    def whole(self, batch: Batch, beta: float) -> Part:
        """All of the loss."""
        if self.kind == "reward":
            return self._of_reward(batch, beta)
        return _with_zeros(self.foreign.call(batch, beta), batch, self.foreign.by_logits)

    def kl(self, batch: Batch) -> Part:
        """The KL term at coefficient one."""
        if self.foreign.has_beta:
            low, high = self.whole(batch, LOW), self.whole(batch, HIGH)
            return Part(*((b - a) / (HIGH - LOW) for a, b in zip(low, high, strict=True)))
        whole = self.whole(without_reward(batch) if self.has_policy_part else batch, self.beta)
        return Part(whole.value / self.beta, whole.gradient / self.beta)

    def policy(self, batch: Batch) -> Part:
        """The loss without KL: at coefficient zero, or what two coefficients leave of it."""
        if self.foreign.has_beta and not self.switches:
            return self.whole(batch, 0.0)
        if self.foreign.has_beta:
            low, high = self.whole(batch, LOW), self.whole(batch, HIGH)
            rest = ((HIGH * a - LOW * b) / (HIGH - LOW) for a, b in zip(low, high, strict=True))
            return Part(*rest)
        both, kl = (self.whole(b, self.beta) for b in (batch, without_reward(batch)))
        return Part(*(a - b for a, b in zip(both, kl, strict=True)))

    def _of_reward(self, batch: Batch, beta: float) -> Part:
        """Minus what each token is paid, beside its score."""
        sampled = replace(batch, logits=batch.old_logits)
        value = self.foreign.call(sampled, beta).value.double()
        paid = value.unsqueeze(-1) if self.shape == "rows" else value
        paid = torch.where(batch.mask, paid, 0.0)
        if self.payment.at_end:
            paid = torch.where(batch.mask, reward_to_go(paid), 0.0)
        ratio = (batch.logp - batch.old_logp).exp()
        return Part(-value, -(ratio * paid) / batch.rows)


def without_reward(batch: Batch) -> Batch:
    nothing = torch.zeros_like(batch.rewards)
    return replace(batch, advantages=nothing, rewards=nothing)


def _with_zeros(output: Output, batch: Batch, by_logits: bool) -> Part:
    like = batch.logits if by_logits else batch.mask.double()
    gradient = torch.zeros_like(like) if output.gradient is None else output.gradient
    return Part(output.value.double(), gradient)


def read(
    function: Callable[..., Any],
    *,
    names: Mapping[str, str] | None = None,
    given: Mapping[str, Any] | None = None,
    beta_name: str | None = None,
    kind: Kind | None = None,
    beta: float = 1.0,
    factory: bool = False,
) -> Reading:
    """Find out how a function is called, and what it returns.

    Raises:
        UserError: one line, on what stands in the way.
    """
    said = beta_name
    if not factory:
        given, beta_name = configurations(function, given or {}, beta_name)
    own = None if factory else coefficient_of(function, beta_name)
    if own is not None:
        function, beta_name, factory = with_coefficient(function, own), own, True
    path = beta_name if beta_name and "." in beta_name and not factory else None
    made = function
    if factory:
        if beta_name is None:
            raise UserError(
                f"{name_of(function)}: makes a loss: say by beta_name of what coefficient"
            )
        made = function(**{beta_name: HIGH})
    plan = plan_call(made, names, given, None if path or factory else beta_name)
    if own is not None:
        plan.guessed[own] = "beta"
    if path is not None and path != said:
        plan.guessed[path] = "beta"
    if path and path.split(".")[0] not in plan.fixed:
        raise UserError(
            f"{name_of(function)}: {path!r} lies inside an argument: give that by "
            f"given={{{path.split('.')[0]!r}: OBJECT}}"
        )
    foreign = Foreign(function, plan, beta_path=path, factory=beta_name if factory else None)
    held = foreign.roles
    if not held & {*OF_POLICY, "inputs", "old_logp"}:
        raise UserError(
            f"{foreign.name}: no argument is the log-probs of the policy: say which by "
            "names={'ARGUMENT': 'logp'} (or 'logits')"
        )
    set_padding_ids(foreign)
    foreign.layout = layout_of(foreign)
    _refuse_unread(foreign)
    settle_guesses(foreign, probe_of(foreign), HIGH)
    settle_parts(foreign)
    settle_copies(foreign)
    settle_top_k(foreign)
    settle_mixture(foreign)
    settle_padding(foreign)
    settle_lists(foreign)
    settle_advantages(foreign)
    settle_weights(foreign)
    settle_lengths(foreign)
    settle_alignment(foreign, probe_of(foreign), HIGH)
    settle_labels(foreign)
    guess_coefficient(foreign)
    settle_divisors(foreign)
    refuse_changing(foreign)
    probe = probe_of(foreign)
    output = foreign.call(probe, HIGH)
    reading = Reading(foreign, kind or "loss", _shape(foreign, output, probe), False, beta=beta)
    if kind == "reward" or (kind is None and pays(foreign, reading.shape, probe)):
        reading.kind = "reward"
        reading.payment = payment(foreign, reading.shape, probe)
    elif (trained := _trained(foreign)) is not None:
        again = read(function, names={**(names or {}), trained: "logp"}, given=given,
                     beta_name=beta_name, kind=kind, beta=beta, factory=factory)  # fmt: skip
        again.foreign.plan.guessed[trained] = "logp"
        return again
    reading.separable = reading.shape != "number" and _is_separable(reading, probe)
    reading.fewest = fewest(reading, probe)
    reading.fewest_of_policy = fewest_of_policy(reading, probe)
    reading.coarse = _is_coarse(reading, probe)
    fewer = output.value.dtype != torch.float64 or reading.coarse
    reading.narrow = fewer or _rounds(reading, probe)
    reading.switches = reading.has_policy_part and foreign.has_beta and _switches(reading, probe)
    if not bool(output.value.isfinite().all()):
        raise UserError(f"{foreign.name}: returns {_first_bad(output.value)} on ordinary inputs")
    if output.gradient is not None and not bool(output.gradient.isfinite().all()):
        raise UserError(f"{foreign.name}: its gradient is NaN on ordinary inputs")
    return reading


def _refuse_unread(foreign: Foreign) -> None:
    """A name that was said and that no batch is asked for is misspelled."""
    for name, role in foreign.named_in_bags().items():
        asked = {name, name.rpartition(".")[2]} & foreign.bag_roles.keys()
        if role != "beta" and not asked:
            raise UserError(f"{foreign.name}: reads no {name!r}, which names= says is {role!r}")


def _trained(foreign: Foreign) -> str | None:
    """The argument that a loss without log-probs of the policy guessed to be the sampler's."""
    if foreign.roles & {*OF_POLICY, "inputs"}:
        return None
    return next((n for n, role in foreign.plan.guessed.items() if role == "old_logp"), None)


def _first_bad(value: Tensor) -> str:
    return str(value[~value.isfinite()].flatten()[0].item())


def _shape(foreign: Foreign, output: Output, probe: Batch) -> Literal["number", "rows", "tokens"]:
    if output.value.ndim == 0:
        return "number"
    return "tokens" if output.value.shape == probe.mask.shape else "rows"


def _rounds(reading: Reading, probe: Batch) -> bool:
    """Whether the KL has fewer digits than float64: two small steps are not alike."""
    generator = torch.Generator().manual_seed(17)
    noise = torch.randn(probe.logits.shape, generator=generator, dtype=torch.float64)
    try:
        parts = [
            reading.kl(replace(probe, logits=probe.logits + step * noise))
            for step in (0.0, 1e-6, 2e-6)
        ]
    except Exception:
        return False
    for start, near, far in zip(*parts, strict=True):
        once, twice = near - start, far - start
        if bool((twice - 2 * once).abs().max() > 1e-3 * twice.abs().max() + 1e-13):
            return True
    return False


def _is_coarse(reading: Reading, probe: Batch) -> bool:
    """Whether a step that float32 sees leaves the KL as it was, and a large one does not."""
    generator = torch.Generator().manual_seed(19)
    noise = torch.randn(probe.logits.shape, generator=generator, dtype=torch.float64)
    try:
        start, near, far = (
            reading.kl(replace(probe, logits=probe.logits + step * noise)).value
            for step in (0.0, 1e-5, 0.3)
        )
    except Exception:
        return False
    return torch.equal(start, near) and not torch.equal(start, far)


def _is_separable(reading: Reading, probe: Batch) -> bool:
    """Whether an answer gets alone what it gets beside others."""
    together = reading.whole(probe, HIGH)
    for row in range(probe.rows):
        try:
            alone = reading.whole(probe.only([row]), HIGH)
        except Exception:
            return False
        if alone.value.shape != together.value[[row]].shape:
            return False
        for a, b in ((alone.value[0], together.value[row]),
                     (alone.gradient[0], together.gradient[row] * probe.rows)):  # fmt: skip
            if a.shape != b.shape or not torch.allclose(a, b, rtol=1e-4, atol=1e-7):
                return False
    return True


def _switches(reading: Reading, probe: Batch) -> bool:
    """Whether what the advantages move is the same at two coefficients, and other without one."""
    turned = replace(probe, advantages=-probe.advantages, rewards=-probe.rewards)

    def moved(beta: float) -> Tensor:
        before, after = (reading.whole(batch, beta).gradient for batch in (probe, turned))
        return after - before

    without, low, high = (moved(beta) for beta in (0.0, LOW, HIGH))
    within = (1e-3 if reading.narrow else 2e-5) * max(float(without.abs().max()), 1e-12)
    steady = bool((high - low).abs().max() <= within)
    return steady and bool((low - without).abs().max() > within)
