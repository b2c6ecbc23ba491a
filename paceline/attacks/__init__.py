"""Attacks of hostile workers, to test policies and aggregators against: one small file per idea, one table of names."""

from __future__ import annotations

from paceline.attacks.attacked import AttackedProblem
from paceline.attacks.base import Attack
from paceline.attacks.constant import Constant
from paceline.attacks.free_rider import FreeRider
from paceline.attacks.gaussian import Gaussian
from paceline.attacks.label_flip import LabelFlip
from paceline.attacks.little_is_enough import LittleIsEnough
from paceline.attacks.sign_flip import SignFlip
from paceline.errors import UsageError
from paceline.problems import Problem
from paceline.spec import from_spec

__all__ = [
    "ATTACKS",
    "Attack",
    "AttackedProblem",
    "Constant",
    "FreeRider",
    "Gaussian",
    "LabelFlip",
    "LittleIsEnough",
    "SignFlip",
    "attacked",
    "parse_attack",
]

_ALL: tuple[type[Attack], ...] = (SignFlip, Constant, Gaussian, LabelFlip, LittleIsEnough, FreeRider)
ATTACKS: dict[str, type[Attack]] = {attack.name: attack for attack in _ALL}


def parse_attack(text: str) -> Attack:
    """Read an attack from its text form.

    >>> parse_attack("sign-flip(scale=3)")
    SignFlip(scale=3.0)
    """
    return from_spec("attack", ATTACKS, text)


def attacked(problem: Problem, attack: str | None, hostile: int) -> Problem:
    """Give the problem on which the first ``hostile`` workers attack; without an attack, the problem itself.

    >>> from paceline.problems import load_problem
    >>> attacked(load_problem("logistic"), "sign-flip", hostile=2).attack
    SignFlip(scale=10.0)
    """
    if attack is None and hostile == 0:
        return problem
    if attack is None:
        raise UsageError(f"{hostile} hostile workers want an attack; for example --attack {SignFlip()}")
    parsed = parse_attack(attack)
    if hostile < 1:
        raise UsageError(f"the attack {attack} wants at least 1 hostile worker, got {hostile}; for example --hostile 1")
    return AttackedProblem.of(problem, parsed, hostile)
