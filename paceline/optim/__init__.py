"""Optimizers by name: all of ``torch.optim``, and a few that it lacks."""

from paceline.optim.by_name import OPTIMIZERS, make_optimizer
from paceline.optim.lamb import LAMB
from paceline.optim.lars import LARS
from paceline.optim.rmsprop_nesterov import NesterovRMSprop

__all__ = ["LAMB", "LARS", "OPTIMIZERS", "NesterovRMSprop", "make_optimizer"]
