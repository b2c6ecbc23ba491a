"""What torch's own tests say of the backend, against the list of those that it passed before."""

from __future__ import annotations

import pytest
import torch_suite

pytest.importorskip("paceline.native._core", reason="the compiled module was not built")
pytest.importorskip("expecttest", reason="torch's tests want it")

pytestmark = [pytest.mark.soak, pytest.mark.processes]


@pytest.mark.timeout(3600)
def test_what_passed_before_still_passes() -> None:
    """One size after the other: some tests are about time."""
    lost = {}
    for size in torch_suite.SIZES:
        found = torch_suite.run("paceline", size)
        print(torch_suite.counts("paceline", size, found))
        lost[size] = sorted(torch_suite.passed_before("paceline", size) - {name for name, ok in found.items() if ok})
    assert not any(lost.values()), f"no longer passed, by number of ranks: {lost}"
