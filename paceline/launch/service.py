"""Starts and replaces the processes of a run: its workers, and the parameter server if the policy has one."""

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
from paceline.launch.failures import SERVER, Fault, ProcessState, find_fault, find_kill, may_die, name_of
from paceline.launch.process_environment import ProcessEnvironment
from paceline.launch.processes import Processes
from paceline.launch.roster import Member, RunLog

_MOST_FAILED_STARTS = 10  # processes of one rank in a row, killed before they join
_CRASH_SIGNALS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}
_TIME_TO_FINISH = 60.0  # seconds for the server to end after the last worker


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a run for its parameter server; by default it starts when a script's policy needs it."""

    needed: bool = False  # start the server at once
    alone: bool = False  # start no workers: they join from other hosts
    respawn: bool = False  # replace workers that are killed
    bind: str | None = None  # the server's host:port for workers of other hosts; port 0 is any
    trusted: bool = False  # nothing is encrypted between hosts
    join: str | None = None  # the address of a running server: start none here
    token: str | None = None  # by default a new one
    delay: tuple[str, float] | None = None  # compute time to inject: its text, and the length of its unit in seconds
    replay: ReplayOrder | None = None  # replay a recorded run
    servers: int = 1  # processes that share the parameters

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise UsageError(f"a run needs at least 1 server, got {self.servers}")


_GONE = 64  # offset in the memory of one byte for each rank: 1 if no worker of it will come


def mark_gone(memory: int, rank: int) -> None:
    """Write into the server's memory that no worker of this rank will come (again)."""
    os.pwrite(memory, b"\1", _GONE + rank)


def mark_coming(memory: int, rank: int) -> None:
    """Undo ``mark_gone``."""
    os.pwrite(memory, b"\0", _GONE + rank)


def read_gone(memory: int, workers: int) -> list[int]:
    """The ranks that ``mark_gone`` has marked."""
    return [rank for rank, mark in enumerate(os.pread(memory, workers, _GONE)) if mark]


def make_token() -> str:
    """Make a random join token."""
    return secrets.token_hex(32)


