"""A worker's line to its supervisor, without either."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import paceline
from paceline.commands.cli import cli
from paceline.errors import UsageError
from paceline.launch import reports


@pytest.fixture
def reading() -> Iterator[int]:
    """The supervisor's end of a line whose other end this process reports through."""
    reading, writing = os.pipe()
    reports.connect(writing)
    yield reading
    reports.disconnect()
    os.close(reading)


def received(reading: int) -> list[dict[str, Any]]:
    reports.disconnect()
    return _read_all(reading)


def test_reports_arrive_in_order(reading: int) -> None:
    assert reports.supervised()
    reports.report("joined")
    reports.report("progress", step=3, loss=0.5, note="two\nlines")
    first, second = received(reading)
    assert first["event"] == "joined"
    assert second == {"event": "progress", "step": 3, "loss": 0.5, "note": "two\nlines", "at": second["at"]}
    assert first["at"] <= second["at"]


def test_without_a_supervisor_reporting_does_nothing() -> None:
    assert not reports.supervised()
    reports.report("progress", step=1, loss=object())


def test_what_json_cannot_hold_is_refused(reading: int) -> None:
    with pytest.raises(UsageError, match="'progress'"):
        reports.report("progress", loss=object())
    assert received(reading) == []


def test_a_supervisor_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    reports.connect(writing)
    os.close(reading)
    reports.report("progress", step=1)
    reports.disconnect()


def test_a_descriptor_that_is_not_a_pipe_is_left_alone(tmp_path: Any) -> None:
    with open(tmp_path / "file", "w") as file:  # noqa: PTH123
        reports.connect(file.fileno())
        reports.report("progress", step=1)
    reports.connect(12345)
    assert not reports.supervised()
    assert (tmp_path / "file").read_text() == ""


def test_the_middle_of_a_long_text_is_left_out(reading: int) -> None:
    reports.report("failed", traceback="first" + "x" * 50_000 + "last")
    (report,) = received(reading)
    assert len(report["traceback"]) < 33_000
    assert report["traceback"].startswith("first") and report["traceback"].endswith("last")


def raised(action: Callable[[], None]) -> Exception:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("it should have raised")


def wraps() -> None:
    try:
        raise ConnectionResetError("peer")
    except ConnectionResetError as error:
        raise ValueError("outer") from error


def fails_while_failing() -> None:
    try:
        raise KeyError("cause")
    finally:
        raise ConnectionResetError("peer")


def hides() -> None:
    try:
        raise KeyError("hidden")
    except KeyError:
        raise ValueError("shown") from None


@pytest.mark.parametrize(
    ("action", "kind", "first"),
    [
        (wraps, "ValueError", "ConnectionResetError: peer"),
        (fails_while_failing, "ConnectionResetError", "KeyError: 'cause'"),
        (hides, "ValueError", "ValueError: shown"),
    ],
)
def test_a_failure_names_what_it_goes_back_to(reading: int, action: Callable[[], None], kind: str, first: str) -> None:
    error = raised(action)
    reports.report_failure(error)
    (report,) = received(reading)
    assert (report["event"], report["type"], report["first_message"]) == ("failed", kind, first + "\n")
    assert report["first_types"][0] == first.split(":")[0]
    assert report["first_types"][-1] == "object"
    assert report["traceback"] == "".join(traceback.format_exception(error))


def test_a_users_mistake_is_shown_without_our_frames(reading: int) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mistaken() -> None:
        paceline.join(model, optimizer, policy="k-sync(k=nine)")

    reports.report_failure(raised(mistaken))
    (report,) = received(reading)
    head, *places, _ = report["traceback"].splitlines()
    files = [line for line in places if line.lstrip().startswith("File ")]
    assert head == "Traceback (most recent call last):"
    assert len(files) == 2 and all(__file__ in line for line in files), report["traceback"]
    assert report["traceback"].splitlines()[-1].startswith("paceline.errors.UsageError: ")


def test_a_loss_that_is_not_finite_is_shown_without_our_frames(reading: int) -> None:
    model = torch.nn.Linear(1, 1)
    session = paceline.join(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def diverging() -> None:
        with session, session.step() as step:
            step.record(loss=torch.tensor(float("nan")))

    reports.report_failure(raised(diverging))
    *_, last = received(reading)
    files = [line for line in last["traceback"].splitlines() if line.lstrip().startswith("File ")]
    assert files and all(__file__ in line for line in files), last["traceback"]


def test_an_error_without_frames_of_the_user_is_one_line(reading: int) -> None:
    """As in a worker of ``paceline train``, where click calls our command."""
    error = raised(lambda: cli.main(["train", "--resume", "nowhere"], standalone_mode=False))
    while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    assert error.__traceback__ is not None
    reports.report_failure(error)
    (report,) = received(reading)
    assert len(report["traceback"].splitlines()) == 1, report["traceback"]


def test_what_led_a_user_to_a_mistake_is_shown_too(reading: int) -> None:
    def mistaken() -> None:
        try:
            raise KeyError("policy")
        except KeyError:
            paceline.parse_policy("k-sync(")

    reports.report_failure(raised(mistaken))
    (report,) = received(reading)
    assert "KeyError: 'policy'" in report["traceback"]
    assert "During handling of the above exception" in report["traceback"]


def test_threads_do_not_mix_their_lines(reading: int) -> None:
    heard: list[dict[str, Any]] = []
    reader = threading.Thread(target=lambda: heard.extend(_read_all(reading)))
    reader.start()
    senders = [threading.Thread(target=_send_many, args=(number,)) for number in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    reports.disconnect()
    reader.join()
    assert {sender: [r["step"] for r in heard if r["sender"] == sender] for sender in range(4)} == {
        sender: list(range(20)) for sender in range(4)
    }


def _send_many(sender: int) -> None:
    for step in range(20):
        reports.report("progress", sender=sender, step=step, text="x" * 9_000)  # more than a pipe takes in one piece


def _read_all(reading: int) -> list[dict[str, Any]]:
    with os.fdopen(os.dup(reading), "rb") as pipe:
        return [json.loads(line) for line in pipe]
