"""Averages gradients over all workers, bucket by bucket, while backward still computes the rest.

A step begins with ``arm``, before backward. Each parameter's hook copies its finished gradient, weighted, into a flat
bucket. A full bucket is reduced as soon as all buckets before it have been started. When backward ends, the reducer
waits for all of them. Gradients are then views of the buckets (Li et al., VLDB 2020).

The last bucket also carries control numbers after its gradients, which saves rounds of their own: see ``control.py``.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.errors import CommError, UsageError
from paceline.peers.buckets import Item, aligned_offsets, plan_buckets
from paceline.peers.control import Control
from paceline.peers.group import Peers, Pending
from paceline.policies import AllReduce

MB = 1 << 20


@dataclass
class Bucket:
    """Gradients that are reduced together: one flat tensor, and the number of gradients still missing."""

    flat: Tensor
    indices: list[int]
    missing: int = 0
    work: Pending | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of an exchange: totals over all workers, and its times."""

    examples: int
    loss: float | None  # the mean of the losses that workers recorded before backward ended
    backward_ended: float  # by time.perf_counter()
    exposed_seconds: float  # from then until the gradients were averaged
    waited_seconds: tuple[float, ...]  # by rank: seconds of waiting for the slowest worker
    stop: bool  # whether any worker was asked to stop


@dataclass
class _Step:
    """The state of the exchange under way."""

    scale: float  # of this worker's gradients
    examples: int
    total: int  # of all workers' examples, known or assumed
    known: bool
    loss: Callable[[], float | None]
    stop: Callable[[], bool]
    tag: int
    borrowed: bool  # whether the worker has no examples of its own in this update
    arrived: set[int] = field(default_factory=set)
    launched: int = 0
    callback_queued: bool = False

    @property
    def used(self) -> set[int]:
        """The parameters that this worker used; none on borrowed examples."""
        return set() if self.borrowed else self.arrived


