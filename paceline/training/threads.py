"""Chooses torch's number of threads: one if the steps of a built-in problem are too small for several."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from paceline.problems import PROBLEMS, Problem

# On two idle cores two threads were hardly faster than one for steps of 61 and 86 million operations (net2, digits),
# and faster from 208 million on (net3). On busy cores they were slower for all three. See benchmarks/threads.py.
_WORTH_SHARING = 150e6  # operations of a step, as step_operations counts them
_ASKED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def wants_one_thread(name: str, problem: Problem, batch_size: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether workers that train the problem of this name on batches of this size should have one thread each.

    The result depends on the problem and the batch size alone, so a resumed run gets the same bits. The user's own
    settings in the environment stay, and so do the threads of a problem in a user's file, which may set them.
    """
    if name not in PROBLEMS or any(environment.get(variable) for variable in _ASKED):
        return False
    example, _ = problem.train[0]
    return step_operations(problem.make_model(), example, batch_size) < _WORTH_SHARING


def step_operations(model: nn.Module, example: Tensor, batch_size: int) -> int:
    """The multiplications and additions of a step by weights of two or more dimensions; backward counts twice.

    It runs the model on one example. Torch's own counter of operations takes seconds to import.
    """
    total = 0

    def count(layer: nn.Module, _: object, output: object) -> None:
        nonlocal total
        weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1 and isinstance(output, Tensor):
            total += 2 * weight.numel() * (output.numel() // weight.shape[0])

    hooks = [layer.register_forward_hook(count) for layer in model.modules()]
    was_training = model.training
    try:
        with torch.no_grad():
            model.eval()(example[None])
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return 3 * batch_size * total


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside the block, and as many as before after it.

    Results then do not depend on the machine's number of cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
