"""Average the gradients of all workers in every step, while backward runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn import Parameter

from paceline.peers.exchange import BackwardPass, PeersExchange
from paceline.peers.group import Peers
from paceline.peers.reducer import Outcome, Reducer
from paceline.policies import AllReduce


class AllReduceExchange(PeersExchange):
    """Average the gradients of ``model`` over ``peers`` in every step; its buffers follow worker 0's."""

    common_state = ("order", "assumed_total")

    def __init__(self, model: nn.Module, peers: Peers, policy: AllReduce) -> None:
        super().__init__(model, peers)
        self._reducer = self.make_reducer(list(model.named_parameters()), policy, sparse_parameters(model))
        self._accumulated: list[tuple[int, int | None]] = []  # examples and total of the passes kept so far

    def make_reducer(
        self, parameters: Sequence[tuple[str, Parameter]], policy: AllReduce, sparse: frozenset[str]
    ) -> Reducer:
        return Reducer(parameters, self._peers, policy, sparse)

    def accumulate(self, *, examples: int, total: int | None) -> None:
        self._reducer.disarm()
        self._accumulated.append((examples, total))
        self._reducer.weigh(_weight(examples, total))

    def begin(self, backward: BackwardPass) -> None:
        examples, total, loss, stop, tag = backward
        passes = [*self._accumulated, (examples, total)]
        self._accumulated = []
        if len(passes) > 1 and all(known is not None for _, known in passes):
            self._reducer.arm(examples=examples, total=total, loss=loss, stop=stop, tag=tag, weighted=True)
            self._reducer.weigh(_weight(examples, total))
            return
        # Without totals all passes of a worker get one weight, by their examples together.
        self._reducer.arm(examples=sum(count for count, _ in passes), total=total, loss=loss, stop=stop, tag=tag)
        if len(passes) > 1:
            self._reducer.weigh(_weight(examples, None))

    def finish(self) -> Outcome:
        outcome = self._reducer.finish()
        self.follow_buffers()  # here and not before forward, so that between steps all workers have the same
        return outcome

    def release(self, *, failed: bool = False) -> None:
        if failed:
            self._accumulated = []
        self._reducer.disarm(failed=failed)

    def state_dict(self) -> dict[str, Any]:
        return self._reducer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self._reducer.load_state_dict(state)

    def close(self) -> None:
        self._reducer.close()


def _weight(examples: int, total: int | None) -> float:
    """The weight of a pass's gradients among all workers'; without a total 1, or 0 for borrowed data."""
    return examples / total if total is not None else float(examples > 0)


def sparse_parameters(model: nn.Module) -> frozenset[str]:
    """Name the parameters whose gradients are sparse."""
    return frozenset(
        f"{prefix}.weight".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    )