class Reducer:
    """Averages the gradients of ``parameters`` over ``peers``; a model has one reducer."""

    control_alone = False  # whether the control numbers have a bucket of their own

    def __init__(
        self,
        parameters: Sequence[tuple[str, Parameter]],
        peers: Peers,
        policy: AllReduce,
        sparse: frozenset[str] = frozenset(),
    ) -> None:
        self._names = [name for name, _ in parameters]
        self._parameters = [parameter for _, parameter in parameters]
        self._sparse = [index for index, name in enumerate(self._names) if name in sparse]
        self._peers = peers
        self._policy = policy
        self._overlaps = policy.overlap and peers.overlaps()
        self._steps = 0
        self._assumed_total = peers.size
        self._step: _Step | None = None
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._order: list[int] = []  # of the gradients' arrival in the first step
        self._rebuilt = False
        self._built_at = 0  # the exchange before which the buckets were planned from the registration order
        self._left_at = time.perf_counter()
        self.outcome: Outcome | None = None  # of the step's exchange, once it is finished
        self._trained: list[bool] = []
        self._broken = False
        self._incoming = 1.0
        self._weighing: list[torch.utils.hooks.RemovableHandle] = []
        self._build()

    # A step -----------------------------------------------------------------------------------------------

    def arm(
        self,
        *,
        examples: int = 1,
        total: int | None = None,
        loss: Callable[[], float | None] = lambda: None,
        stop: Callable[[], bool] = lambda: False,
        tag: int | None = None,
        weighted: bool = False,
    ) -> None:
        """Exchange the gradients of the next backward pass, weighted by ``examples`` / ``total``.

        Without a ``total`` the last step's is assumed, and the result is corrected after the exchange. At the end of
        backward ``loss`` returns this worker's loss, if known, and ``stop`` whether it was asked to stop. ``tag``
        must be the same on all workers. ``weighted`` gradients have their weights already, from ``weigh``.
        """
        if self._broken or (self._step is not None and self._step.launched > 0):
            raise CommError(
                f"worker {self._peers.rank}, exchange {self._steps}: a step failed while its gradients were being "
                "exchanged, so the other workers cannot follow; end the run and resume it from its last checkpoint"
            )
        if [parameter.requires_grad for parameter in self._parameters] != self._trained:
            self._build()
        elif not self._rebuilt and self._steps > self._built_at:
            self._rebuild_in_true_order()
        assumed = total if total is not None else self._assumed_total
        for bucket in self._buckets:
            bucket.missing = len(bucket.indices)
            bucket.work = None
        if self._incoming != 1.0 and not weighted:
            self.weigh(1.0)
        self._step = _Step(
            scale=1.0 if weighted else examples / assumed,
            examples=examples,
            total=assumed,
            known=total is not None,
            loss=loss,
            stop=stop,
            tag=self._steps if tag is None else tag,
            borrowed=examples == 0 and not weighted,
        )
        self.outcome = None

    def disarm(self, *, failed: bool = False) -> None:
        """Stop exchanging gradients.

        If the step ``failed`` after its exchange had begun, later exchanges raise: the others went on without this
        worker.
        """
        if failed and (self.outcome is not None or (self._step is not None and self._step.launched > 0)):
            self._broken = True
        self._step = None
        self.outcome = None

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in [*self._hooks, *self._weighing]:
            hook.remove()
        self._hooks, self._weighing = [], []

    def weigh(self, factor: float) -> None:
        """Multiply gradients by ``factor`` as they come, before they are added to those of earlier passes."""
        self._incoming = factor
        if not self._weighing:
            self._weighing = [
                parameter.register_hook(self._weighed)  # type: ignore[no-untyped-call]
                for parameter in self._parameters
                if parameter.requires_grad
            ]

    def _weighed(self, grad: Tensor) -> Tensor | None:
        if self._incoming == 1.0:
            return None
        # Zeros, not times 0: the gradient of borrowed data may be NaN or infinite.
        return grad * self._incoming if self._incoming else torch.zeros_like(grad)

    def finish(self) -> Outcome:
        """Complete the armed exchange, even if no backward pass has run."""
        if self._step is not None:
            self._finish()
        assert self.outcome is not None, "finish() without arm()"
        return self.outcome

    def _ready(self, index: int) -> None:
        """The hook of a parameter: its gradient is complete."""
        step = self._step
        if step is None:
            if self.outcome is not None:
                raise UsageError(
                    f"worker {self._peers.rank}: a second backward() in one step, after its gradients were averaged; "
                    "add the losses up and call backward() once, or use step(accumulate=True) for all but the last "
                    "(activation checkpointing needs use_reentrant=False)"
                )
            return
        if not step.callback_queued:
            step.callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        step.arrived.add(index)
        if not self._rebuilt:
            self._order.append(index)
        bucket = self._bucket_of.get(index)
        if bucket is not None and self._overlaps:  # else all are copied at the end, which is cheaper per gradient
            self._put_in_bucket(index, step)
            bucket.missing -= 1
            if bucket.missing == 0:
                with self._peers.explain(f"averaging gradients in its exchange {self._steps}"):
                    self._launch_full(step)

    def _put_in_bucket(self, index: int, step: _Step) -> None:
        """Copy a gradient, weighted, into its bucket."""
        view, parameter = self._views[index], self._parameters[index]
        grad = parameter.grad
        assert grad is not None, "a gradient hook fires after the gradient is there"
        if grad.layout != torch.strided:
            raise UsageError(
                f"{self._names[index]} has a sparse gradient but belongs to no Embedding(sparse=True); "
                "make its gradient dense"
            )
        if step.borrowed:
            view.zero_()  # not times 0: gradients of borrowed data may be NaN or infinite
        elif grad.data_ptr() == view.data_ptr():
            view.mul_(step.scale)
        else:
            torch.mul(grad.detach(), step.scale, out=view)
        parameter.grad = view

    def _launch_full(self, step: _Step) -> None:
        """Start full buckets in order: later ones wait, so that all workers reduce in the same order."""
        while step.launched < len(self._buckets) - 1 and self._buckets[step.launched].missing == 0:
            bucket = self._buckets[step.launched]
            bucket.work = self._peers.all_reduce(bucket.flat, now=not self._overlaps)
            step.launched += 1

    def _reduce_last(self, step: _Step) -> None:
        """Reduce the bucket with the control numbers on this thread, which has nothing else to do."""
        self._control.fill(
            tag=step.tag,
            examples=step.examples,
            total=step.total,
            loss=step.loss(),
            stop=step.stop(),
            used=step.used,
            compute_seconds=time.perf_counter() - self._left_at,
        )
        step.launched += 1
        self._buckets[-1].work = self._peers.all_reduce(self._buckets[-1].flat, now=True)

    def _finish(self) -> None:
        """After backward: start the remaining buckets, wait for all, and set the gradients."""
        step = self._step
        if step is None:
            return
        ended = time.perf_counter()
        self._broken = True  # until the exchange is complete
        with self._peers.explain(f"averaging gradients in its exchange {self._steps}"):
            self._launch_rest(step)
            self._reduce_last(step)
            for bucket in self._buckets:
                assert bucket.work is not None
                bucket.work.wait()
        told = self._control.read(step.tag, step.total)
        with self._peers.explain(f"averaging sparse gradients in its exchange {self._steps}"):
            self._reduce_sparse(step, told.examples)
        self._broken = False
        self._correct_scale(step, told.examples)
        self._settle_unused(step, told.used)
        self._left_at = time.perf_counter()
        exposed = self._left_at - ended
        self.outcome = Outcome(told.examples, told.loss, ended, exposed, told.waited_seconds, told.stop)
        self._steps += 1
        self._step = None

    def _launch_rest(self, step: _Step) -> None:
        """Fill in the gradients that did not come in this backward pass, and start the remaining buckets."""
        for index, view in self._views.items():
            if self._overlaps and index in step.arrived:
                continue
            if self._parameters[index].grad is not None:
                self._put_in_bucket(index, step)
                step.arrived.add(index)  # or left by an accumulating pass
            else:
                view.zero_()
        for bucket in self._buckets:
            bucket.missing = 0
        self._launch_full(step)

    def _correct_scale(self, step: _Step, examples: int) -> None:
        self._assumed_total = examples if examples > 0 else self._peers.size
        if step.known and examples != step.total:
            raise CommError(
                f"worker {self._peers.rank}: this step should have {step.total} examples on all workers, but they "
                f"report {examples}; do all of them use the same data?"
            )
        if examples != step.total and examples > 0:
            for bucket in self._buckets:
                bucket.flat.mul_(step.total / examples)

    def _settle_unused(self, step: _Step, used: Callable[[int], bool]) -> None:
        """Clear the gradients of parameters that no worker used, so that no optimizer updates their state."""
        for index in self._views.keys() - step.used:
            self._parameters[index].grad = self._views[index] if used(index) else None

    def _reduce_sparse(self, step: _Step, examples: int) -> None:
        for index in self._sparse:
            parameter = self._parameters[index]
            if not parameter.requires_grad:
                continue
            grad = parameter.grad
            if grad is None or step.borrowed:
                empty = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
                values = parameter.new_empty((0, *parameter.shape[1:]))
                grad = torch.sparse_coo_tensor(empty, values, parameter.shape, check_invariants=False)
            weight = step.scale * step.total / max(1, examples)
            summed = (grad.detach() * weight).coalesce()
            self._peers.all_reduce(summed).wait()
            parameter.grad = summed if summed._nnz() else None

    # State ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that rounding depends on: sums over three or more workers depend on the place in a bucket.

        Worker 0's state is right for all.
        """
        planned = self._rebuilt or self._steps > self._built_at
        return {"order": self._true_order() if planned else None, "assumed_total": self._assumed_total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the buckets of an earlier run, unless other parameters are trained now; all workers call this."""
        self._assumed_total = state["assumed_total"]
        if state["order"] is not None and sorted(state["order"]) == sorted(self._views):
            self._build(state["order"])

    # Buckets ----------------------------------------------------------------------------------------------

    def _build(self, order: Sequence[int] | None = None) -> None:
        """Plan the buckets and lay out the gradients in them."""
        self.close()
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        dense = [index for index, on in enumerate(self._trained) if on and index not in self._sparse]
        self._rebuilt = order is not None
        if order is None:
            order = dense[::-1]
            self._order, self._built_at = [], self._steps
        else:
            self._order = list(order)
        plan = plan_buckets(
            [Item(p.numel(), p.element_size(), (p.dtype, p.device)) for p in self._parameters],
            order,
            cap=int(self._policy.bucket_cap_mb * MB),
            first_cap=int(self._policy.first_bucket_mb * MB),
        )
        self._agree_on(plan)
        self._views: dict[int, Tensor] = {}
        self._buckets: list[Bucket] = []
        self._lay_out(plan)
        self._bucket_of = {index: bucket for bucket in self._buckets for index in bucket.indices}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, index=index: self._ready(index)
            )
            for index, parameter in enumerate(self._parameters)
            if self._trained[index]
        ]

    def _lay_out(self, plan: list[list[int]]) -> None:
        """Make the flat tensors; the last float32 one has the control numbers after its gradients."""
        if self.control_alone or not plan or self._parameters[plan[-1][0]].dtype != torch.float32:
            plan = [*plan, []]
        control_length = Control.length(len(self._parameters), self._peers.size)
        for indices in plan:
            first = self._parameters[indices[0]] if indices else torch.empty(0, device=self._peers.device)
            sizes = [self._parameters[index].numel() for index in indices]
            last = indices is plan[-1]
            offsets, end = aligned_offsets([*sizes, *([control_length] if last else [])], first.element_size())
            flat = self._peers.buffer(end, first.dtype, first.device)
            for index, offset in zip(indices, offsets, strict=False):
                self._views[index] = _view_like(flat, offset, self._parameters[index])
            if last:
                numbers = flat[offsets[-1] : offsets[-1] + control_length]
                self._control = Control(numbers, self._peers, len(self._parameters))
            self._buckets.append(Bucket(flat, indices))

    def _rebuild_in_true_order(self) -> None:
        """Order the buckets by the arrival of rank 0's gradients in the first step."""
        with self._peers.explain("agreeing on the order of gradients"):
            order = self._peers.share(self._true_order())
        self._build(order)

    def _true_order(self) -> list[int]:
        """The order in which gradients came; parameters without one are last."""
        came = list(dict.fromkeys(index for index in self._order if index in self._views))
        return came + sorted(self._views.keys() - set(came), reverse=True)

    def _agree_on(self, plan: list[list[int]]) -> None:
        """Raise unless all workers have the same buckets: another order would silently give wrong averages."""
        digest = int.from_bytes(hashlib.sha256(repr(plan).encode()).digest()[:7], "big")
        mine = torch.tensor([digest], device=self._peers.device)
        with self._peers.explain("comparing the order of gradients"):
            digests = [int(other) for other in self._peers.all_gather(mine)]
        others = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if others:
            raise CommError(
                f"worker {self._peers.rank}, exchange {self._steps}: workers {others} have other gradient buckets than "
                "worker 0; all must train the same parameters, frozen and unfrozen in the same steps"
            )


def _view_like(flat: Tensor, offset: int, parameter: Parameter) -> Tensor:
    """The view of a bucket for this parameter, with the parameter's memory layout."""
    piece = flat[offset : offset + parameter.numel()]
    dense = torch.empty_like(parameter, device="meta")  # keeps the strides of any dense layout
    return piece.as_strided(parameter.shape, dense.stride())
