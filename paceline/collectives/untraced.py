"""Keeps ``torch.compile`` from tracing code that torch calls back, for example when a compiled model runs under DDP."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Class = TypeVar("Class", bound=type)


def untraced(kind: Class) -> Class:
    """Mark a class's methods, and all that they call, as not to be traced.

    ``torch.compiler.disable`` does the same, but its wrapper takes longer than a small reduction, and it imports the
    compiler, which takes a second.
    """
    as_it_is = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            set_code_exec_strategy(member.__code__, as_it_is)
    return kind
