"""The examples in the docstrings of the whole package are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent


def modules_with_examples() -> list[str]:
    """By their text, so that collecting imports nothing."""
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if ">>> " in file.read_text()]
    names = [file.relative_to(PACKAGE.parent).with_suffix("").as_posix().replace("/", ".") for file in files]
    return [name.removesuffix(".__init__") for name in names]


def test_there_are_examples() -> None:
    assert {"paceline.sessions.join", "paceline.policies", "paceline.delays.delay"} <= set(modules_with_examples())


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_are_true(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted and not results.failed, capsys.readouterr().out
