"""Update parameters in memory that all workers share, without locks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from paceline.peers.group import Peers
from paceline.peers.recorded import RecordedExchange
from paceline.peers.without_locks import WithoutLocks
from paceline.policies import Hogwild, Progress


class HogwildExchange(WithoutLocks):
    """Let the optimizers of all workers of ``peers`` update the same parameters, whenever they come to it.

    The parameters of the ``model`` are views of the shared memory, from the start of the run to its end. Where all look
    at the answer, each has a copy of it: one that looks for longer is not disturbed by others that go on. Buffers such
    as BatchNorm's are each worker's own, and averaged in the answer.
    """

    shares_parameters = True

    def __init__(self, model: nn.Module, peers: Peers, policy: Hogwild) -> None:
        super().__init__(model, peers, policy)
        self._views = _views.setdefault(model, Views(self._trained))

    def first_values(self) -> Sequence[Tensor]:
        return self._trained

    def enter(self) -> None:
        self._views.enter(self.shared)

    # A step -----------------------------------------------------------------------------------------------

    def accumulate(self, *, examples: int, total: int | None) -> None:
        self.races.read()
        super().accumulate(examples=examples, total=total)

    def before_update(self) -> None:
        self.races.write()

    def updated(self, progress: Progress) -> bool:
        self.races.wrote()
        return super().updated(progress)

    def release(self, *, failed: bool = False) -> None:
        super().release(failed=failed)
        if failed:
            self.races.give_up()

    # The answer -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        own = [buffer.clone() for buffer in self.buffers()]
        self.rest()
        with self._views.aside():
            self.confirm()
            self.load_answer()
            try:
                yield
            finally:
                with torch.no_grad():
                    for buffer, value in zip(self.buffers(), own, strict=True):
                        buffer.copy_(value)

    def conclude(self) -> None:
        self.rest()
        with self._views.aside():
            self.confirm()
            self.load_answer()
            self._views.leave()
        self.forget_memory()

    def close(self) -> None:
        super().close()
        self._views.leave()


def make_hogwild(model: nn.Module, peers: Peers, policy: Hogwild) -> WithoutLocks:
    """Make the exchange of the policy, or of its recorded form."""
    return (RecordedExchange if policy.record else HogwildExchange)(model, peers, policy)


class Views:
    """The parameters of a model: views of shared memory, or aside, with values of their own."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._shared: Sequence[Tensor] | None = None
        self._aside = 0
        self._inside = False

    def enter(self, shared: Sequence[Tensor]) -> None:
        """Have the values of these tensors, which others change."""
        self._shared = shared
        self._settle()

    def leave(self) -> None:
        """Keep the present values."""
        self._shared = None
        self._settle()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Keep the present values inside the block, during which the memory may become another."""
        self._aside += 1
        self._settle()
        try:
            yield
        finally:
            self._aside -= 1
            self._settle()

    def _settle(self) -> None:
        if self._shared is not None and not self._aside:
            values: Sequence[Tensor] = self._shared
        elif self._inside:
            values = [parameter.data.clone() for parameter in self._parameters]
        else:
            return
        self._inside = values is self._shared
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value


# A block in which parameters are aside may outlive the exchange.
_views: weakref.WeakKeyDictionary[nn.Module, Views] = weakref.WeakKeyDictionary()
