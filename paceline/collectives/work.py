"""The result of a collective: a handle of calls under way, with the interface of ``torch.distributed.Work``."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.collectives.tensors import Staged
from paceline.collectives.untraced import untraced
from paceline.errors import CommError, UsageError

_FOREVER = timedelta(0)  # as in torch.distributed; the group's own timeout ends every wait


class Pending(Protocol):
    """One call under way, such as a ``Ticket``."""

    is_message: bool

    @property
    def source(self) -> int: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def done(self) -> bool: ...


@untraced
class Work(dist.Work):
    """A handle of calls on tensors; without tickets they are done."""

    def __init__(
        self,
        outputs: Sequence[Tensor],
        tickets: Sequence[Pending] = (),
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
                seconds = f"{timeout.total_seconds():g} s"
                raise CommError(f"timed out: wait({seconds}) returned before the collective was done")
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
        """The error of a failed call; None if none has failed so far."""
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
        """The rank that sent a received message."""
        return self._tickets[-1].source if self._tickets else -1

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result; made only when asked for, since completing it needs the interpreter.

        Its value is a Python object, as in every future made in Python. In DDP only the hook written in C++,
        ``BuiltinCommHookType.FP16_COMPRESS``, wants another; ``default_hooks.fp16_compress_hook`` does the same.
        """
        done: torch.futures.Future[Any] = torch.futures.Future()
        # An error set with set_exception crashes DDP's C++ code; one raised in a callback does not.
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
        """Whether this may end after later calls."""
        return any(ticket.is_message for ticket in self._tickets)


class _Done(Work):
    """The result of all synchronous calls, for callers that wait nevertheless."""

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        raise UsageError("a synchronous collective has no future; ask for one with async_op=True")

    def result(self) -> list[Tensor]:
        raise UsageError("a synchronous collective keeps no result: read its tensors, or use async_op=True")


DONE = _Done([])

_Announced = tuple[Work, torch.futures.Future[Any]]


class Announcer:
    """Completes futures when their calls are done, on threads that need the interpreter only then.

    One thread at a time waits for the oldest call. Before it completes the future, which runs the user's callbacks,
    another thread takes over, so that a callback may itself wait for a future of this group.
    """

    def __init__(self, name: str) -> None:
        self._name = f"paceline futures of group {name}"
        self._process = os.getpid()
        self._turn = threading.Condition()
        self._pending: deque[_Announced] = deque()
        self._someone_waits = self._closed = False
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def announce(self, work: Work, done: torch.futures.Future[Any]) -> None:
        """Complete ``done`` when ``work`` has succeeded or failed."""
        with self._turn:
            if work.is_message():  # it may wait for ever, and must not delay the others
                self._start(_announce, work, done)
                return
            self._pending.append((work, done))
            self._call_next()

    def close(self) -> None:
        """End the threads; the calls under way must have ended or failed."""
        if os.getpid() != self._process:  # forked: the threads do not exist here, and one may have held the lock
            return
        with self._turn:
            self._closed = True
            self._turn.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=target, args=arguments, name=self._name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _call_next(self) -> None:
        if self._someone_waits or not self._pending:
            return
        if self._idle:
            self._turn.notify()
        else:
            self._start(self._run)

    def _run(self) -> None:
        while True:
            with self._turn:
                self._idle += 1
                self._turn.wait_for(lambda: self._closed or (self._pending and not self._someone_waits))
                self._idle -= 1
                if not self._pending:
                    return
                work, done = self._pending.popleft()
                self._someone_waits = True
            _end_of(work)
            with self._turn:
                self._someone_waits = False
                self._call_next()
            done.set_result(None)


def _announce(work: Work, done: torch.futures.Future[Any]) -> None:
    _end_of(work)
    done.set_result(None)


def _end_of(work: Work) -> None:
    with contextlib.suppress(Exception):  # the future's own callback raises it again
        work.wait()
