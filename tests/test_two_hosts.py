"""Two real hosts with two ranks each, as network namespaces: what the backend "paceline" gives is what Gloo gives."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")

TESTS = Path(__file__).parent


def benchmarks_hosts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_hosts", TESTS.parent / "benchmarks" / "two_hosts.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2")
def test_two_hosts_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
    module = benchmarks_hosts()
    try:
        with module.two_hosts("10gbit") as hosts:
            code = module.run_on(hosts, [str(TESTS / "two_host_program.py"), str(tmp_path)], each=2)
    except module.NotPossibleError as error:
        pytest.skip(str(error))
    assert code == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1", "2", "3"]
