"""What asynchronous calls of the backend "paceline" return: works and futures, that end well, badly or late."""

from __future__ import annotations

import gc
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

from backend_ranks import options, outcomes_of, run_groups
from shared_ranks import DEADLINE, hurried, start_process

from paceline.errors import CommError, UsageError
from paceline.native import _core

SOON = timedelta(milliseconds=30)


def reducing(group: Any, tensor: Tensor) -> Any:
    return group.allreduce([tensor], options("Allreduce", later=True))


class Gate:
    """Holds rank 0 back, until another rank lets it go on."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def let_go(self) -> None:
        self._open.set()

    def __call__(self, group: Any) -> None:
        if group.rank() == 0:
            assert self._open.wait(DEADLINE)


def test_a_future_has_the_tensors() -> None:
    def work(group: Any) -> None:
        own, strided = torch.ones(5), torch.ones(10, 2)[:, 0]
        for tensor in own, strided:
            (value,) = reducing(group, tensor).get_future().wait()
            assert value is tensor or torch.equal(value, tensor)
            assert (tensor == 2).all()
        places = [torch.zeros(2) for _ in range(2)]
        gathered = group.allgather([places], [torch.full((2,), float(group.rank()))], options("Allgather", later=True))
        assert [value.tolist() for value in gathered.get_future().wait()] == [[0, 0], [1, 1]]
        assert gathered.result() == places
        assert group.barrier(options("Barrier", later=True)).get_future().wait() == []

    run_groups(work, 2)


def test_a_synchronous_call_has_a_work_and_no_future() -> None:
    def work(group: Any) -> None:
        own = torch.ones(5)
        done = group.allreduce([own], options("Allreduce"))
        assert done.is_completed() and done.is_success() and done.exception() is None and done.wait()
        assert done.wait(timedelta(seconds=1))
        assert torch.equal(own, torch.full((5,), 2.0))
        for ask in done.get_future, done.result:
            with pytest.raises(UsageError, match="async_op=True"):
                ask()

    run_groups(work, 2)


def test_many_futures_and_callbacks_in_any_order() -> None:
    def work(group: Any) -> None:
        tensors = [torch.full((1000,), float(i)) for i in range(200)]
        works = [reducing(group, tensor) for tensor in tensors]
        called: list[int] = []
        futures, calls = [], []
        for i in reversed(range(200)):
            first, second = works[i].get_future(), works[i].get_future()
            calls.append(first.then(lambda future, i=i: called.append(i)))
            futures.append((i, second.then(lambda future: future.value()[0].sum().item() + 1)))
        for i, future in futures:
            assert future.wait() == 1000 * 2 * i + 1
        torch.futures.wait_all(calls)
        assert sorted(called) == list(range(200))

    run_groups(work, 2)


def test_a_callback_may_start_a_collective_and_wait_for_its_future() -> None:
    """As PowerSGD's communication hook does."""

    def work(group: Any) -> None:
        second = torch.ones(3)

        def go_on(future: Any) -> Any:
            (first,) = future.value()
            second.mul_(first[0])
            return reducing(group, second).get_future().wait()[0]

        last = reducing(group, torch.ones(2)).get_future().then(go_on).then(lambda future: future.value() + 1)
        assert last.wait().tolist() == [5, 5, 5]

    run_groups(work, 2)


def test_a_callback_may_wait_for_a_later_future_and_for_callbacks_of_callbacks() -> None:
    def work(group: Any) -> None:
        def chain(future: Any, depth: int) -> float:
            if depth == 0:
                return float(future.value()[0][0])
            following = reducing(group, torch.ones(2) * depth).get_future()
            return float(following.then(lambda future: chain(future, depth - 1)).wait())

        first, later = (reducing(group, torch.ones(100_000)).get_future() for _ in range(2))
        assert first.then(lambda future: later.wait()).wait()[0].sum() == 200_000
        assert reducing(group, torch.ones(2)).get_future().then(lambda future: chain(future, 4)).wait() == 2

    run_groups(work, 2)


