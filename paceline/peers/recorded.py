"""Hogwild by blocks with versions, so that what each worker has read and written can be recorded and replayed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import CommError, UsageError
from paceline.launch.reports import report
from paceline.peers.block_trace import MOST_BLOCKS, BlockTrace, read_block_traces, trace_file
from paceline.peers.group import Peers
from paceline.peers.without_locks import NUM_WORDS, WithoutLocks
from paceline.policies import Hogwild, Progress
from paceline.record.fingerprints import hash_of
from paceline.record.trace import Ended, Hashed, Met, Stepped, TraceWriter

_WAIT = 20e-6  # seconds between two looks at a block in a replay


class RecordedExchange(WithoutLocks):
    """Let the workers of ``peers`` copy each shared parameter before a step, and update one after the other.

    Each parameter is a block with a version and a lock. A worker has a replica: it copies the blocks that others have
    changed since, computes, and then, block by block, lets its optimizer make the step on the newest version. What
    others did in between is recorded, and determines the run.

    In a replay, a worker waits at each block for the version that it had in the run; and before it makes the next one,
    for all who copied this one in the run.
    """

    shares_parameters = True
    records = True

    def __init__(self, model: nn.Module, peers: Peers, policy: Hogwild) -> None:
        super().__init__(model, peers, policy)
        blocks = len(self._trained)
        if blocks > MOST_BLOCKS:
            raise UsageError(f"policy {policy} records at most {MOST_BLOCKS} parameters, found {blocks}")
        self.num_more_words = 2 * blocks
        self.step = self._step
        self._block_of = {parameter: block for block, parameter in enumerate(self._trained)}
        self._had = [0] * blocks  # the version of each block in the replica
        self._has_read = False
        self._steps_made = 0
        self._trace: TraceWriter | None = None
        self._plan: _Plan | None = None
        self._stopped = False

    def first_values(self) -> Sequence[Tensor]:
        return self._trained

    def enter(self) -> None:
        blocks = len(self._trained)
        words = self.memory().words
        self._versions = words[NUM_WORDS : NUM_WORDS + blocks]
        self._copies = words[NUM_WORDS + blocks : NUM_WORDS + 2 * blocks]  # in a replay, of the present version
        for block in range(blocks):
            self._copy(block)

    def record(self, run: Path, about: Mapping[str, Any], replay: Path | None) -> None:
        if replay is None:
            self._trace = TraceWriter(trace_file(run, self.rank), {**about, "blocks": len(self._trained)})
        else:
            self._plan = _Plan(read_block_traces(replay, self.world_size), self.rank)

    # A step -----------------------------------------------------------------------------------------------

    def accumulate(self, *, examples: int, total: int | None) -> None:
        if not self._has_read:
            self._has_read = True
            self.races.read()
            with torch.no_grad():
                self._read()
        super().accumulate(examples=examples, total=total)

    def _read(self) -> None:
        for block, had in enumerate(self._had):
            if self._plan is not None:
                if (version := self._plan.met(block, writing=False)) is not None:
                    for _ in self._locked_when(block, version):
                        self._copy(block)
                        self._copies[block] += 1
            elif self._versions[block] != had:
                with self.memory().locked_part(block):
                    self._copy(block)
                self._note(block, writing=False)

    def _copy(self, block: int) -> None:
        with torch.no_grad():
            self._trained[block].copy_(self.shared[block])
        self._had[block] = self._versions[block]

    def _note(self, block: int, *, writing: bool) -> None:
        if self._trace is not None:
            self._trace.append(Met(block, self._had[block], writing))

    def before_update(self) -> None:
        with self.memory().locked_part(len(self._trained)):
            self.races.write()

    def _step(self, optimizer: Optimizer) -> None:
        """Let the optimizer make its step one parameter at a time."""
        groups = optimizer.param_groups
        own = [group["params"] for group in groups]
        try:
            for group, parameters in zip(groups, own, strict=True):
                optimizer.param_groups = [group]
                for parameter in parameters:
                    if parameter.grad is not None:
                        group["params"] = [parameter]
                        self._write(self._block_of[parameter], optimizer)
        finally:
            optimizer.param_groups = groups
            for group, parameters in zip(groups, own, strict=True):
                group["params"] = parameters

    def _write(self, block: int, optimizer: Optimizer) -> None:
        if self._plan is None:
            with self.memory().locked_part(block):
                self._update(block, optimizer)
            return
        met = self._plan.met(block, writing=True)
        version = self._had[block] if met is None else met
        for _ in self._locked_when(block, version, copies=self._plan.copies[block, version]):
            self._update(block, optimizer)
            self._copies[block] = 0

    def _update(self, block: int, optimizer: Optimizer) -> None:
        if self._versions[block] != self._had[block]:
            self._copy(block)
            self._note(block, writing=True)
        optimizer.step()
        with torch.no_grad():
            self.shared[block].copy_(self._trained[block])
        self._versions[block] = self._had[block] = self._had[block] + 1

    def _locked_when(self, block: int, version: int, *, copies: int = 0) -> Iterator[None]:
        """Once, in the lock of a block, when it has this version and so many have copied it."""
        while True:
            with self.memory().locked_part(block):
                if self._versions[block] > version:
                    raise CommError(
                        f"worker {self.rank}, step {self._steps_made + 1}: the replay has left the order of the run: "
                        f"block {block} has version {self._versions[block]}, wanted {version}"
                    )
                if self._versions[block] == version and self._copies[block] >= copies:
                    yield
                    return
            time.sleep(_WAIT)

    def updated(self, progress: Progress) -> bool:
        self.races.wrote()
        self._has_read = False
        self._steps_made += 1
        if self._trace is not None:
            self._trace.append(Stepped())
        if self._plan is not None:
            self._plan.next()
        return super().updated(progress)

    def after_update(self, progress: Progress) -> bool:
        self._stopped = super().after_update(progress)
        if self._plan is not None and self._plan.over and not self._plan.whole:
            with self.averaged():
                self._tell()
            return True
        return self._stopped

    def release(self, *, failed: bool = False) -> None:
        super().release(failed=failed)
        if failed:
            self.races.give_up()
            self._has_read = False

    # The answer and the end -------------------------------------------------------------------------------

    def load_answer(self) -> None:
        self.rest()
        with torch.no_grad():
            for parameter, shared in zip(self._trained, self.shared, strict=True):
                parameter.copy_(shared)
        self.confirm()
        super().load_answer()
        if self.rank == 0 and (self._trace is not None or self._plan is not None):
            digest = hash_of([*self._trained, *self.buffers()])
            if self._trace is not None:
                self._trace.append(Hashed(self._steps_made, digest))
            if self._plan is not None:
                self._plan.compare(self._steps_made, digest)

    def conclude(self) -> None:
        self.load_answer()
        self._end(whole=True)
        self.forget_memory()

    def _end(self, *, whole: bool) -> None:
        if self._trace is not None:
            self._trace.append(Ended(whole))
            self._trace.close()
            self._trace = None
        if self._plan is not None and whole:
            self._tell()

    def _tell(self) -> None:
        if self._plan is not None and self.rank == 0:
            report("replayed", result=self._plan.result(self._steps_made, self.races.told()["updates"]))

    def close(self) -> None:
        super().close()
        if self._stopped:
            self._end(whole=False)
        elif self._trace is not None:  # a step has failed, or a worker has died
            self._trace.close()
            self._trace = None


class _Plan:
    """What the workers did in the recorded run, as one of them needs it to do the same."""

    def __init__(self, traces: Sequence[BlockTrace], rank: int) -> None:
        self.copies: Counter[tuple[int, int]] = Counter()  # of a block and version, before its next version
        for trace in traces:
            self.copies.update(trace.copies)
        self._steps = deque(traces[rank].steps)
        self._hashes = deque(traces[0].hashes)
        self.whole = traces[0].whole
        self._compared = 0
        self._digest = b""
        self._difference: str | None = None

    def met(self, block: int, *, writing: bool) -> int | None:
        """The version to which others had changed a block, when this worker came to it in this step."""
        return self._steps[0].get((block, writing)) if self._steps else None

    def next(self) -> None:
        self._steps.popleft()

    @property
    def over(self) -> bool:
        return not self._steps

    def compare(self, step: int, digest: bytes) -> None:
        self._digest = digest
        if self._difference is not None or not self._hashes:
            return
        wanted = self._hashes.popleft()
        if wanted != (step, digest):
            self._difference = f"the parameters after step {step} of every worker"
        else:
            self._compared += 1

    def result(self, steps: int, updates: float) -> dict[str, Any]:
        """The outcome, as ``replay.outcome.Replayed`` has it."""
        return {
            "version": steps,
            "commits": int(updates),
            "pushes": int(updates),
            "hashes": self._compared,
            "digest": self._digest.hex(),
            "difference": self._difference,
            "whole": self.whole,
        }
