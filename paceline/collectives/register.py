"""Registers the backend ``"paceline"`` with ``torch.distributed``, in whatever order torch and Paceline are imported.

``import torch`` calls ``register`` too, through the entry point group ``torch.backends``. So it must be fast, since
every program that uses torch pays for it, and must not raise, since ``import torch`` would fail.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "paceline"
_TORCH = "torch.distributed"


def register() -> None:
    """Register now if torch is imported, else when it is: importing it here would cost the command seconds."""
    if _TORCH in sys.modules:
        _register_with(sys.modules[_TORCH])
    elif not any(isinstance(finder, _TorchWatcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchWatcher())


def _register_with(distributed: ModuleType) -> None:
    if distributed.is_available() and NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(opts: Any, options: Any) -> Any:
    from paceline.collectives.backend import create

    return create(opts, options)


class _TorchWatcher(MetaPathFinder):
    """Notices the import of ``torch.distributed``, and registers right after."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register_with(module)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
