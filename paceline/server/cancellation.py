"""Stop a step in the middle of its forward or backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


class StepCancelled(BaseException):
    """The step was cancelled; not an ``Exception``, so that a user's handler does not catch it."""


class Cancellation:
    """Call ``cancelled`` at many points of a step, and raise ``StepCancelled`` when it returns True.

    ``model`` is the module that the user calls. The points are the calls of its modules, and the moments when a
    parameter's gradient is complete. A compiled module is one point, before its call. Full-backward hooks are not used:
    they wrap inputs and outputs, which forbids in-place activations.

    Autograd may run the hooks in a thread of its own, while the calling thread waits.
    """

    def __init__(self, model: nn.Module, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self._armed = False
        self._before_first: Callable[[], None] | None = None
        self._undo: list[Callable[[], None]] = []
        for module in _eager_modules(model):
            if _compiled_in_place(module):
                self._ask_before_call(module)
            else:
                self._undo.append(module.register_forward_pre_hook(self._ask).remove)
        for parameter in model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(self._ask)  # type: ignore[no-untyped-call]
                self._undo.append(hook.remove)

    def arm(self, before_first: Callable[[], None] | None = None) -> None:
        """Begin a step; ``before_first`` is called at its first point, and may raise ``StepCancelled`` too."""
        self._armed, self._before_first = True, before_first

    def disarm(self) -> None:
        """End the step: nothing is checked until the next one."""
        self._armed, self._before_first = False, None

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.disarm()
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def __reduce__(self) -> tuple[type[Cancellation], tuple[nn.Module, Callable[[], bool]]]:
        # A copy of the model, such as an average of weights, has copies of these hooks. They must do nothing.
        return Cancellation, (nn.Module(), bool)

    def _ask(self, *_: object) -> None:
        if torch.compiler.is_compiling() or not self._armed:  # in this order: compiled code would guard on the second
            return
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            before_first()
        if self._cancelled():
            raise StepCancelled

    def _ask_before_call(self, module: nn.Module) -> None:
        """Check before the call of a module that would compile its hooks with itself."""
        compiled = module._compiled_call_impl
        assert compiled is not None

        def ask_and_call(*args: Any, **kwargs: Any) -> Any:
            self._ask()
            return compiled(*args, **kwargs)

        def undo() -> None:
            if module._compiled_call_impl is ask_and_call:
                module._compiled_call_impl = compiled

        module._compiled_call_impl = ask_and_call
        self._undo.append(undo)


def _eager_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that Python calls: all but those inside a compiled module."""
    seen: set[nn.Module] = set()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module in seen or isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
            continue
        seen.add(module)
        yield module
        if not (_compiled_in_place(module) or hasattr(module, "_orig_mod")):  # torch.compile's wrapper
            waiting.extend(module.children())


def _compiled_in_place(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None
