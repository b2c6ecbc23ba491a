"""Built-in problems, their models and their data; ``load_problem("digits")`` is one."""

from paceline.problems.load import PROBLEMS, load_problem
from paceline.problems.models import MODELS
from paceline.problems.options import ProblemOptions
from paceline.problems.problem import Metric, Problem, Recipe

__all__ = ["MODELS", "PROBLEMS", "Metric", "Problem", "ProblemOptions", "Recipe", "load_problem"]
