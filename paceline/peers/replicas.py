"""The base of exchanges in which every worker updates parameters of its own."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.peers.averaging import Averager, Means, as_real, is_continuous
from paceline.peers.coded_averager import CodedAverager
from paceline.peers.coding import Coding
from paceline.peers.exchange import BackwardPass, PeersExchange
from paceline.peers.group import Peers
from paceline.peers.tensors import send_tensors
from paceline.policies import Progress


class ReplicasExchange(PeersExchange):
    """Let the workers of ``peers`` update their own ``model``; a subclass exchanges in ``after_update``.

    The answer of the run is the average of the models, weighted by the examples that each worker has used since all
    had the same. Buffers such as BatchNorm's are averaged with the parameters.
    """

    replicas_differ = True

    def __init__(self, model: nn.Module, peers: Peers, coding: Coding | None = None) -> None:
        super().__init__(model, peers)
        self.coding = coding
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
        if not self._trained:
            raise UsageError("no parameter of the model requires a gradient, so the workers have nothing to exchange")
        self._averager = Averager(peers)  # exact
        self._steps = 0  # since all workers had the same parameters
        self._examples = 0  # of this worker in these steps
        self._in_update = 0  # its examples in the update under way
        self._backward = BackwardPass(0)  # of the update under way
        self._prepared = False  # before_update was called for the update under way
        self._own: tuple[list[Tensor | None], list[Tensor]] | None = None  # gradients and buffers before borrowed data

    # For subclasses ---------------------------------------------------------------------------------------

    def before_update(self) -> None:
        """The gradients are final and the parameters still as before the optimizer's update."""

    @abstractmethod
    def after_update(self, progress: Progress) -> bool:
        """Exchange what is due; return whether a worker was asked to stop, if all learn it now.

        Set ``exchanges`` where that is not after every update.
        """

    def load_answer(self) -> None:
        """Put the answer of the run, as it is now, into the model; all workers call it together."""
        if self._steps:  # else all workers already have it
            self.average()

    def numbers(self) -> Sequence[float]:
        """What this worker adds to the sums that every average carries along."""
        return ()

    def average(self) -> Means:
        """Average parameters and floating-point buffers; other buffers, such as counts, follow worker 0."""
        buffers = self.buffers()
        tensors = [as_real(tensor) for tensor in self.averages(buffers) if is_continuous(tensor)]
        stop, weight, numbers = self._backward.stop(), self.weight(), self.numbers()
        self._averager.start(tensors, weight=weight, tag=self._steps, stop=stop, numbers=numbers, now=True)
        means = self._averager.finish()
        self.follow_counts(buffers)
        for tensor, mean in zip(tensors, means.values or tensors, strict=True):
            tensor.copy_(mean)
        return means

    def averages(self, buffers: Sequence[Tensor]) -> Sequence[Tensor]:
        """The tensors that are averaged, if their dtype has a mean."""
        return (*self._trained, *buffers)

    def averager(self, name: str, num_coded: int, *, equal: bool = False) -> Averager:
        """An averager for tensors of which the first ``num_coded`` are differences, which a codec may code."""
        if self.coding is None:
            return Averager(self._peers)
        return CodedAverager(self._peers, self.coding, name, num_coded=num_coded, equal=equal)

    def weight(self) -> float:
        """This worker's weight in an average of the models."""
        return self._examples

    def count(self, examples: int) -> None:
        """This worker has made an update with so many examples."""
        self._examples += examples

    def follow_counts(self, buffers: Sequence[Tensor]) -> None:
        """Copy worker 0's values of the buffers that have no average."""
        with self._peers.explain("sending buffers"):
            send_tensors([buffer for buffer in buffers if not is_continuous(buffer)], self._peers)

    def agreed(self) -> None:
        """All workers have the same parameters from now on."""
        self._steps = self._examples = 0

    # The interface of an exchange -------------------------------------------------------------------------

    def accumulate(self, *, examples: int, total: int | None) -> None:
        self._leave_out_borrowed()
        self._in_update += examples
        if examples == 0:
            gradients = [None if each.grad is None else each.grad.clone() for each in self._trained]
            self._own = gradients, [buffer.clone() for buffer in self.buffers()]

    def begin(self, backward: BackwardPass) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise UsageError(
                    f"{name} was frozen when the session began and is trained now, so it would differ between the "
                    "workers; freeze and unfreeze parameters before join()"
                )
        self._backward = backward
        self.accumulate(examples=backward.examples, total=backward.total)

    def finish(self) -> None:
        self._leave_out_borrowed()
        if not self._prepared:  # an optimizer that evaluates the loss again has moved the parameters already
            self._prepared = True
            self.before_update()

    def updated(self, progress: Progress) -> bool:
        self._prepared = False
        self._steps += 1
        self.count(self._in_update)
        self._in_update = 0
        return self.after_update(progress)

    def release(self, *, failed: bool = False) -> None:
        if failed:
            self._leave_out_borrowed()
            self._in_update = 0

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        own = [tensor.detach().clone() for tensor in (*self._trained, *self.buffers())]
        self.load_answer()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip((*self._trained, *self.buffers()), own, strict=True):
                    tensor.copy_(value)

    def conclude(self) -> None:
        self.load_answer()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps, "examples": self._examples, "in_update": self._in_update}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._examples, self._in_update = (
            int(state.get(name, 0)) for name in ("steps", "examples", "in_update")
        )

    def close(self) -> None:
        self._leave_out_borrowed()

    def _leave_out_borrowed(self) -> None:
        """Restore the gradients and buffers from before a pass over borrowed data."""
        if self._own is not None:
            gradients, buffers = self._own
            for parameter, gradient in zip(self._trained, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in zip(self.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            self._own = None
