"""Finds a problem by its name, or in a user's Python file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from paceline.errors import UsageError, unknown_name
from paceline.problems.charlm import charlm
from paceline.problems.images import cifar10, digits, mnist
from paceline.problems.options import ProblemOptions, refuse_model, refuse_normalise
from paceline.problems.problem import Problem
from paceline.problems.synthetic import logistic, quadratic

PROBLEMS: dict[str, Callable[[ProblemOptions], Problem]] = {
    "digits": digits,
    "mnist": mnist,
    "cifar10": cifar10,
    "charlm": charlm,
    "quadratic": quadratic,
    "logistic": logistic,
}

_DEFAULT_OPTIONS = ProblemOptions()


def load_problem(name: str, options: ProblemOptions = _DEFAULT_OPTIONS) -> Problem:
    """Return the built-in problem of that name, or the one that a Python file makes.

    ``path/to/file.py`` calls the file's function ``problem()``, ``path/to/file.py:other`` its ``other()``.
    Exceptions of such a file pass through unchanged. It may import files of its own directory.
    """
    path, function = _split_path(name)
    if path is not None:
        refuse_model(name, options)
        refuse_normalise(name, options)
        return _problem_in_file(path, function)
    if name not in PROBLEMS:
        raise unknown_name("problem", name, PROBLEMS)
    return PROBLEMS[name](options)


def _split_path(name: str) -> tuple[Path | None, str]:
    """Split ``file.py:function``; the path is None if the name is no path to a Python file."""
    if name.endswith(".py"):
        return Path(name), "problem"
    path, colon, function = name.rpartition(":")
    if colon and path.endswith(".py"):
        return Path(path), function
    return None, ""


def _problem_in_file(path: Path, function: str) -> Problem:
    if not path.is_file():
        raise UsageError(f"no problem file {path}: looked for {path.resolve()}")
    module = _import_file(path)
    make_problem = getattr(module, function, None)
    if not callable(make_problem):
        raise UsageError(
            f"{path} has no function {function}(); define it, or name another one as {path}:NAME. "
            f"Found: {', '.join(_functions_of(module)) or 'none'}."
        )
    problem = make_problem()
    if not isinstance(problem, Problem):
        raise UsageError(
            f"{function}() in {path} must return a paceline.problems.Problem, "
            f"and it returned a value of type {type(problem).__name__}"
        )
    return problem


def _import_file(path: Path) -> ModuleType:
    name = f"paceline_problem_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # any path that ends in .py has both
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that a file there cannot hide an installed module
    sys.modules[name] = module  # dataclasses and pickle look up a class's module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _functions_of(module: ModuleType) -> list[str]:
    """Names of the functions defined in the file itself."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
