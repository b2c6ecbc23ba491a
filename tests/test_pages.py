"""The README and the pages under docs/: their examples run, and what they name is there.

A page's ``python`` blocks share a namespace, and one that begins with a file's name is written there too. ``console``
blocks are commands. Both run in this process, in a directory of their own; other blocks are only read.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from conftest import REPOSITORY
from recorded import record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as package
from paceline.aggregators import AGGREGATORS
from paceline.attacks import ATTACKS
from paceline.codecs import CODECS
from paceline.commands.cli import cli

README = REPOSITORY / "README.md"
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
WITHOUT_EXAMPLES = {"design.md"}  # test_rooms.py reads that one
WORDS_OF_README = 1000


def blocks(page: Path, kinds: str = r"\w*") -> list[tuple[str, str]]:
    """The fenced blocks of a page in their order, with the word behind each fence."""
    return re.findall(rf"^```({kinds})\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[list[str]]:
    """The arguments of every ``paceline`` command in the blocks of a page."""
    lines = [line.removeprefix("$ ") for _, block in blocks(page) for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("paceline ")]


def run_python(block: str, namespace: dict[str, Any], name: str) -> None:
    first, _, _ = block.partition("\n")
    if named := re.fullmatch(r"# (\w+\.py)", first):
        Path(named[1]).write_text(block)
    exec(compile(block, name, "exec"), namespace)


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, paceline: Any) -> None:
    examples = blocks(page, "python|console")
    assert examples or page.name in WITHOUT_EXAMPLES
    if page.name == "lock-free.md":
        for module in ("_sparse", "_readers"):
            pytest.importorskip(f"paceline.native.{module}", exc_type=ImportError)
    if page.name == "replay.md":
        (tmp_path / "runs").mkdir()
        record(tmp_path, "async").rename(tmp_path / "runs" / "night")
    namespace: dict[str, Any] = {"__name__": page.stem}
    for kind, block in examples:
        if kind == "python":
            run_python(block, namespace, page.name)
            continue
        for line in block.splitlines():
            ended = paceline(*shlex.split(line, comments=True)[2:])
            assert ended.code == 0, f"{line}\n{ended.out}{ended.err}"


@pytest.mark.parametrize("side", "-+")
def test_both_sides_of_the_loop_in_the_readme_run(side: str) -> None:
    """Before and after the change: the loop by hand, and the session's."""
    [(_, block)] = blocks(README, "diff")
    loop = "\n".join(line[2:] for line in block.splitlines() if line[:1] in ("", " ", side))
    inputs = torch.randn(256, 8)
    namespace: dict[str, Any] = {
        "torch": torch,
        "paceline": package,
        "DataLoader": DataLoader,
        "Net": lambda: nn.Linear(8, 1),
        "dataset": TensorDataset(inputs, inputs.sum(1, keepdim=True)),
        "loss_fn": nn.MSELoss(),
    }
    exec(compile(loop, README.name, "exec"), namespace)
    assert namespace["loss"].item() < 0.1


def find(arguments: list[str]) -> tuple[click.Command, click.Context]:
    """The command that the arguments begin with; what is left of them are its own."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        found = command.get_command(context, arguments[0])
        assert found is not None, arguments
        command, context = found, click.Context(found, parent=context)
        arguments.pop(0)
    return command, context


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    for arguments in commands(page):
        command, context = find(arguments)
        known = {option for parameter in command.get_params(context) for option in parameter.opts}
        unknown = {each for each in arguments if each.startswith("-")} - known
        assert not unknown, f"paceline {command.name} has no {unknown}"


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.name)
def test_what_a_page_points_to_is_there(page: Path) -> None:
    text = page.read_text()
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not heading or heading in anchors(file), f"{target}#{heading}"
    for script in re.findall(r"\b(?:benchmarks|tests|examples)/\w+\.py", text):
        assert (REPOSITORY / script).exists(), script


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("page", "there"),
    [
        ("README.md", [*package.POLICIES]),
        ("docs/policies.md", [*package.POLICIES, *AGGREGATORS]),
        ("docs/command.md", [*ATTACKS]),
        ("docs/codecs.md", [*CODECS]),
    ],
)
def test_the_tables_have_what_exists(page: str, there: list[str]) -> None:
    rows = re.findall(r"^\| (`.*?) \|", (REPOSITORY / page).read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([\w-]+)", row)]
    assert sorted(named) == sorted(there)


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= WORDS_OF_README
