"""Studies, which reproduce figures and tables of the lecture decks: one file and one line in ``STUDIES`` each."""

from __future__ import annotations

from paceline.studies.adversaries import AdversariesStudy
from paceline.studies.batches_or_learners import BatchesOrLearnersStudy
from paceline.studies.codecs import CodecsStudy
from paceline.studies.communication import CommunicationStudy
from paceline.studies.diloco import DiLoCoStudy
from paceline.studies.easgd import EASGDStudy
from paceline.studies.effective_batch import EffectiveBatchStudy
from paceline.studies.hogwild import HogwildStudy
from paceline.studies.local_sgd import LocalSGDStudy
from paceline.studies.optimizers import OptimizersStudy
from paceline.studies.scaling import ScalingStudy
from paceline.studies.sma import SMAStudy
from paceline.studies.staleness import StalenessStudy
from paceline.studies.stragglers import StragglersStudy
from paceline.studies.study import Study, StudyContext, StudyResult
from paceline.studies.trade_off import TradeOffStudy
from paceline.studies.warm_up import WarmUpStudy

__all__ = [
    "STUDIES",
    "AdversariesStudy",
    "BatchesOrLearnersStudy",
    "CodecsStudy",
    "CommunicationStudy",
    "DiLoCoStudy",
    "EASGDStudy",
    "EffectiveBatchStudy",
    "HogwildStudy",
    "LocalSGDStudy",
    "OptimizersStudy",
    "SMAStudy",
    "ScalingStudy",
    "StalenessStudy",
    "StragglersStudy",
    "Study",
    "StudyContext",
    "StudyResult",
    "TradeOffStudy",
    "WarmUpStudy",
]

STUDIES: dict[str, type[Study]] = {
    study.name: study
    for study in (
        OptimizersStudy,
        CommunicationStudy,
        StragglersStudy,
        TradeOffStudy,
        WarmUpStudy,
        LocalSGDStudy,
        EffectiveBatchStudy,
        ScalingStudy,
        SMAStudy,
        DiLoCoStudy,
        CodecsStudy,
        BatchesOrLearnersStudy,
        StalenessStudy,
        AdversariesStudy,
        EASGDStudy,
        HogwildStudy,
    )
}
