"""Two real hosts with two ranks each, as network namespaces: what the backend "paceline" gives is what Gloo gives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from paceline.bench.two_hosts import NotPossibleError, run_on, two_hosts

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

TESTS = Path(__file__).parent


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_two_hosts_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    try:
        with two_hosts("10gbit") as hosts:
            code = run_on(hosts, [str(TESTS / "two_host_program.py"), str(tmp_path)], each=2)
    except NotPossibleError as error:
        pytest.skip(str(error))
    assert code == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1", "2", "3"]
