"""Codecs as communication hooks of PyTorch's own DistributedDataParallel."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_processes import run_processes
from hook_programs import hooks

import paceline
from paceline.errors import UsageError


def test_hooks_train_like_torchs_own_and_remember(tmp_path: Path) -> None:
    one, other = run_processes(hooks, 2, tmp_path)
    assert one["ours"] == one["torch"]
    for name in ("ours", "twice"):
        assert one[name] == other[name]
    for found in (one, other):
        assert found["whole"]["model"] == found["resumed"]["model"]
        assert found["whole"]["hook"] == found["resumed"]["hook"]
        for codec, (anew, never_stopped) in found["anew"].items():
            assert anew == never_stopped, codec
        assert found["scaled"] == [found["whole"]["model"], found["twice"]]
        assert any(any(state["residual"]) for state in found["whole"]["hook"].values())
        assert 0 < found["whole"]["bytes"] < 5 * 4 * 363 / 2


def test_a_hook_without_a_codec_is_refused() -> None:
    with pytest.raises(UsageError, match="a hook wants a codec, got 'none'"):
        paceline.comm_hook("none")
