"""The public names are those in ``__all__``, and all of them can be had."""

from __future__ import annotations

import subprocess
import sys

import paceline


def test_every_public_name_resolves() -> None:
    assert [name for name in paceline.__all__ if not hasattr(paceline, name)] == []
    assert sorted(paceline.__all__) == dir(paceline)


def test_importing_the_package_does_not_import_torch() -> None:
    """Nor does what a supervisor needs that injects delays, nor a simulation of times."""
    modules = ("commands.cli", "launch.supervisor", "delays.injected", "virtual.simulate")
    imported = ", ".join(f"paceline.{module}" for module in modules)
    code = f"import {imported}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
