"""Averages gradients over all workers as packets of a codec, bucket by bucket, while backward goes on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.codecs import Part, Parts
from paceline.collectives.calls import Calls
from paceline.errors import CommError, UsageError
from paceline.peers.all_reduce import AllReduceExchange
from paceline.peers.coding import CodedSum, Coding
from paceline.peers.group import Peers, Pending
from paceline.peers.reducer import Bucket, Outcome, Reducer, _Step
from paceline.policies import AllReduce


class CodedReducer(Reducer):
    """Averages gradients as ``Reducer`` does, each bucket by a codec; the control numbers stay exact.

    The buckets keep the reverse order of registration, since what a codec remembers belongs to one bucket. If some
    gradients are not finite, the codecs remember nothing of the step.
    """

    control_alone = True

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        peers: Peers,
        policy: AllReduce,
        sparse: frozenset[str],
        coding: Coding,
    ) -> None:
        self._coding = coding
        self._sums: list[CodedSum] = []  # of the buckets, once the first step begins
        self._calls: Calls | None = None  # where sums are made in the background
        for name, parameter in parameters:
            if parameter.is_complex():
                raise UsageError(f"{name} is complex, and codec {coding.codec} wants real numbers; train without one")
        super().__init__(parameters, peers, policy, sparse)

    def settle(self) -> None:
        """The step's sums are used on all workers."""
        for each in self._sums:
            each.settle()

    def close(self) -> None:
        super().close()
        if self._calls is not None:
            self._calls.fail(CommError("the exchange is closed"))
            self._calls = None

    def _build(self, order: Sequence[int] | None = None) -> None:
        if self._sums:  # the parameters that are trained have changed
            self._coding.forget()
            self._sums = []
        if order is None:
            trained = [index for index, each in enumerate(self._parameters) if each.requires_grad]
            order = [index for index in reversed(trained) if index not in self._sparse]
        super()._build(order)

    def _launch_full(self, step: _Step) -> None:
        while step.launched < len(self._buckets) - 1 and self._buckets[step.launched].missing == 0:
            bucket = self._buckets[step.launched]
            bucket.work = self._start(self._sum_of(step.launched), bucket.flat)
            step.launched += 1

    def _sum_of(self, number: int) -> CodedSum:
        if not self._sums:
            for bucket in self._buckets[:-1]:
                name = ",".join(map(str, bucket.indices))
                self._sums.append(self._coding.sum_of(name, self._parts(bucket)))
        return self._sums[number]

    def _parts(self, bucket: Bucket) -> Parts:
        flat = bucket.flat
        views = [self._views[index] for index in bucket.indices]
        offsets = [(view.data_ptr() - flat.data_ptr()) // flat.element_size() for view in views]
        tensors = tuple(Part(offset, _in_memory(view)) for offset, view in zip(offsets, views, strict=True))
        return Parts(flat.numel(), tensors, flat.dtype)

    def _start(self, coded: CodedSum, flat: Tensor) -> Pending:
        if not (self._overlaps and self._peers.has_threads()):
            return self._coding.start_gradients(coded, flat)
        if self._calls is None:
            self._calls = Calls("codec", at_end=lambda: None)
        threads = torch.get_num_threads()
        return _Later(self._calls.submit(functools.partial(_sum, self._coding, coded, flat, threads)))

    def _launch_rest(self, step: _Step) -> None:
        began = time.perf_counter()
        super()._launch_rest(step)
        works = [bucket.work for bucket in self._buckets[:-1]]
        for work in works:
            assert work is not None
            work.wait()
        if any(bool(self._views[bucket.indices[0]].flatten()[:1].isnan()) for bucket in self._buckets[:-1]):
            for each in self._sums:
                each.undo()
        self._left_at += time.perf_counter() - began  # the control numbers, which come now, tell of computing alone

    def _correct_scale(self, step: _Step, examples: int) -> None:
        super()._correct_scale(step, examples)
        if examples > 0:
            for each in self._sums:
                each.rescale(step.total / examples)

    def _settle_unused(self, step: _Step, used: Callable[[int], bool]) -> None:
        # What was remembered of a parameter may come in a step that does not use it.
        super()._settle_unused(step, lambda index: used(index) or bool(self._views[index].any()))


class CodedAllReduceExchange(AllReduceExchange):
    """Average the gradients of ``model`` over ``peers`` as packets of a codec."""

    _reducer: CodedReducer

    def __init__(self, model: nn.Module, peers: Peers, policy: AllReduce, coding: Coding) -> None:
        self.coding = coding
        super().__init__(model, peers, policy)

    def make_reducer(
        self, parameters: Sequence[tuple[str, Parameter]], policy: AllReduce, sparse: frozenset[str]
    ) -> CodedReducer:
        assert self.coding is not None
        return CodedReducer(parameters, self._peers, policy, sparse, self.coding)

    def finish(self) -> Outcome:
        outcome = super().finish()
        self._reducer.settle()
        return outcome


class _Later:
    """A sum in the background."""

    def __init__(self, future: Future[None]) -> None:
        self.wait = future.result


def _sum(coding: Coding, coded: CodedSum, flat: Tensor, threads: int) -> None:
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)  # bits may depend on it
    with torch.no_grad():
        coding.start_gradients(coded, flat).wait()


def _in_memory(view: Tensor) -> tuple[int, ...]:
    """The shape of a tensor as its numbers lie in memory."""
    strides = view.stride()
    return tuple(view.shape[dim] for dim in sorted(range(view.dim()), key=lambda dim: -strides[dim]))
