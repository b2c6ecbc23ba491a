"""The server of the live page: loopback alone, with a token; what it refuses, and what it sends."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from paceline.errors import UsageError
from paceline.report.live.server import PageServer


class Source:
    """A run that records what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.report: bytes | None = None

    def view(self, since: int = -1, *, first: int = 0) -> dict[str, Any]:
        self.asked.append((since, first))
        return {"turn": 7}


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[PageServer, Source]]:
    """One server for all tests, since it takes a moment to end."""
    source = Source()
    with PageServer(source) as server:
        yield server, source


@pytest.fixture
def source(shared: tuple[PageServer, Source]) -> Source:
    shared[1].asked, shared[1].report = [], None
    return shared[1]


@pytest.fixture
def server(shared: tuple[PageServer, Source], source: Source) -> PageServer:
    return shared[0]


class Answered:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body


def ask(server: PageServer, path: str, *, method: str = "GET", token: bool = True, **headers: str) -> Answered:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    query = urlsplit(server.url).query if token else ""
    connection.request(method, f"{path}{'&' if '?' in path else '?'}{query}" if query else path, headers=headers)
    answer = connection.getresponse()
    found = Answered(answer.status, dict(answer.getheaders()), answer.read())
    connection.close()
    return found


@pytest.mark.parametrize("path", ["/", "/figures.js", "/live.js", "/look.css", "/live.css", "/data"])
def test_the_page_and_its_parts_are_sent(server: PageServer, path: str) -> None:
    answer = ask(server, path)
    assert answer.status == 200
    assert answer.body
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert b"@@" not in answer.body


def test_data_are_asked_for_since_a_turn(server: PageServer, source: Source) -> None:
    assert json.loads(ask(server, "/data?since=5&first=32").body) == {"turn": 7}
    ask(server, "/data?since=x&first=-3")
    ask(server, f"/data?since={'9' * 40}")
    assert source.asked == [(5, 32), (-1, 0), (-1, 0)]


def test_the_report_is_there_when_it_is_made(server: PageServer, source: Source) -> None:
    assert ask(server, "/report").status == 404
    source.report = b"<p>all"
    answer = ask(server, "/report")
    assert (answer.status, answer.body) == (200, b"<p>all")
    assert answer.headers["Content-Security-Policy"].startswith("sandbox allow-scripts allow-downloads;")


@pytest.mark.parametrize("path", ["/", "/data", "/live.js", "/report", "/nothing"])
@pytest.mark.parametrize(
    "token", ["", "token=", "token=x", "token=%00", "token=%C3%A9", "token=%FF", f"token={'a' * 32}"]
)
def test_who_has_no_token_is_refused(server: PageServer, source: Source, path: str, token: str) -> None:
    answer = ask(server, f"{path}?{token}", token=False)
    assert answer.status == 403
    assert source.asked == []
    assert answer.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "127.0.0.2:1", "", "localhost:x"],
)
def test_another_host_is_refused(server: PageServer, host: str) -> None:
    """A page of another site may have made its own name mean 127.0.0.1."""
    assert ask(server, "/data", Host=host).status == 403


@pytest.mark.parametrize("host", ["localhost:8888", "LOCALHOST", "127.0.0.1", "[::1]:80", "[::1]"])
def test_this_host_has_several_names(server: PageServer, host: str) -> None:
    assert ask(server, "/data", Host=host).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_only_get_is_answered(server: PageServer, source: Source, method: str) -> None:
    assert ask(server, "/data", method=method).status == 405
    assert source.asked == []


@pytest.mark.parametrize(
    "path",
    [
        "/../config.json",
        "/%2e%2e/config.json",
        "//etc/passwd",
        "/page",
        "/live.html",
        "/live.js/",
        "/data/../data",
        "*",
    ],
)
def test_there_are_no_other_paths(server: PageServer, path: str) -> None:
    assert ask(server, path).status == 404


def test_a_huge_address_is_refused(server: PageServer) -> None:
    assert ask(server, f"/data?x={'y' * 3000}").status == 414
    assert ask(server, f"/data?x={'y' * 70_000}").status == 414
    assert ask(server, f"/data?{'&'.join('a=1' for _ in range(400))}").status == 200


@pytest.mark.parametrize(
    "request_", [b"\r\n\r\n", b"\x16\x03\x01\x02\x00garbage\r\n\r\n", b"GET\r\n\r\n", b"FOO / HTTP/1.1\r\n\r\n"]
)
def test_garbage_is_refused(server: PageServer, request_: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(request_)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert b"200" not in answer.split(b"\r\n")[0]
    assert b"Traceback" not in answer
    assert ask(server, "/data").status == 200


def test_it_listens_on_loopback_alone(server: PageServer) -> None:
    listening = []
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.rpartition(":")[2], 16) == server.port:
                listening.append(local.rpartition(":")[0])
    assert listening == ["0100007F"]


def test_each_server_has_a_token_of_its_own(source: Source) -> None:
    tokens = set()
    for _ in range(3):
        with PageServer(source) as server:
            tokens.add(urlsplit(server.url).query)
    assert len(tokens) == 3
    assert all(len(token) > 36 for token in tokens)


def test_the_port_is_closed_at_the_end(source: Source) -> None:
    with PageServer(source) as server:
        port = server.port
        idle = socket.create_connection(("127.0.0.1", port))  # a browser may hold one open
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    idle.close()
    with PageServer(source, port) as again:
        assert again.port == port


def test_a_port_that_is_taken_or_is_none(source: Source) -> None:
    with PageServer(source) as server, pytest.raises(UsageError, match="Address already in use"):
        PageServer(source, server.port)
    with pytest.raises(UsageError, match="0 to 65535"):
        PageServer(source, 99_999)
