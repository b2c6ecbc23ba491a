"""The processes of a run: its workers, and the parameter server if the policy has one, which changes who may die."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.launch.environment import ReplayOrder, ServerAssignment
from paceline.launch.failures import SERVER, Fault, Life, find_fault, find_kill
from paceline.launch.process_environment import ProcessEnvironment
from paceline.launch.processes import Processes

_MOST_FRUITLESS = 10  # processes of one rank in a row that are killed before they join
_ITS_OWN_FAULT = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
_TIME_TO_FINISH = 60.0  # seconds that the server has after the last worker


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a run does about a parameter server; without any it has one as soon as a script's policy needs it."""

    needed: bool = False  # known from the start, so start it at once
    alone: bool = False  # start no workers: they will join from elsewhere
    respawn: bool = False  # start a new worker in the place of one that was killed
    bind: str | None = None  # the server's host:port for workers from elsewhere; port 0 is any
    trusted: bool = False  # nothing is encrypted between hosts
    join: str | None = None  # the address of a server elsewhere: start none here
    token: str | None = None  # by default a new one
    delay: tuple[str, float] | None = None  # computing time to inject: its text, and the seconds that 1 stands for
    replay: ReplayOrder | None = None  # make a recorded run again
    servers: int = 1  # that hold the parameters among them

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise UsageError(f"a run needs at least 1 server, got {self.servers}")


_GONE = 64  # where in the memory each rank has a byte that says so


def mark_gone(memory: int, rank: int) -> None:
    """Write into the memory of the server that no worker of this rank will come (again)."""
    os.pwrite(memory, b"\1", _GONE + rank)


def mark_coming(memory: int, rank: int) -> None:
    """Take that back."""
    os.pwrite(memory, b"\0", _GONE + rank)


def read_gone(memory: int, workers: int) -> list[int]:
    """The ranks that are marked so."""
    return [rank for rank, mark in enumerate(os.pread(memory, workers, _GONE)) if mark]


