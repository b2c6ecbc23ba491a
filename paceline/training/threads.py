"""Chooses the number of threads of a built-in problem's workers, before they start."""

from __future__ import annotations

import os
from collections.abc import Mapping

from paceline.launch.process_environment import has_users_threads
from paceline.problems import PROBLEMS, Problem
from paceline.threads import is_small, step_operations


def wants_one_thread(name: str, problem: Problem, batch_size: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether workers that train the problem of this name on batches of this size should have one thread each.

    The result depends on the problem and the batch size alone, so a resumed run gets the same bits. The user's own
    settings in the environment stay, and so do the threads of a problem in a user's file, which may set them.
    """
    if name not in PROBLEMS or has_users_threads(environment):
        return False
    example, _ = problem.train[0]
    return is_small(step_operations(problem.make_model(), example, batch_size))
