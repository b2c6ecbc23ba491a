"""Imports point down: the diagram in the design page is complete, and the code keeps to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "paceline"


def rooms() -> list[str]:
    """The rooms in the order of the diagram, from top to bottom."""
    page = (REPOSITORY / "docs" / "design.md").read_text()
    diagram = re.search(r"## The shape\n.*?```\n(.*?)```", page, re.DOTALL)
    assert diagram is not None
    return [line.split()[0].removesuffix("/").removesuffix(".py") for line in diagram[1].splitlines()]


def room_of(module: str) -> str:
    """The room of a module such as ``paceline.store.layout``; the package itself has the public names."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0] or "__init__"


def imports_of(source: str) -> Iterator[str]:
    """The modules of ours that a source imports anywhere, in functions and for type checking too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition(".")[0] == "paceline")
        elif isinstance(node, ast.ImportFrom) and node.module == "paceline":
            yield from (f"paceline.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paceline."):
            yield str(node.module)


def upward(source: str, room: str, order: list[str]) -> list[str]:
    """The imports of a module in ``room`` that do not point down."""
    found = []
    for module in imports_of(source):
        target = room_of(module) if room_of(module) in order else "__init__"  # a public name
        if target != room and order.index(target) <= order.index(room):
            found.append(module)
    return found


def test_the_diagram_names_every_room_once() -> None:
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(rooms()) == sorted(there)


@pytest.mark.parametrize("room", rooms())
def test_no_import_points_up(room: str) -> None:
    files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").exists() else sorted((PACKAGE / room).rglob("*.py"))
    found = {str(file.relative_to(PACKAGE)): upward(file.read_text(), room, rooms()) for file in files}
    assert {file: modules for file, modules in found.items() if modules} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from paceline.sessions.join import join",
        "def late() -> None:\n    import paceline.sessions.join",
        "from paceline import sessions",
        "from paceline import join",
    ],
)
def test_an_import_that_points_up_is_found(source: str) -> None:
    assert upward(source, "server", rooms()) != []
    assert upward(source, "training", rooms()) == []
