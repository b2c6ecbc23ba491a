"""The commands ``run`` and ``serve``: what they ask of the supervisor, tokens and addresses, and mistakes."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import DEADLINE, finished, started

from paceline.errors import UsageError
from paceline.launch.joining import find_or_make_token, find_token, reachable, read_address, read_bind
from paceline.launch.service import ServerOptions

TOKEN = "5e" * 32


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_TOKEN", raising=False)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the command asks of the supervisor, which does nothing; there is a script and a token to run with."""
    calls: list[dict[str, Any]] = []

    def supervise(command: Any, **options: Any) -> int:
        calls.append({"command": list(command), **options})
        return 7

    monkeypatch.setattr("paceline.launch.supervisor.supervise", supervise)
    (tmp_path / "script.py").touch()
    (tmp_path / "token").touch(mode=0o600)
    (tmp_path / "token").write_text(f"{TOKEN.upper()}\n")
    return calls


@pytest.mark.parametrize(
    ("arguments", "workers", "policy", "server"),
    [
        ([], 1, None, ServerOptions()),
        (["--workers", "3", "--policy", "all-reduce"], 3, "all-reduce", ServerOptions()),
        (["--workers", "3", "--respawn"], 3, None, ServerOptions(respawn=True)),
        (["--policy", "k-sync(k=1)", "--respawn"], 1, "k-sync(k=1)", ServerOptions(needed=True, respawn=True)),
        (["--delay", "1+exp(0.5)"], 1, None, ServerOptions(delay=("1+exp(0.5)", 1.0))),
        (
            ["--join", "node1:47", "--token-file", "token", "--policy", "k-sync(k=9)"],  # the others are elsewhere
            1,
            "k-sync(k=9)",
            ServerOptions(join="tcp://node1:47", token=TOKEN),
        ),
        (["--delay", "2", "--delay-unit", "40ms"], 1, None, ServerOptions(delay=("2", 0.04))),
        (
            ["--workers", "2", "--join", "node1:47", "--token-file", "token", "--policy", "async"],
            2,
            "async",
            ServerOptions(join="tcp://node1:47", token=TOKEN),
        ),
        (
            ["--join", "tcp://[fd00::1]:47", "--token-file", "token", "--trusted-network", "--delay", "1 slow(9, 5)"],
            1,
            None,
            ServerOptions(join="tcp://[fd00::1]:47", token=TOKEN, trusted=True, delay=("1 slow(9, 5)", 1.0)),
        ),
    ],
)
def test_what_run_asks_for(
    arguments: list[str], workers: int, policy: str | None, server: ServerOptions, paceline: Any, asked: Any
) -> None:
    assert paceline("run", *arguments, "script.py", "--its", "own").code == 7
    (call,) = asked
    assert call["command"] == ["script.py", "--its", "own"]
    assert (call["workers"], call["policy"], call["server"]) == (workers, policy, server)


@pytest.mark.parametrize("command", ["run", "serve"])
def test_a_codec_is_passed_on_and_a_wrong_one_refused(command: str, paceline: Any, asked: Any) -> None:
    assert paceline(command, "--workers", "2", "--codec", "sign", "script.py").code == 7
    assert asked[0]["codec"] == "sign"
    wrong = paceline(command, "--workers", "2", "--codec", "sgin", "script.py")
    assert (wrong.code, len(asked)) == (2, 1)
    assert "no codec called 'sgin'. Did you mean 'sign'?" in wrong.err


@pytest.mark.parametrize("command", [["run"], ["train", "quadratic"]])
def test_a_codec_that_the_policy_cannot_have_is_refused_before_anything_starts(
    command: list[str], paceline: Any, asked: Any
) -> None:
    options = ["--workers", "2", "--policy", "gossip", "--codec", "sign"]
    found = paceline(*command, *options, *(["script.py"] if command == ["run"] else []))
    assert (found.code, asked) == (2, [])
    assert "codec sign cannot be used under gossip" in found.err


def test_what_serve_asks_for(paceline: Any, asked: Any) -> None:
    options = ["--bind", "0.0.0.0:47", "--policy", "async", "--trusted-network", "--token-file", "token"]
    assert paceline("serve", "--workers", "8", *options, "script.py", "-x").code == 7
    (call,) = asked
    assert (call["command"], call["workers"], call["policy"]) == (["script.py", "-x"], 8, "async")
    assert call["server"] == ServerOptions(alone=True, bind="0.0.0.0:47", trusted=True, token=TOKEN)