@contextlib.contextmanager
def open_assignment(options: ServerOptions) -> Iterator[ServerAssignment]:
    """Make what the workers of this host need to find their server: an address, a token, shared memory."""
    if options.join is not None:
        if options.token is None:
            raise UsageError(f"joining {options.join} needs the token that its server was started with")
        yield ServerAssignment(address=options.join, token=options.token, delay=options.delay, trusted=options.trusted)
        return
    # Address and memory have no name in any file system: nothing is left behind, however the run ends.
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
    """Starts the processes of a run, and handles those that are killed."""

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
        self._log_fds = () if assignment is None or assignment.log_fd is None else (assignment.log_fd,)
        self._killed: list[Fault] = []  # workers without whom the others have not gone on yet
        self._told_of_groups = 0  # the number of the last one
        self._has_server = False
        self._server_incarnation = 0
        self._bind = options.bind
        self._handled_kills: set[tuple[int, int]] = set()  # rank and incarnation
        self._told_of_open_session = False
        self._workers_ended: float | None = None  # on the monotonic clock

    @property
    def with_server(self) -> bool:
        """Whether the run has a server, on this host or another."""
        return self._has_server or self._options.join is not None

    def start(self) -> None:
        """Start the server, if it is known to be needed, and the workers."""
        if self._options.needed or self._options.alone:
            self._start_servers()
        if not self._options.alone:
            for rank in range(self._process_environment.workers):
                self._start_worker(ProcessState(rank=rank))

    def attend(self) -> None:
        """Start the server when a worker has asked for it; report workers that were killed, and replace them."""
        states = self._processes.states
        if not self.with_server and any(state.needs_server for state in states):
            self._start_servers()
        # Servers first: workers are replaced only if the server comes back.
        for state in sorted(states, key=lambda state: state.rank):
            if self.with_server and state.rank >= 0 and state.code == 0:
                self._tell_server(state.rank)  # also if it left its session: this may be a new server
                self._tell_of_open_session(state)
            known = (state.rank, state.incarnation) in self._handled_kills
            if not known and self._may_be_killed(state) and find_kill(state) is not None:
                self._handled_kills.add((state.rank, state.incarnation))
                self._handle_kill(state)
        self._tell_of_groups()

    def tell_of_ends(self) -> None:
        """Tell the workers of a run that is stopping which of them have ended, so that none waits for these."""
        for state in self._processes.states:
            ended = state.rank >= 0 and state.code is not None
            if ended and (state.rank, state.incarnation) not in self._handled_kills:
                self._handled_kills.add((state.rank, state.incarnation))
                self._log_death(state)

    def fault(self) -> Fault | None:
        """The first failure, if any."""
        return find_fault(self._processes.states, with_server=self.with_server) or self._overdue()

    def _may_be_killed(self, state: ProcessState) -> bool:
        if state.failure is not None:
            return False
        if state.rank <= SERVER:
            ends = any(server.exiting is not None or server.failure is not None for server in self._servers())
            return bool(self._memory) and not ends
        # A script may name its policy late; no policy depends on a worker that has not joined.
        return may_die(state, with_server=self.with_server) or (self._options.respawn and state.sessions == 0)

    def _servers(self) -> list[ProcessState]:
        return [state for state in self._processes.states if state.rank <= SERVER]

    def _start_servers(self, *, incarnation: int = 0, failed_starts: int = 0) -> None:
        if not self._memory and not (self._options.alone and self._options.servers == 1):
            raise UsageError("a parameter server needs Linux here: it shares anonymous memory (memfd) with its workers")
        self._has_server = True
        for shard in range(self._options.servers):
            state = ProcessState(rank=SERVER - shard, incarnation=incarnation, failed_starts=failed_starts)
            bind = self._options.bind if shard else self._bind  # workers learn the others' ports from the first
            environment = self._process_environment.server(bind=bind, incarnation=incarnation, shard=shard)
            self._processes.start(
                state,
                self._command,
                environment,
                descriptors=self._descriptors if shard else (*self._descriptors, *self._shell()),
                prefix=f"[server {shard}] " if shard else "" if self._options.alone else "[server] ",
            )

    def _shell(self) -> tuple[int, ...]:
        """The descriptors of a shell in a replay, if there is one."""
        return () if self._options.replay is None else tuple(self._options.replay.shell or ())

    def _start_worker(self, state: ProcessState) -> None:
        if state.incarnation:  # the one before may have been marked gone
            for memory in self._memory:
                mark_coming(memory, state.rank)
        environment = self._process_environment.worker(state.rank, incarnation=state.incarnation)
        prefix = "" if self._process_environment.workers == 1 else f"[{state.rank}] "
        descriptors = (*self._descriptors, *self._log_fds)
        self._processes.start(state, self._command, environment, descriptors=descriptors, prefix=prefix)

    def _tell_server(self, rank: int) -> None:
        """Tell the server not to wait for a worker: it cannot notice the death of one that never joined."""
        for memory in self._memory:
            mark_gone(memory, rank)

    def _handle_kill(self, killed: ProcessState) -> None:
        """Start another process in the place of a killed one, or say that the run goes on without it."""
        if killed.rank <= SERVER:
            self._replace_servers(killed)
            return
        self._log_death(killed)
        among_peers = killed.survives and not self.with_server
        if among_peers:
            self._killed += filter(None, [find_kill(killed)])
        if self._comes_again(killed) and killed.exiting is None and not self._others_have_ended():
            failed_starts = killed.failed_starts + 1 if killed.sessions == 0 else 0
            if failed_starts == _MOST_FAILED_STARTS:
                killed.given_up = True
                return
            if not among_peers:
                self._tell_of(killed, "another takes its place")
            self._start_worker(
                ProcessState(rank=killed.rank, incarnation=killed.incarnation + 1, failed_starts=failed_starts)
            )
            return
        if among_peers:
            return
        self._tell_server(killed.rank)
        workers = [state for state in self._processes.states if state.rank >= 0]
        if left := sum(state.code is None for state in workers):
            self._tell_of(killed, f"the run goes on with {left}")
        elif any(state.code == 0 for state in workers):
            self._tell_of(killed, "the others had ended")

    def _log_death(self, state: ProcessState) -> None:
        for log in self._log_fds:
            RunLog(log).append("died", Member(state.rank, state.incarnation))

    def _comes_again(self, killed: ProcessState) -> bool:
        if self._options.replay is not None:
            return killed.incarnation + 1 < self._options.replay.lives[killed.rank]
        return self._options.respawn

    def _replace_servers(self, killed: ProcessState) -> None:
        """Start a server in the place of a killed one; its state is in the memory that we hold open.

        Several servers all start anew, together: their states are in their memories, their connections are new.
        """
        failed_starts = killed.failed_starts + 1 if killed.sessions == 0 or -(killed.code or 0) in _CRASH_SIGNALS else 0
        if failed_starts == _MOST_FAILED_STARTS:
            killed.given_up = True
            return
        self._tell_of(killed, "another takes its place" if self._options.servers == 1 else "all servers start anew")
        self._processes.kill(lambda state: state.rank <= SERVER)
        for server in self._servers():
            self._handled_kills.add((server.rank, server.incarnation))
            if server.rank == SERVER and server.address is not None:
                self._bind = server.address.removeprefix("tcp://")  # with the port that workers know
        for state in self._processes.states:
            if state.rank >= 0 and state.code is not None:
                self._tell_server(state.rank)
        self._server_incarnation = killed.incarnation + 1
        self._start_servers(incarnation=self._server_incarnation, failed_starts=failed_starts)

    def _tell_of(self, killed: ProcessState, what_now: str) -> None:
        kill = find_kill(killed)
        assert kill is not None
        self._tell(f"{kill.who} {kill.what}; {what_now}")

    def _tell(self, what: str) -> None:
        self._processes.output.write("stderr", f"paceline: {what}\n")

    def _tell_of_groups(self) -> None:
        """Say in one line how the workers have changed, when those that are left go on."""
        groups = [state.reformed for state in self._processes.states if state.reformed is not None]
        newest = max(groups, key=lambda group: int(group["number"]), default=None)
        if newest is None or newest["number"] <= self._told_of_groups:
            return
        self._told_of_groups = newest["number"]
        changes = [f"{kill.who} {kill.what}" for kill in self._killed]
        changes += [f"{name_of(worker)} has joined" for worker in newest["joined"]]
        self._killed = []
        if changes:
            self._tell(f"{', '.join(changes)}; the run goes on with {newest['workers']} after step {newest['step']}")

    def tell_the_rest(self) -> None:
        """Tell of workers that were killed when the others did not need them any more, or could not go on."""
        for kill in self._killed:
            self._tell(f"{kill.who} {kill.what}")
        self._killed = []

    def _tell_of_open_session(self, state: ProcessState) -> None:
        """Say once that a worker ended without closing its session: the server treats that as a death."""
        replays = self._process_environment.assignment is not None and self._process_environment.assignment.replay
        if state.in_session and not self._told_of_open_session and not replays:
            self._told_of_open_session = True
            self._processes.output.write(
                "stderr",
                f"paceline: worker {state.rank} ended without closing its session; use `with paceline.join(...) as "
                "session:`, or call session.close() at the end\n",
            )

    def _others_have_ended(self) -> bool:
        """Whether a worker that is started now would come too late."""
        states = self._processes.states
        if self.with_server:
            return any(state.rank == SERVER and state.code is not None for state in states)
        return any(state.survives and not state.in_session for state in states)

    def _overdue(self) -> Fault | None:
        """The fault of a server that still runs long after all workers ended; an open shell has no limit."""
        running = [member.state.rank for member in self._processes.running]
        if not running or max(running) >= 0 or self._options.alone or self._shell():
            return None
        now = time.monotonic()
        self._workers_ended = self._workers_ended or now
        if now - self._workers_ended < _TIME_TO_FINISH:
            return None
        return Fault(rank=SERVER, at=time.time(), what=f"did not end within {_TIME_TO_FINISH:g} s of the last worker")