def make_token() -> str:
    """Make a join token that nobody guesses."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def open_assignment(options: ServerOptions) -> Iterator[ServerAssignment]:
    """Make the place where the workers of this host find their server: an address, a token, memory to share."""
    if options.join is not None:
        if options.token is None:
            raise UsageError(f"joining {options.join} needs the token that its server was started with")
        yield ServerAssignment(address=options.join, token=options.token, delay=options.delay, trusted=options.trusted)
        return
    # Neither has a name in any file system: nothing is left behind, however the run ends.
    memories = [os.memfd_create("paceline-server") for _ in range(options.servers) if hasattr(os, "memfd_create")]
    try:
        yield ServerAssignment(
            address=f"ipc://@paceline-{secrets.token_hex(16)}",
            token=options.token or make_token(),
            memory_fd=memories[0] if memories else None,
            shard_fds=tuple(memories[1:]),
            delay=options.delay,
            trusted=options.trusted,
            replay=options.replay,
        )
    finally:
        for memory in memories:
            os.close(memory)


class Service:
    """Starts the processes of a run, and under a server sees to workers that are killed."""

    def __init__(
        self,
        processes: Processes,
        command: Sequence[str],
        process_environment: ProcessEnvironment,
        options: ServerOptions,
    ) -> None:
        self._processes = processes
        self._command = command
        self._process_environment = process_environment
        self._options = options
        assignment = process_environment.assignment
        self._memory = () if assignment is None or assignment.memory_fd is None else (assignment.memory_fd,)
        self._descriptors = (*self._memory, *(() if assignment is None else assignment.shard_fds))
        self._has_server = False
        self._server_incarnation = 0
        self._bind = options.bind
        self._seen_to: set[tuple[int, int]] = set()  # the killed, by rank and incarnation
        self._told_of_open_session = False
        self._workers_ended: float | None = None  # on the monotonic clock

    @property
    def served(self) -> bool:
        """Whether there is a server, here or elsewhere."""
        return self._has_server or self._options.join is not None

    def start(self) -> None:
        """Start the server, if it is known to be needed, and the workers."""
        if self._options.needed or self._options.alone:
            self._start_servers()
        if not self._options.alone:
            for rank in range(self._process_environment.workers):
                self._start_worker(Life(rank=rank))

    def attend(self) -> None:
        """Start the server when a worker has asked for it; tell of workers that were killed, and replace them."""
        lives = self._processes.lives
        if not self.served and any(life.needs_server for life in lives):
            self._start_servers()
        # The server first: whether it comes back counts for the workers.
        for life in sorted(lives, key=lambda life: life.rank):
            if self.served and life.rank >= 0 and life.code == 0:
                self._tell_server(life.rank)  # also if it left: a server before may have heard of it
                self._tell_of_open_session(life)
            known = (life.rank, life.incarnation) in self._seen_to
            if not known and self._may_be_killed(life) and find_kill(life) is not None:
                self._seen_to.add((life.rank, life.incarnation))
                self._see_to(life)

    def fault(self) -> Fault | None:
        """What has gone wrong, if anything has."""
        return find_fault(self._processes.lives, served=self.served) or self._overdue()

    def _may_be_killed(self, life: Life) -> bool:
        if life.failure is not None:
            return False
        if life.rank <= SERVER:
            ends = any(server.exiting is not None or server.failure is not None for server in self._servers())
            return bool(self._memory) and not ends
        # A script may name its policy late; until a worker joins, nobody depends on it under any policy.
        return self.served or (self._options.respawn and life.sessions == 0)

    def _servers(self) -> list[Life]:
        return [life for life in self._processes.lives if life.rank <= SERVER]

    def _start_servers(self, *, incarnation: int = 0, fruitless: int = 0) -> None:
        if not self._memory and not (self._options.alone and self._options.servers == 1):
            raise UsageError("a parameter server needs Linux here, for memory that processes share without a name")
        self._has_server = True
        for shard in range(self._options.servers):
            life = Life(rank=SERVER - shard, incarnation=incarnation, fruitless=fruitless)
            bind = self._options.bind if shard else self._bind  # workers learn the others' ports from the first
            environment = self._process_environment.server(bind=bind, incarnation=incarnation, shard=shard)
            self._processes.start(
                life,
                self._command,
                environment,
                descriptors=self._descriptors if shard else (*self._descriptors, *self._shell()),
                prefix=f"[server {shard}] " if shard else "" if self._options.alone else "[server] ",
            )

    def _shell(self) -> tuple[int, ...]:
        """The descriptors of a shell in a replay, if there is one."""
        return () if self._options.replay is None else tuple(self._options.replay.shell or ())

    def _start_worker(self, life: Life) -> None:
        if life.incarnation:  # the one before may have died with a server, and been told of as gone
            for memory in self._memory:
                mark_coming(memory, life.rank)
        environment = self._process_environment.worker(life.rank, incarnation=life.incarnation)
        prefix = "" if self._process_environment.workers == 1 else f"[{life.rank}] "
        self._processes.start(life, self._command, environment, descriptors=self._descriptors, prefix=prefix)

    def _tell_server(self, rank: int) -> None:
        """Let the server know that it need not wait for a worker: one that never joined, it cannot miss by itself."""
        for memory in self._memory:
            mark_gone(memory, rank)

    def _see_to(self, killed: Life) -> None:
        """Start another process in the place of a killed one, or tell that the run goes on without it."""
        if killed.rank <= SERVER:
            self._replace_servers(killed)
            return
        if self._comes_again(killed) and killed.exiting is None and not self._server_has_ended():
            fruitless = killed.fruitless + 1 if killed.sessions == 0 else 0
            if fruitless == _MOST_FRUITLESS:
                killed.given_up = True
                return
            self._tell_of(killed, "another takes its place")
            self._start_worker(Life(rank=killed.rank, incarnation=killed.incarnation + 1, fruitless=fruitless))
            return
        self._tell_server(killed.rank)
        workers = [life for life in self._processes.lives if life.rank >= 0]
        if left := sum(life.code is None for life in workers):
            self._tell_of(killed, f"the run goes on with {left}")
        elif any(life.code == 0 for life in workers):
            self._tell_of(killed, "the others had ended")

    def _comes_again(self, killed: Life) -> bool:
        if self._options.replay is not None:
            return killed.incarnation + 1 < self._options.replay.lives[killed.rank]
        return self._options.respawn

    def _replace_servers(self, killed: Life) -> None:
        """Start a server in the place of a killed one; it finds all in the memory that we hold.

        Of several all begin anew, together: what each has is in its memory, and lines between them are new.
        """
        fruitless = killed.fruitless + 1 if killed.sessions == 0 or -(killed.code or 0) in _ITS_OWN_FAULT else 0
        if fruitless == _MOST_FRUITLESS:
            killed.given_up = True
            return
        self._tell_of(killed, "another takes its place" if self._options.servers == 1 else "all servers start anew")
        self._processes.kill(lambda life: life.rank <= SERVER)
        for server in self._servers():
            self._seen_to.add((server.rank, server.incarnation))
            if server.rank == SERVER and server.address is not None:
                self._bind = server.address.removeprefix("tcp://")  # with the port that workers know
        for life in self._processes.lives:
            if life.rank >= 0 and life.code is not None:
                self._tell_server(life.rank)
        self._server_incarnation = killed.incarnation + 1
        self._start_servers(incarnation=self._server_incarnation, fruitless=fruitless)

    def _tell_of(self, killed: Life, what_now: str) -> None:
        kill = find_kill(killed)
        assert kill is not None
        self._processes.screen.write("stderr", f"paceline: {kill.who} {kill.what}; {what_now}\n")

    def _tell_of_open_session(self, life: Life) -> None:
        """Say once that a worker has ended in mid-session: the server takes that for a death."""
        replays = self._process_environment.assignment is not None and self._process_environment.assignment.replay
        if life.in_session and not self._told_of_open_session and not replays:
            self._told_of_open_session = True
            self._processes.screen.write(
                "stderr",
                f"paceline: worker {life.rank} ended without closing its session; use `with paceline.join(...) as "
                "session:`, or call session.close() at the end\n",
            )

    def _server_has_ended(self) -> bool:
        return any(life.rank == SERVER and life.code is not None for life in self._processes.lives)

    def _overdue(self) -> Fault | None:
        """The fault of a server that does not end although all workers have; a shell may be open for ever."""
        running = [member.life.rank for member in self._processes.running]
        if not running or max(running) >= 0 or self._options.alone or self._shell():
            return None
        now = time.monotonic()
        self._workers_ended = self._workers_ended or now
        if now - self._workers_ended < _TIME_TO_FINISH:
            return None
        return Fault(rank=SERVER, at=time.time(), what=f"did not end within {_TIME_TO_FINISH:g} s of the last worker")
