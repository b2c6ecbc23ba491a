"""Move an anchor that all workers share by the mean of what they have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.peers.averaging import Averager, Means, as_real, exact, is_continuous
from paceline.peers.coded_averager import CodedAverager
from paceline.peers.coding import Coding
from paceline.peers.group import Peers
from paceline.peers.periodic import PeriodicExchange
from paceline.policies import DiLoCo, Progress


class _Place(NamedTuple):
    """A parameter of this worker, and what all workers share of it."""

    parameter: Tensor
    anchor: Tensor
    momentum: Tensor

    @property
    def own(self) -> Tensor:
        return as_real(self.parameter)

    def change(self) -> Tensor:
        """What this worker has changed since it began at the anchor."""
        # As the parameter holds it: in half precisions it was rounded.
        return self.anchor.to(self.own.dtype).to(self.anchor.dtype) - self.own

    def move(self, gradient: Tensor, rate: float, momentum: float) -> None:
        """Update the anchor as ``torch.optim.SGD(nesterov=True)`` would."""
        self.momentum.mul_(momentum).add_(gradient)
        self.anchor.add_(gradient.add(self.momentum, alpha=momentum), alpha=-rate)


class _Fragment:
    """Some of the parameters, and their exchange under way."""

    def __init__(self, places: Sequence[_Place], policy: DiLoCo, averager: Averager) -> None:
        self._places, self._policy = places, policy
        self._averager = averager
        self.means: Means | None = None  # of an exchange that has ended and is not merged yet
        self.examples = 0  # of this worker since the last exchange
        self.sent = 0  # those in the exchange under way
        self.due: int | None = None  # the step after which the exchange under way is merged
        self.share = 0.0  # of this worker in the last exchange, while what its codec has not sent is still to be added

    def start(self, others: Sequence[Tensor], *, step: int, stop: bool) -> None:
        """Start to average what the workers have changed, and ``others`` with it."""
        changes = [place.change() for place in self._places]
        now = self._policy.overlap == 0
        self._averager.start([*changes, *others], weight=self.examples, tag=step, stop=stop, now=now)
        self.sent, self.examples, self.due = self.examples, 0, step + self._policy.overlap

    def wait(self) -> Means:
        """Wait until the exchange under way has ended."""
        if self.means is None:
            self.means = self._averager.finish()
        return self.means

    def merge(self, others: Sequence[Tensor]) -> bool:
        """Update the anchor and go on from there; return whether a worker was asked to stop."""
        values, stop, _ = self.wait()
        self.means, self.due, self.sent = None, None, 0
        if values is not None:  # else no worker has used an example
            for place, mean in zip(self._places, values, strict=False):
                place.move(mean, self._policy.outer_lr, self._policy.outer_momentum)
            tensors = [*(place.own for place in self._places), *others]
            news = [*(place.anchor for place in self._places), *values[len(self._places) :]]
            for tensor, new in zip(tensors, news, strict=True):
                tensor.copy_(torch.lerp(tensor.to(new.dtype), new, 1 - self._policy.kept))
        self._averager.settle()
        if isinstance(self._averager, CodedAverager) and not self._policy.overlap:  # else it has made steps since
            self.share = self._averager.share
        return stop

    def add_unsent(self) -> None:
        """Go on from what this worker has not sent too."""
        if self.share and isinstance(self._averager, CodedAverager):
            own, anchors = [place.own for place in self._places], [place.anchor for place in self._places]
            self._averager.add_unsent(own, anchors, -1 / self.share)
            self.share = 0.0


class DiLoCoExchange(PeriodicExchange):
    """Let workers train from a shared anchor, and update it with the mean of their changes.

    The answer of the run is the average of the workers' own parameters, which is the anchor after an exchange without
    overlap. BatchNorm's statistics are averaged with the last fragment.
    """

    common_state = ("policy", "anchor", "outer_momentum", "merge_after", "means")

    def __init__(self, model: nn.Module, peers: Peers, policy: DiLoCo, coding: Coding | None = None) -> None:
        super().__init__(model, peers, policy, coding)
        self._diloco = policy
        self._given_up = 0  # the step up to which no exchange begins in the background
        self._begin_at_parameters()

    def _begin_at_parameters(self) -> None:
        """Have an anchor where the parameters are, the same on all workers."""
        self._places = []
        for parameter in self._trained:
            own = as_real(parameter)
            anchor = exact(own)  # where small updates add up
            self._places.append(_Place(parameter, anchor, torch.zeros_like(anchor)))
        self._fragments = [
            _Fragment(
                [self._places[index] for index in indices],
                self._diloco,
                self.averager(",".join(map(str, indices)), len(indices)),
            )
            for indices in self._diloco.cut([parameter.numel() for parameter in self._trained])
        ]

    def count(self, examples: int) -> None:
        super().count(examples)
        for fragment in self._fragments:
            fragment.examples += examples

    def before_update(self) -> None:
        if self._in_update:
            for fragment in self._fragments:
                fragment.add_unsent()

    def after_update(self, progress: Progress) -> bool:
        super().after_update(progress)
        due = [each for each in self._fragments if each.due is not None and each.due <= progress.steps]
        self.exchanges = bool(due)
        stops = [self._merge(fragment) for fragment in due]
        return any(stops)

    def exchange(self, progress: Progress) -> bool:
        number = self._diloco.fragment(progress.steps)
        if self._diloco.overlap and progress.steps <= self._given_up:
            return False
        if number is not None:  # else the run goes on with other options, which are followed from now on
            fragment = self._fragments[number]
            fragment.start(self._statistics(fragment), step=progress.steps, stop=self._backward.stop())
        return False

    def _merge(self, fragment: _Fragment) -> bool:
        fragment.wait()
        if self._diloco.overlap and self._peers.may_lose:
            self.confirm()  # else one that has begun it long ago may be several exchanges behind
        if fragment is self._fragments[-1]:
            self.follow_counts(self.buffers())
        stop = fragment.merge(self._statistics(fragment))
        if self._diloco.fragments == 1 and not self._diloco.overlap:
            self.agreed()
        return stop

    def _statistics(self, fragment: _Fragment) -> list[Tensor]:
        """The buffers that are averaged with a fragment."""
        buffers = self.buffers() if fragment is self._fragments[-1] else []
        return [as_real(buffer) for buffer in buffers if is_continuous(buffer)]

    def agreed(self) -> None:
        super().agreed()
        for fragment in self._fragments:
            fragment.examples = 0

    def _agree(self) -> None:
        """The anchor is what all have agreed on."""

    def give_up(self, steps: int) -> None:
        self._given_up = steps

    # State ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """With the results of exchanges under way, which are merged when they are due."""
        means = [None if fragment.due is None else fragment.wait().values for fragment in self._fragments]
        return {
            **self.kept_state(),
            "since": [fragment.examples for fragment in self._fragments],
            "merge_after": [fragment.due for fragment in self._fragments],
            "means": [None if values is None else [value.clone() for value in values] for values in means],
        }

    def kept_state(self) -> dict[str, Any]:
        """Without exchanges under way: what the workers have changed is then in the next ones."""
        nothing = [None] * len(self._fragments)
        return {
            **super().state_dict(),
            "since": [fragment.examples + fragment.sent for fragment in self._fragments],
            "shares": [fragment.share for fragment in self._fragments],
            "policy": str(self._diloco),
            "anchor": [place.anchor for place in self._places],
            "outer_momentum": [place.momentum for place in self._places],
            "merge_after": nothing,
            "means": nothing,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._begin_at_parameters()
        if "anchor" not in state:
            return
        shared = list(zip(state["anchor"], state["outer_momentum"], strict=True))
        if [anchor.shape for anchor, _ in shared] != [place.anchor.shape for place in self._places]:
            raise CheckpointError(
                "the checkpoint has the anchor of other parameters; train the same ones as before, or begin a new run"
            )
        for place, (anchor, momentum) in zip(self._places, shared, strict=True):
            place.anchor.copy_(anchor)
            place.momentum.copy_(momentum)
        if state["policy"] == str(self._diloco):  # else the fragments are others, and what was under way comes again
            saved = zip(state["since"], state["shares"], state["merge_after"], state["means"], strict=True)
            for fragment, (examples, share, due, means) in zip(self._fragments, saved, strict=True):
                fragment.examples, fragment.share, fragment.due = examples, share, due
                fragment.means = None if due is None else Means(means)
