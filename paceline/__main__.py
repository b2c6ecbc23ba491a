"""``python -m paceline`` is the command ``paceline``, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

from paceline.interrupts import answered, end_at_once
from paceline.launch.process_environment import brief_spinning
from paceline.launch.reports import supervised


def main() -> NoReturn:
    """Run the command; Ctrl-C is answered from its first import to its last line."""
    os.environ.update(brief_spinning(os.environ))  # before torch is imported
    alone = not supervised()  # else the supervisor answers
    with answered(end_at_once, signal.SIGINT) if alone else contextlib.nullcontext():
        from paceline.commands.cli import main as command
    try:
        command()
    finally:
        if alone:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said, and Python's own end is best left alone


if __name__ == "__main__":
    main()
