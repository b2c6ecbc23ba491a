"""What each worker of a replay has of the parameters, if they were sent through a codec."""

from __future__ import annotations

from torch import Tensor

from paceline.codecs import Codec
from paceline.replay.plan import Plan, RecordedPush
from paceline.store.behind import Behind
from paceline.store.layout import ModelLayouts


class SentParameters:
    """Follows what was sent to each worker; without a codec for the way down, all have the server's parameters."""

    def __init__(self, plan: Plan, codec: Codec | None, layouts: ModelLayouts, *, seed: int) -> None:
        self._plan, self._layouts, self._seed = plan, layouts, seed
        self._codec = codec if codec is not None and codec.both else None
        self._steps = {(push.told.rank, push.told.step) for push in plan.pushes}
        self._behind: dict[tuple[int, int], Behind] = {}  # by rank, and how often it had joined
        self._sent: dict[tuple[int, int], list[Tensor]] = {}  # by rank and step, until its push
        self._last: dict[int, list[Tensor]] = {}  # by rank, of its last push

    def send(self, version: int, parameters: list[Tensor]) -> None:
        """Send all that was sent of a version, which are the present parameters and buffers."""
        if self._codec is None:
            return
        for sent in self._plan.sends.get(version, ()):
            life = sent.rank, sent.joined  # of its codec
            if life not in self._behind:
                self._behind[life] = Behind(self._codec, self._layouts, seed=self._seed % 2**63, rank=sent.rank)
            behind = self._behind[life]
            behind.lacks_all = sent.again
            if not sent.packet or behind.encode(parameters, version=version) is None:
                behind.take_all(parameters, version=version if sent.step >= 0 else -1)
            if (sent.rank, sent.step) in self._steps:
                self._sent[sent.rank, sent.step] = views = [tensor.clone() for tensor in parameters]
                behind.write(views)

    def read_by(self, push: RecordedPush, parameters: list[Tensor]) -> list[Tensor]:
        """The parameters and buffers that a push was computed from."""
        if self._codec is None:
            return parameters
        rank = push.told.rank
        if push.fresh:
            self._last[rank] = self._sent.pop((rank, push.told.step))
        return self._last[rank]
