"""Serves the live page: on loopback alone, to whoever has the token.

Every request must name this host by a loopback name, since a page of another site can make a name of its own mean
127.0.0.1, and must carry the token, which is compared in constant time. Only a few paths exist.
"""

from __future__ import annotations

import functools
import hmac
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self
from urllib.parse import parse_qsl, urlsplit

from paceline.errors import UsageError

ADDRESS = "127.0.0.1"
_NAMES_OF_THIS_HOST = {"127.0.0.1", "localhost", "[::1]"}  # with any port, since ssh may forward another one
_LONGEST_REQUEST = 2000  # characters of path and query
_PATIENCE = 10.0  # seconds for a request to arrive
_TICK = 0.1  # seconds between two looks at whether to end
_MOST_AT_ONCE = 64  # connections; a browser has six

_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "frame-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
# The report is one file with scripts and styles inside. As a sandbox it is of no origin, and cannot read the data.
_REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)


class Source(Protocol):
    """What the pages show."""

    def view(self, since: int = -1, *, first: int = 0) -> dict[str, Any]: ...
    @property
    def report(self) -> bytes | None: ...


class Answer(NamedTuple):
    """What a path gives."""

    kind: str
    body: bytes
    policy: str = _POLICY


class PageServer:
    """Serve the page of ``source`` in the background, from ``with`` to its end; port 0 is any free one."""

    def __init__(self, source: Source, port: int = 0) -> None:
        self._token = secrets.token_urlsafe(24)
        pages = _Pages(source, self._token)

        class Handler(_Handler):
            answers = pages.answers
            token = self._token

        try:
            self._server = _Server((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it must be from 0 to 65535"
            raise UsageError(f"cannot listen on {ADDRESS} port {port}: {reason}; leave out --port") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": _TICK}, name="live page", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Where the page is, with the token."""
        return f"http://{ADDRESS}:{self.port}/?token={self._token}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """Has a thread for each of a bounded number of connections, and is silent about those that break."""

    daemon_threads = True
    block_on_close = False  # a browser may hold a connection open
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed in the middle of an answer is no error of ours."""


class _Pages:
    """The paths that exist, and what each answers."""

    def __init__(self, source: Source, token: str) -> None:
        self._source = source
        self._html = _asset("live.html").replace(b"@@TOKEN@@", token.encode())
        scripts = {f"/{name}": Answer("text/javascript", _asset(name)) for name in ("figures.js", "live.js")}
        styles = {f"/{name}": Answer("text/css", _asset(name)) for name in ("look.css", "live.css")}
        files = {"/": Answer("text/html", self._html), **scripts, **styles}
        self.answers: dict[str, Callable[[Mapping[str, str]], Answer | None]] = {
            **{path: functools.partial(_the_same, answer) for path, answer in files.items()},
            "/data": self._data,
            "/report": self._report,
        }

    def _data(self, query: Mapping[str, str]) -> Answer:
        view = self._source.view(_whole(query.get("since"), -1), first=max(0, _whole(query.get("first"), 0)))
        return Answer("application/json", json.dumps(view, allow_nan=False).encode())

    def _report(self, _: Mapping[str, str]) -> Answer | None:
        report = self._source.report
        return None if report is None else Answer("text/html", report, _REPORT_POLICY)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET of known paths."""

    answers: dict[str, Callable[[Mapping[str, str]], Answer | None]]
    token: str
    server_version = "paceline"
    sys_version = ""
    timeout = _PATIENCE

    def do_GET(self) -> None:
        if len(self.path) > _LONGEST_REQUEST:
            return self._refuse(414, "the address is too long")
        if not self._is_for_this_host():
            return self._refuse(403, "this page is for this host alone")
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        if not hmac.compare_digest(query.get("token", "").encode(), self.token.encode()):
            return self._refuse(403, "the token is missing or wrong; open the address that paceline watch has printed")
        answer = self.answers[parts.path](query) if parts.path in self.answers else None
        if answer is None:
            return self._refuse(404, "there is nothing here")
        return self._send(200, answer)

    def _other_method(self) -> None:
        self._refuse(405, "only GET is answered")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _other_method

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request."""
        self._refuse(code, "this is no request that is answered here")

    def _is_for_this_host(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1:
            return False
        name, colon, port = hosts[0].rpartition(":")
        if colon and not port.endswith("]"):
            return name.lower() in _NAMES_OF_THIS_HOST and port.isdecimal()
        return hosts[0].lower() in _NAMES_OF_THIS_HOST

    def _refuse(self, code: int, reason: str) -> None:
        self.close_connection = True
        self._send(code, Answer("text/plain", f"{reason}\n".encode()))

    def _send(self, code: int, answer: Answer) -> None:
        self.send_response(code)
        for name, value in {
            "Content-Type": f"{answer.kind}; charset=utf-8",
            "Content-Length": str(len(answer.body)),
            "Content-Security-Policy": answer.policy,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, *_: Any) -> None:
        """Requests are not told: their addresses hold the token."""


def _the_same(answer: Answer, _: Mapping[str, str]) -> Answer:
    return answer


def _asset(name: str) -> bytes:
    return (resources.files("paceline.report") / "page" / name).read_bytes()


def _whole(text: str | None, default: int) -> int:
    return int(text) if text is not None and text.removeprefix("-").isdecimal() and len(text) < 16 else default
