"""What a collective returns: a hold on calls under way, with the shape of ``torch.distributed.Work``."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.core import Ticket
from paceline.collectives.tensors import Staged
from paceline.collectives.untraced import untraced
from paceline.errors import CommError

_FOREVER = timedelta(0)  # as torch.distributed says it; the group's own timeout ends every wait


@untraced
class Work(dist.Work):
    """Calls on tensors that may still be under way; without tickets they are done."""

    def __init__(
        self,
        outputs: Sequence[Tensor],
        tickets: Sequence[Ticket] = (),
        staged: Sequence[Staged] = (),
        announcer: Announcer | None = None,
    ) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._tickets = tickets
        self._staged = staged
        self._announcer = announcer
        self._settling = threading.Lock()

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait until the calls are done and the tensors have their values; raise if one failed."""
        end = time.monotonic() + timeout.total_seconds() if timeout > _FOREVER else None
        for ticket in self._tickets:
            if not ticket.wait(None if end is None else end - time.monotonic()):
                raise CommError(f"a collective was not done within the {timeout.total_seconds():g} s of its wait")
        self._settle()
        return True

    def _settle(self) -> None:
        with self._settling:
            for staged in self._staged:
                staged.settle()
            self._staged = ()

    def is_completed(self) -> bool:
        if not all(ticket.done() for ticket in self._tickets):
            return False
        if self.exception() is None:
            self._settle()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> CommError | None:
        """What went wrong; None if nothing did, or nothing yet."""
        try:
            for ticket in self._tickets:
                if ticket.done():
                    ticket.wait()
        except CommError as error:
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._outputs

    def source_rank(self) -> int:
        """Where a message came from."""
        return self._tickets[-1].source if self._tickets else -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result; made only when asked for, since completing it needs the interpreter.

        Its value is a Python object, as in every future made in Python. Of all that DDP has, only the hook written in
        C++, ``BuiltinCommHookType.FP16_COMPRESS``, wants another; ``default_hooks.fp16_compress_hook`` does the same.
        """
        done: torch.futures.Future[Any] = torch.futures.Future()
        # An error set with set_exception crashes DDP's C++ code; one raised in a callback arrives well.
        result = done.then(lambda _: self._result_or_raise())
        if self._announcer is None or all(ticket.done() for ticket in self._tickets):
            done.set_result(None)
        else:
            self._announcer.announce(self, done)
        return result

    def _result_or_raise(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def is_message(self) -> bool:
        """Whether this may end after calls made later."""
        return any(ticket.is_message for ticket in self._tickets)


class _Done(Work):
    """What all synchronous calls return, for callers that wait all the same."""

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        return True


DONE = _Done([])


class Announcer:
    """Completes futures when their calls are done, on threads that need the interpreter only then.

    Callbacks run on these threads, and may start calls and wait for their futures (PowerSGD's does). So one thread
    always stays out of callbacks: there is one more of them than callbacks have ever run at once.
    """

    def __init__(self, name: str) -> None:
        self._name = f"paceline futures of group {name}"
        self._pending: queue.SimpleQueue[tuple[Work, torch.futures.Future[Any]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._outside_callbacks = 0
        self._closed = False
        self._lock = threading.Lock()

    def announce(self, work: Work, done: torch.futures.Future[Any]) -> None:
        """Set ``done`` when ``work`` has ended, well or badly."""
        with self._lock:
            if not work.is_message() and not self._closed:
                self._pending.put((work, done))
                self._keep_one_outside_callbacks()
                return
        # A message may take for ever, and must not hold up the others.
        threading.Thread(target=_announce, args=(work, done), name=self._name, daemon=True).start()

    def close(self) -> None:
        """End the threads; the calls under way must have ended or failed."""
        with self._lock:
            self._closed = True
            for _ in self._threads:
                self._pending.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _keep_one_outside_callbacks(self) -> None:
        if self._outside_callbacks == 0 and not self._closed:
            self._outside_callbacks += 1
            self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
            self._threads[-1].start()

    def _run(self) -> None:
        while (item := self._pending.get()) is not None:
            work, done = item
            _await(work)
            with self._lock:
                self._outside_callbacks -= 1
                self._keep_one_outside_callbacks()
            done.set_result(None)
            with self._lock:
                self._outside_callbacks += 1


def _announce(work: Work, done: torch.futures.Future[Any]) -> None:
    _await(work)
    done.set_result(None)


def _await(work: Work) -> None:
    with contextlib.suppress(CommError):  # the future's own callback meets it again, and passes it on
        work.wait()
