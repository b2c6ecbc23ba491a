"""The commands that start a user's script: ``run`` starts workers on this host, ``serve`` a server."""

from __future__ import annotations

import difflib
import shlex
import socket
import sys
from pathlib import Path
from typing import Any

import click

from paceline.commands import options
from paceline.errors import UsageError

_FILE = options.PathType(path_type=Path)
_TAKES_A_COMMAND = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command(context_settings=_TAKES_A_COMMAND)
@click.option("--workers", type=int, default=1, show_default=True, help="Processes on this host.")
@click.option("--policy", help="How the workers keep pace, whatever the script says.")
@options.codec_option
@options.servers_option
@options.delay_options
@click.option("--join", "address", metavar="HOST:PORT", help="Join a running server, started by serve.")
@click.option("--token-file", type=_FILE, help="File with the token to join with.  [PACELINE_TOKEN]")
@click.option("--trusted-network", is_flag=True, help="With --join, as for the server: encrypt nothing.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def run(
    workers: int,
    policy: str | None,
    codec: str | None,
    servers: int,
    respawn: bool,
    delay: str | None,
    delay_unit: str | None,
    address: str | None,
    token_file: Path | None,
    trusted_network: bool,
    command: tuple[str, ...],
) -> int:
    """Run a training SCRIPT (or -m MODULE) on several workers of this host.

    If the policy needs a parameter server, one is started too, unless the workers --join one.
    """
    _check_command("run --workers 2", command)
    from paceline.launch.joining import find_token, read_address
    from paceline.launch.service import ServerOptions
    from paceline.launch.supervisor import supervise

    if address is None and (token_file is not None or trusted_network):
        raise UsageError(
            "--token-file and --trusted-network go with --join HOST:PORT; a server of this run needs neither"
        )
    if address is not None and servers != 1:
        raise UsageError("--servers is for the command that starts the servers; with --join HOST:PORT they already run")
    asking = {"--join": address is not None, "--servers": servers > 1}
    here = workers if address is None else None  # with --join, other hosts may have more
    needed = options.needs_server(policy, next((option for option, asked in asking.items() if asked), None), here)
    server = ServerOptions(
        needed=needed and address is None,
        respawn=respawn,
        trusted=trusted_network,
        join=None if address is None else read_address(address),
        token=None if address is None else find_token(token_file),
        delay=options.read_delay(delay, delay_unit, here),
        servers=servers,
    )
    options.check_codec(codec, policy)
    learners = 1
    if policy is not None and address is None:
        from paceline.commands.learners import settle_learners

        policy = settle_learners(policy, workers, lambda _: command)
        learners = options.processes_per_worker(policy, workers)
    ending = _Ending()
    return supervise(
        command,
        workers=workers * learners,
        policy=policy,
        codec=codec,
        per_device=learners,
        on_report=ending.hear,
        on_stop=ending.tell,
        server=server,
    )


@click.command(context_settings=_TAKES_A_COMMAND)
@click.option("--workers", type=int, required=True, help="How many are expected to join.")
@options.servers_option
@click.option("--bind", default="127.0.0.1:0", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--policy", help="How the workers keep pace, whatever the script says.")
@options.codec_option
@click.option(
    "--token-file",
    type=_FILE,
    help="File with the token to join with; made if missing.  [PACELINE_TOKEN, else paceline-token]",
)
@click.option("--trusted-network", is_flag=True, help="Encrypt nothing between hosts.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def serve(
    workers: int,
    servers: int,
    bind: str,
    policy: str | None,
    codec: str | None,
    token_file: Path | None,
    trusted_network: bool,
    command: tuple[str, ...],
) -> int:
    """Be the parameter server of a training SCRIPT (or -m MODULE), for workers of any host.

    It prints its address and how to join it. Every process that has the token may join.
    """
    _check_command("serve --workers 2", command)
    from paceline.launch.joining import find_or_make_token, reachable, read_bind
    from paceline.launch.service import ServerOptions
    from paceline.launch.supervisor import check_command, supervise

    options.needs_server(policy, "serve", workers)
    options.check_codec(codec, policy)
    check_command(command, workers)
    where = read_bind(bind)
    token, file = find_or_make_token(token_file)

    ending = _Ending()

    def hear(rank: int, report: dict[str, Any]) -> None:
        ending.hear(rank, report)
        if report["event"] == "serving":
            address = reachable(report["address"], socket.gethostname())
            options = ["--join", address]
            options += [] if file is None else ["--token-file", str(file)]
            options += ["--trusted-network"] if trusted_network else []
            options += [] if policy is None else ["--policy", policy]
            options += [] if codec is None else ["--codec", codec]
            # One write: the server's own output may come between any two.
            sys.stdout.write(
                f"serving at tcp://{address}\n"
                f"the token is in {'PACELINE_TOKEN' if file is None else file}\n"
                f"join with: {shlex.join(['paceline', 'run', *options, *command])}\n"
            )
            sys.stdout.flush()

    server = ServerOptions(alone=True, bind=where, trusted=trusted_network, token=token, servers=servers)
    return supervise(
        command,
        workers=workers,
        policy=policy,
        codec=codec,
        on_report=hear,
        on_stop=ending.tell,
        server=server,
    )


class _Ending:
    """Prints the last step and checkpoint when a signal has ended a run."""

    def __init__(self) -> None:
        self._where = ""

    def hear(self, _: int, report: dict[str, Any]) -> None:
        if report["event"] == "interrupted" and report["saved"] is not None:
            self._where = f" after step {report['step']}; saved in {report['saved']}, go on with join(..., resume=True)"

    def tell(self) -> None:
        print(f"paceline: interrupted{self._where}", file=sys.stderr)


def _check_command(example: str, command: tuple[str, ...]) -> None:
    if not command:
        raise UsageError(
            f"{example.split()[0]} wants a script or -m MODULE, as in: paceline {example} script.py ARGUMENTS"
        )
    name = command[0].partition("=")[0]
    if name.startswith("-") and name != "-m":
        known = [option for parameter in click.get_current_context().command.params for option in parameter.opts]
        raise click.NoSuchOption(name, possibilities=difflib.get_close_matches(name, known, n=1))
