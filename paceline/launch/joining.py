"""Reads what a worker needs to join a server on another host: the address, and a token in a file of mode 600."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.environment import TOKEN, asked_token
from paceline.launch.service import make_token

TOKEN_FILE = Path("paceline-token")  # the default file of a server's new token
_PLACE = re.compile(r"(\[[^\[\]/\s]+\]|[^:\[\]/\s]+):([0-9]{1,5})")
_TOKEN = re.compile(r"([0-9a-fA-F]{2}){16,128}")
_ANY_INTERFACE = ("*", "0.0.0.0", "[::]")


def read_address(text: str) -> str:
    """Read the address of a server: ``host:port``, or ``tcp://host:port`` as ``paceline serve`` prints it."""
    host, port = _split("--join", text.removeprefix("tcp://"))
    if port == 0 or host in _ANY_INTERFACE:
        raise UsageError(f"--join wants the address of a server, such as node1:4711, found {text!r}")
    return f"tcp://{host}:{port}"


def read_bind(text: str) -> str:
    """Read the ``host:port`` that a server listens at; port 0 is any free one."""
    host, port = _split("--bind", text)
    return f"{host}:{port}"


def reachable(address: str, hostname: str) -> str:
    """The ``host:port`` under which workers reach a server that listens at ``tcp://host:port``."""
    host, port = _split("the server's address", address.removeprefix("tcp://"))
    if host.startswith("[::ffff:"):  # an IPv4 address, as sockets for both kinds write it
        host = host.removeprefix("[::ffff:").removesuffix("]")
    return f"{hostname if host in _ANY_INTERFACE else host}:{port}"


def _split(what: str, text: str) -> tuple[str, int]:
    match = _PLACE.fullmatch(text)
    if match is None or int(match[2]) > 65535:
        raise UsageError(f"{what} wants host:port, such as node1:4711 or [fd00::1]:4711, found {text!r}")
    return match[1], int(match[2])


def find_token(file: Path | None) -> str:
    """The token to join with, from the file or from the variable ``PACELINE_TOKEN``."""
    if file is not None:
        return _read_token(file)
    token = asked_token()
    if token is None:
        raise UsageError(
            f"joining a server needs its token: give --token-file FILE or set {TOKEN}; "
            "'paceline serve' tells where the token is"
        )
    return _check_token(token, TOKEN)


def find_or_make_token(file: Path | None) -> tuple[str, Path | None]:
    """The token of a server and the file that holds it; a missing file is made, with a new token."""
    if file is None and asked_token() is not None:
        return find_token(None), None
    file = (file or TOKEN_FILE).absolute()
    try:
        # O_EXCL refuses a file or link that is already there; 0o600 keeps other users from reading from the start.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _read_token(file), file
    except OSError as error:
        raise UsageError(f"cannot write the token to {file}: {error.strerror}; choose another --token-file") from error
    token = make_token()
    with os.fdopen(descriptor, "w") as stream:
        stream.write(f"{token}\n")
    return token, file


def _read_token(file: Path) -> str:
    try:
        with file.open() as stream:
            status = os.fstat(stream.fileno())
            # Pipes, such as a shell's <(...), have no other readers.
            if stat.S_ISREG(status.st_mode) and (status.st_mode & 0o077 or status.st_uid != os.geteuid()):
                raise UsageError(
                    f"the token in {file} may be another user's: make it your own and run chmod 600 {file}"
                )
            text = stream.read(1000)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise UsageError(f"cannot read the token in {file}: {reason}") from error
    return _check_token(text.strip(), str(file))


def _check_token(token: str, where: str) -> str:
    if _TOKEN.fullmatch(token) is None:
        raise UsageError(
            f"{where} should hold a token, 32 to 256 hexadecimal digits; "
            "'paceline serve' makes one, as does openssl rand -hex 32"
        )
    return token.lower()