@pytest.mark.parametrize("policy", ["async", "all-reduce"])
@pytest.mark.parametrize("options", [[], ["--delay", "2"], ["--workers", "2"], ["--workers", "2", "--respawn"]])
def test_when_train_asks_for_a_server(policy: str, options: list[str], paceline: Any, asked: Any) -> None:
    found = paceline("train", "quadratic", "--max-steps", "1", "--policy", policy, *options, "--json")
    if not options:
        assert (found.code, asked) == (0, []), "one worker alone is trained here, under any policy"
    else:
        assert found.code == 7
        server = asked[0]["server"]
        assert server.needed == (policy == "async")
        assert (server.respawn, server.delay) == ("--respawn" in options, ("2", 1.0) if "--delay" in options else None)


def test_the_result_may_come_from_any_worker(paceline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 may have been killed, and replaced."""
    result = {"problem": "quadratic", "steps": 3, "resumed_at": 0}

    def supervise(*_: Any, on_report: Any, **__: Any) -> int:
        on_report(-1, {"event": "serving", "address": None})
        on_report(2, {"event": "result", "result": {**result, "steps": 4}})
        on_report(1, {"event": "result", "result": result})
        on_report(0, {"event": "result", "result": {**result, "resumed_at": 2}})
        return 0

    monkeypatch.setattr("paceline.launch.supervisor.supervise", supervise)
    assert json.loads(paceline("train", "quadratic", "--workers", "3", "--json").out) == result


MISTAKES = {
    "policy": ("run --policy asink script.py", "Did you mean 'async'"),
    "serving all-reduce": ("serve --workers 2 --policy all-reduce script.py", "found all-reduce; choose one of sync"),
    "joining all-reduce": ("run --join a:1 --policy all-reduce script.py", "--join wants a policy"),
    "joining without a token": ("run --join a:1 script.py", "--token-file FILE or set PACELINE_TOKEN"),
    "token without joining": ("run --token-file token script.py", "go with --join"),
    "trust without joining": ("run --trusted-network script.py", "go with --join"),
    "token file forgotten": ("run --join a:1 --token-file --workers 2 script.py", "found '--workers'"),
    "token file not there": ("run --join a:1 --token-file none script.py", "none: No such file"),
    "address": ("run --join node1 --token-file token script.py", "--join wants host:port.*'node1'"),
    "address of nobody": ("run --join 0.0.0.0:4 --token-file token script.py", "address of a server"),
    "option": ("run --worker 2 script.py", "No such option.*--worker\\b.*Did you mean .*--workers"),
    "option with its value": ("run --polcy=async script.py", "No such option.*--polcy\\b.*Did you mean .*--policy"),
    "option like no other": ("run -x script.py", "No such option.*-x"),
    "serve's option": ("serve --workers 2 --bnd a:1 script.py", "No such option.*--bnd\\b.*Did you mean .*--bind"),
    "k above the workers": ("run --workers 4 --policy 'k-sync(k=9)' script.py", "needs 9 workers, but the run has 4"),
    "serve's k": ("serve --workers 4 --policy 'k-sync(k=9)' script.py", "needs 9 workers, but the run has 4"),
    "serve's workers": ("serve script.py", "--workers"),
    "serve's number of workers": ("serve --workers 0 script.py", "at least 1 worker, got 0"),
    "serve's script": ("serve --workers 2 none.py", "no such script: none.py"),
    "serve's address": ("serve --workers 2 --bind a:65536 script.py", "--bind wants host:port"),
    "serve's token file": ("serve --workers 2 --token-file a/b script.py", "a/b: No such file"),
    "delay": ("run --delay 1+ script.py", "1\\+"),
    "delay of a worker that is not there": ("run --workers 2 --delay '1 slow(2, 5)' script.py", "worker 2"),
    "delay that kills": ("run --delay '1 fails(0, 5)' script.py", "fails.*kill"),
    "delay's unit": ("run --delay 1 --delay-unit '40 parsecs' script.py", "40 parsecs"),
    "unit without a delay": ("run --delay-unit 40ms script.py", "goes with --delay"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(mistake: str, paceline: Any, asked: Any, tmp_path: Path) -> None:
    before = sorted(tmp_path.iterdir())
    arguments, message = MISTAKES[mistake]
    found = paceline(*shlex.split(arguments))
    assert (found.code, found.out, asked) == (2, "", [])
    assert found.err.startswith("paceline: ") and found.err.count("\n") == 1, found.err
    assert re.search(message, found.err), found.err
    assert sorted(tmp_path.iterdir()) == before, "a mistake leaves nothing behind"


SCRIPT = """
import sys, time
from pathlib import Path
from paceline.launch.environment import take_server_assignment
from paceline.launch.reports import report
place = take_server_assignment()
print(place.role, place.token, place.trusted)
if place.role == "worker":
    assert place.address == "tcp://127.0.0.1:4711"
    Path("joined").touch()
    sys.exit()
report("serving", address=place.bind.replace("127.0.0.1:0", "tcp://[::ffff:127.0.0.1]:4711"))
while not Path("joined").exists():
    time.sleep(0.01)
"""


@pytest.mark.processes
@pytest.mark.parametrize("variables", [{}, {"PACELINE_TOKEN": TOKEN}], ids=["token made", "token in the environment"])
@pytest.mark.parametrize("options", [[], ["--trusted-network"]])
def test_who_does_as_serve_says_joins(
    variables: dict[str, str], options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    with started(["serve", "--workers", "2", *options, "script.py", "a b"], **variables) as process:
        assert process.stdout is not None
        lines = {line.partition(" ")[0]: line.rstrip() for line in (process.stdout.readline() for _ in range(4))}
        joined = finished(shlex.split(lines["join"].removeprefix("join with: paceline ")), **variables)
        out, err = process.communicate(timeout=DEADLINE)
    assert (process.returncode, out, err) == (0, "", "")
    assert (joined.returncode, joined.stderr) == (0, "")
    assert lines["serving"] == "serving at tcp://127.0.0.1:4711"
    where = "PACELINE_TOKEN" if variables else tmp_path / "paceline-token"
    assert lines["the"] == f"the token is in {where}"
    assert (tmp_path / "paceline-token").exists() == (not variables)
    role, token, trusted = lines["server"].split()
    assert (role, trusted) == ("server", str(bool(options)))
    assert joined.stdout == f"worker {token} {trusted}\n"
    assert token not in lines["join"]


def test_a_new_token_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    umask = os.umask(0)
    try:
        token, file = find_or_make_token(None)
    finally:
        os.umask(umask)
    assert file == tmp_path / "paceline-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert find_or_make_token(None) == (token, file), "a server that is started again has the same"
    assert find_token(file) == token
    assert find_or_make_token(tmp_path / "another")[0] != token


def test_a_file_comes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", TOKEN)
    assert find_or_make_token(None) == (TOKEN, None)
    assert find_token(None) == TOKEN
    token, file = find_or_make_token(tmp_path / "token")
    assert token != TOKEN and find_token(file) == token


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_can_reach_is_refused(mode: int, tmp_path: Path) -> None:
    _, file = find_or_make_token(tmp_path / "token")
    assert file is not None
    file.chmod(mode)
    with pytest.raises(UsageError, match=f"chmod 600 {file}"):
        find_token(file)


def test_a_token_may_come_through_a_pipe(tmp_path: Path) -> None:
    """As from a shell's <(...)."""
    reading, writing = os.pipe()
    os.write(writing, f"{TOKEN}\n".encode())
    os.close(writing)
    assert find_token(Path(f"/dev/fd/{reading}")) == TOKEN
    os.close(reading)


@pytest.mark.parametrize("text", ["", "secret", "5e" * 15, "5e" * 32 + "f", "5e" * 129, "5g" * 32, "\udcff"])
def test_what_is_no_token_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=str(file)) as caught:
        find_token(file)
    assert not text or text not in str(caught.value), "it may be a secret all the same"


