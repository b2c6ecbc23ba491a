"""Make ``torch.distributed`` know the backend ``"paceline"``, whichever of torch and this package is imported first.

``import torch`` calls ``register`` too, by the entry point of group ``torch.backends``. It must be quick: all programs
that use torch pay for it. It must not fail: ``import torch`` would.
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
    """Register now if torch is there, else as soon as it is: importing it here would cost the command seconds."""
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
    """Sees ``torch.distributed`` being imported, and registers right after."""

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
