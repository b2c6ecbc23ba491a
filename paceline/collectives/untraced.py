"""Keep ``torch.compile`` out of code that torch itself calls back, for example when a compiled model runs under DDP."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Class = TypeVar("Class", bound=type)


def untraced(kind: Class) -> Class:
    """Mark a class's methods to run as they are, with all that they call.

    ``torch.compiler.disable`` does so too, but by a wrapper, which costs more than a small reduction, and by importing
    the compiler, which costs a second.
    """
    as_it_is = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for member in vars(kind).values():
        if isinstance(member, FunctionType):
            set_code_exec_strategy(member.__code__, as_it_is)
    return kind