HOSTS = st.sampled_from(["node1", "10.0.0.7", "[fd00::1]", "a.b-c"])


@given(host=HOSTS, port=st.integers(1, 65535))
def test_addresses(host: str, port: int) -> None:
    assert read_address(f"{host}:{port}") == read_address(f"tcp://{host}:{port}") == f"tcp://{host}:{port}"
    assert read_bind(f"{host}:{port}") == reachable(f"tcp://{host}:{port}", "here") == f"{host}:{port}"


@pytest.mark.parametrize(
    ("listens", "host"),
    [
        ("0.0.0.0", "here"),
        ("[::]", "here"),
        ("[::ffff:0.0.0.0]", "here"),
        ("[::ffff:10.0.0.7]", "10.0.0.7"),
        ("[fd00::1]", "[fd00::1]"),
    ],
)
def test_what_to_write_for_the_address_that_a_server_listens_at(listens: str, host: str) -> None:
    assert reachable(f"tcp://{listens}:47", "here") == f"{host}:47"


@pytest.mark.parametrize(
    "text", ["", "node1", "node1:", ":47", "node1:x", "node1:65536", "fd00::1:47", "ipc://x:1", "a b:1"]
)
def test_nonsense_is_quoted(text: str) -> None:
    for read in (read_address, read_bind):
        with pytest.raises(UsageError, match=f"wants host:port.*found {text!r}"):
            read(text)