def test_a_callback_may_end_the_group() -> None:
    def work(group: Any) -> None:
        ended = reducing(group, torch.ones(2)).get_future().then(lambda future: group.shutdown())
        ended.wait()
        with pytest.raises(CommError, match="closed"):
            group.barrier()

    run_groups(work, 2)


def test_a_callback_that_raises_harms_no_other() -> None:
    def work(group: Any) -> None:
        bad = reducing(group, torch.ones(2)).get_future().then(lambda future: 1 / 0)
        good = reducing(group, torch.ones(2)).get_future()
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            bad.wait()
        assert good.wait()[0].tolist() == [2, 2]

    run_groups(work, 2)


def test_a_failed_call_fails_its_works_and_futures() -> None:
    def work(group: Any) -> None:
        group.barrier().wait()
        if group.rank() == 1:
            return
        own = torch.ones(5)
        work, after = reducing(group, own), reducing(group, own)
        futures = [work.get_future(), after.get_future(), work.get_future().then(lambda future: future.value())]
        for future in futures:
            with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) left the group while others were in"):
                future.wait()
        for failed in work, after:
            with pytest.raises(CommError, match="rank 1"):
                failed.wait()
            assert failed.is_completed() and not failed.is_success()
            assert isinstance(failed.exception(), CommError)
        with pytest.raises(RuntimeError, match="rank 1"):
            work.get_future().wait()  # one made after the end

    run_groups(work, 2)


def test_a_group_that_is_closed_ends_its_futures() -> None:
    gate = Gate()

    def work(group: Any) -> None:
        gate(group)
        if group.rank() == 0:
            return
        calls = [reducing(group, torch.ones(5)), group.recv([torch.ones(5)], 0, 0)]
        futures = [call.get_future() for call in calls]
        group.shutdown()
        for future in futures:
            with pytest.raises(RuntimeError, match="group 'g' is closed"):
                future.wait()
        gate.let_go()

    run_groups(work, 2)


def test_a_wait_with_a_timeout_comes_back_and_the_call_goes_on() -> None:
    gate = Gate()

    def work(group: Any) -> None:
        gate(group)
        own = torch.ones(5)
        call = reducing(group, own)
        if group.rank() == 1:
            with pytest.raises(CommError, match=r"timed out: wait\(0\.03 s\) returned before"):
                call.wait(SOON)
            assert not call.is_completed() and not call.is_success() and call.exception() is None
            gate.let_go()
        assert call.wait(timedelta(seconds=DEADLINE))
        assert own.tolist() == [2] * 5 and call.is_success()

    run_groups(work, 2)


def test_is_completed_brings_strided_results_home() -> None:
    def work(group: Any) -> None:
        own = torch.ones(5, 2)[:, 1]
        call = reducing(group, own)
        while not call.is_completed():
            pass
        assert own.tolist() == [2] * 5

    run_groups(work, 2)


def test_a_dropped_work_keeps_its_memory_alive() -> None:
    gate = Gate()

    def work(group: Any) -> Tensor | None:
        gate(group)
        size = 3_000_000
        kept = torch.full((size,), 3.0)
        if group.rank() == 0:
            group.broadcast([kept], options("Broadcast", later=True)).wait()
            group.recv([kept], 1, 5).wait()
            return kept
        dropped = torch.zeros(size)
        alive = [weakref.ref(dropped)]
        group.broadcast([dropped], options("Broadcast", later=True))
        dropped = torch.full((2 * size,), 7.0)[::2]
        group.send([dropped], 0, 5)
        del dropped
        gc.collect()
        garbage = [torch.zeros(size) for _ in range(3)]  # would take the freed memory's place
        assert alive[0]() is not None
        gate.let_go()
        group.barrier(options("Barrier", later=True))
        for _ in range(2):
            del garbage[0]
        return garbage[0]

    def all_of(group: Any) -> None:
        result = work(group)
        if group.rank() == 0:
            assert result is not None and (result == 7).all()
            group.barrier().wait()
        else:
            group.recv([torch.zeros(1)], 0, 9).wait()
            assert result is not None and (result == 0).all()
        if group.rank() == 0:
            group.send([torch.zeros(1)], 1, 9).wait()

    run_groups(all_of, 2)


