"""Figures and tables of the lecture decks, measured again: one file per study, one line in the table."""

from __future__ import annotations

from paceline.studies.communication import CommunicationStudy
from paceline.studies.optimizers import OptimizersStudy
from paceline.studies.study import Study, StudyContext, StudyResult

__all__ = ["STUDIES", "CommunicationStudy", "OptimizersStudy", "Study", "StudyContext", "StudyResult"]

STUDIES: dict[str, type[Study]] = {
    OptimizersStudy.name: OptimizersStudy,
    CommunicationStudy.name: CommunicationStudy,
}
