"""How commits are made of pushes, as one value that all who drive a policy give to their store."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from torch import Tensor

from paceline.aggregators import Aggregator, Mean, Needs, aggregator_of
from paceline.codecs import Codec, Parts, Sign
from paceline.errors import UsageError
from paceline.policies.messages import PushKind
from paceline.policies.server import ServerPolicy
from paceline.store.remembered import Remembered
from paceline.train_state import TrainState


@dataclass(frozen=True, kw_only=True)
class CommitRule:
    """How a policy's commits are made of pushes."""

    adds_up: bool  # every commit is of all pushes since the last, weighted by their examples
    aggregator: Aggregator = field(default_factory=Mean)
    kind: PushKind = PushKind.GRADIENT
    coded: bool = False  # a push is the weighted sum of the gradients of several batches
    codec: Codec | None = None  # of pushes

    @classmethod
    def of(cls, policy: ServerPolicy, codec: Codec | None = None, *, servers: int = 1) -> Self:
        """The rule of a policy; raise if its pushes cannot go through the codec."""
        aggregator = aggregator_of(policy)
        if codec is not None:
            _check_codec(codec, policy, aggregator, servers)
        return cls(adds_up=policy.adds_up, aggregator=aggregator, kind=policy.kind, coded=policy.coded, codec=codec)

    def remembering(self, train_state: TrainState) -> TrainState:
        """The same, with a place for what the aggregator remembers, if it remembers anything."""
        if not self.aggregator.remembers or train_state.remembered is not None:
            return train_state
        return replace(train_state, remembered=Remembered(train_state.model.parameters()))

    def check_optimizers(self, train_state: TrainState) -> None:
        """Raise if the optimizers' momentum would multiply what the codec leaves out on both ways."""
        codec = self.codec
        if not isinstance(codec, Sign) or not codec.both or self.kind is not PushKind.GRADIENT:
            return
        if any(group.get("momentum") for optimizer in train_state.optimizers for group in optimizer.param_groups):
            raise codec.mistake(
                "both=true leaves errors on both ways for later steps, and momentum multiplies them until the model "
                "does not learn; use an optimizer without momentum, or both=false"
            )

    @property
    def codec_remembers(self) -> bool:
        """Whether workers keep back some of what they push, which is lost with them."""
        return self.codec is not None and bool(_memory_of(self.codec))

    @property
    def keeps_pushes(self) -> bool:
        """Whether pushes are kept until their commit, and not added to a sum when they come."""
        return not self.adds_up or self.aggregator.needs is not Needs.SUM

    @property
    def compares(self) -> bool:
        """Whether the pushes of a commit are compared in pairs before they are combined."""
        return self.aggregator.needs is Needs.PAIRS

    @property
    def with_reads(self) -> bool:
        """Whether the parameters that a worker read travel with its push."""
        return self.aggregator.needs is Needs.READS


def _memory_of(codec: Codec) -> dict[str, Tensor]:
    return codec.new_state(Parts.one(1), seed=0).memory


def _check_codec(codec: Codec, policy: ServerPolicy, aggregator: Aggregator, servers: int) -> None:
    memory = _memory_of(codec)
    own = policy.kind is PushKind.PARAMETERS
    if (codec.both or own) and "momentum" in memory:
        what = "both=true sends" if codec.both else f"under {policy} workers push"
        raise codec.mistake(f"{what} changes of parameters, which have no momentum; use momentum=0")
    if getattr(codec, "vote", "none") != "none":
        raise codec.mistake(f"under {policy} the server combines pushes, by its aggregator; use vote=none")
    if codec.both and servers > 1:
        raise codec.mistake(f"both=true is for one server, which knows what each worker has; there are {servers}")
    reason = None
    if own and codec.both:
        reason = "workers have parameters of their own and are sent no others; use both=false"
    elif aggregator.whole:
        reason = "the workers of a group must push the same bits, and each has a codec of its own"
    elif policy.coded and memory:
        reason = "a commit weighs each push otherwise, so what a codec keeps for the next push would change its weight"
    if reason is not None:
        raise UsageError(f"codec {codec} cannot be used under {policy}: {reason}")