def test_memory_is_let_go_when_the_call_is_done() -> None:
    def work(group: Any) -> None:
        for count in 10, 100_000:
            tensor, place = torch.ones(count), torch.ones(count)
            refs = [weakref.ref(tensor), weakref.ref(place)]
            call, received = reducing(group, tensor), group.recv([place], 1 - group.rank(), 0)
            group.send([torch.ones(count)], 1 - group.rank(), 0).wait()
            call.wait()
            received.wait()
            del tensor, place, call, received
            gc.collect()
            assert [ref() for ref in refs] == [None, None]

    run_groups(work, 2)


def test_a_pending_receive_holds_up_no_other_future() -> None:
    def work(group: Any) -> None:
        place = torch.zeros(3)
        other = 1 - group.rank()
        waiting = [group.recv([torch.zeros(3)], other, tag) for tag in (1, 2)]
        futures = [call.get_future() for call in waiting]
        for _ in range(3):
            assert reducing(group, torch.ones(2)).get_future().wait()[0].tolist() == [2, 2]
        group.send([torch.ones(3)], other, 2).wait()
        assert futures[1].wait()[0].tolist() == [1, 1, 1]
        assert not futures[0].done() and not waiting[0].is_completed()
        group.barrier().wait()
        group.send([torch.full((3,), 5.0)], other, 1)
        assert futures[0].wait()[0].tolist() == [5, 5, 5]
        last = group.recv_anysource([place], 3)
        group.send([torch.ones(3)], other, 3)
        assert last.get_future().wait()[0] is place and last._source_rank() == other

    run_groups(work, 2)


def test_futures_asked_for_by_many_threads_at_once() -> None:
    def work(group: Any) -> None:
        sums: list[float] = []

        def ask(call: Any) -> None:
            sums.append(call.get_future().wait()[0][0].item())

        for turn in range(5):
            call = reducing(group, torch.ones(200_000))
            threads = [threading.Thread(target=ask, args=(call,)) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE)
            assert sums == [2.0] * 8 * (turn + 1)

    run_groups(work, 2)


def test_no_thread_stays() -> None:
    before = set(threading.enumerate())

    def work(group: Any) -> None:
        waiting = group.recv([torch.ones(1)], 1 - group.rank(), 0)
        futures = [waiting.get_future(), *(reducing(group, torch.ones(9)).get_future() for _ in range(20))]
        futures[-1].wait()
        group.barrier().wait()

    run_groups(work, 2)
    assert set(threading.enumerate()) <= before


def test_synchronous_calls_run_behind_asynchronous_ones() -> None:
    def work(group: Any) -> None:
        own = torch.ones(100_000)
        works = [reducing(group, own) for _ in range(20)]
        group.allreduce([own], options("Allreduce"))
        assert (own == 2.0**21).all() and all(call.is_completed() for call in works)

    run_groups(work, 2)


def test_a_late_rank_fails_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = threading.Event()

    def work(group: Any) -> None:
        if group.rank() == 1:
            assert noticed.wait(DEADLINE)
            return
        try:
            reducing(group, torch.ones(3)).get_future().wait()
        finally:
            noticed.set()

    monkeypatch.setattr(_core, "join", hurried(0.3))
    failed, _ = outcomes_of(work, 2)
    assert (
        isinstance(failed, RuntimeError)
        and "rank 0 timed out: it waited the whole timeout of 0.3" in str(failed)
        and "for rank 1" in str(failed)
    )


FORKED_WHILE_BUSY = """
import os, threading
from paceline.collectives.work import Announcer

announcer, held, over = Announcer("g"), threading.Event(), threading.Event()
def hold():
    with announcer._turn:
        held.set()
        over.wait()
threading.Thread(target=hold).start()
held.wait()
if (child := os.fork()) == 0:
    announcer.close()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
over.set()
"""


@pytest.mark.processes
def test_a_forked_child_does_not_wait_for_threads_that_it_does_not_have() -> None:
    process = start_process(FORKED_WHILE_BUSY)
    try:
        out, err = process.communicate(timeout=DEADLINE)
    finally:
        process.kill()
    assert out == "7\n", err
