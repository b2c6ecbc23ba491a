"""What studies measure of a trial, at its end."""

from __future__ import annotations

from paceline.studies.arms import Trial, error


def final_error(trial: Trial) -> float:
    """On the test data, in %."""
    return error(trial.last)


def final_accuracy(trial: Trial) -> float:
    """On the test data, in %."""
    return 100 * trial.last.value


def final_loss(trial: Trial) -> float:
    """On the test data."""
    return trial.last.loss


def train_loss(trial: Trial) -> float:
    """On the training data."""
    return trial.train_loss


def run_seconds(trial: Trial) -> float:
    """The virtual time of the run."""
    return trial.outcome.run.seconds


def staleness(trial: Trial) -> float:
    """The mean number of commits between reading parameters and using their gradient."""
    return trial.outcome.run.staleness


def waits(trial: Trial) -> float:
    """The share of the time in which workers do not compute, in %."""
    return 100 * trial.outcome.run.waiting


def megabytes_sent(trial: Trial) -> float:
    """By all workers."""
    return trial.outcome.run.bytes_out / 1e6
