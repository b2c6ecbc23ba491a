"""The estimators with scikit-learn's interface."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paceline.native._sparse", reason="needs the compiled engine")
pytest.importorskip("sklearn", reason="needs scikit-learn")

from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from sklearn.datasets import make_blobs, make_regression
from sklearn.linear_model import SGDRegressor
from sklearn.utils.estimator_checks import estimator_checks_generator

from paceline import HogwildClassifier, HogwildRegressor

# An example of weight 2 is one update, the same example twice is two: scikit-learn expects that of its own SGD too.
NOT_EQUIVALENT = {
    f"check_sample_weight_equivalence_on_{kind}_data": "updates of stochastic gradient descent are not weighted sums"
    for kind in ("dense", "sparse")
}
CHECKS = [
    check
    for estimator in (HogwildClassifier(), HogwildClassifier("log_loss", policy="cyclades"), HogwildRegressor())
    for check in estimator_checks_generator(estimator, expected_failed_checks=NOT_EQUIVALENT, mark="skip")
]


def name_of(value: Any) -> str:
    return getattr(getattr(value, "func", value), "__name__", type(value).__name__)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("estimator", "check"), CHECKS, ids=name_of)
def test_scikit_learns_own_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_more_than_two_classes() -> None:
    rows, labels = make_blobs(400, centers=4, random_state=1)
    names = np.array(["a", "b", "c", "d"])[labels]
    model = HogwildClassifier("log_loss", random_state=0).fit(sparse.csr_matrix(rows), names)
    assert model.score(rows, names) > 0.9
    assert model.coef_.shape == (4, 2)
    assert model.decision_function(rows).shape == (400, 4)
    np.testing.assert_allclose(model.predict_proba(rows).sum(axis=1), 1)


def test_partial_fit_goes_on() -> None:
    rows, labels = make_blobs(300, centers=2, random_state=2)
    model = HogwildClassifier(random_state=0)
    for part in np.array_split(np.arange(300), 5):
        model.partial_fit(rows[part], labels[part], classes=[0, 1])
    assert model.score(rows, labels) > 0.95
    with pytest.raises(ValueError, match="wanted labels of the first call"):
        model.partial_fit(rows, labels + 1)


def test_probabilities_are_for_log_loss() -> None:
    assert not hasattr(HogwildClassifier(), "predict_proba")
    assert hasattr(HogwildClassifier("log_loss"), "predict_proba")


def test_training_ends_when_nothing_improves() -> None:
    rows, labels = make_blobs(300, centers=2, random_state=2)
    model = HogwildClassifier(tol=10.0, n_iter_no_change=2, random_state=0).fit(rows, labels)
    assert model.n_iter_ == 3
    assert HogwildClassifier(tol=None, max_iter=7).fit(rows, labels).n_iter_ == 7


def test_regression() -> None:
    rows, targets = make_regression(500, 10, noise=0.1, random_state=0)
    model = HogwildRegressor(random_state=0, policy="cyclades(threads=2)").fit(rows, targets)
    assert model.score(rows, targets) > 0.99
    twin = HogwildRegressor(random_state=0, policy="serial").fit(rows, targets)
    assert (model.coef_ == twin.coef_).all()


def noisy_counts(rows: int = 3000) -> tuple[Any, Any]:
    """Rows of ones and zeros, whose targets are mostly noise."""
    random = np.random.default_rng(0)
    data = (random.random((rows, 40)) < 0.3).astype(float)
    return data, data @ random.standard_normal(40) + 3 * random.standard_normal(rows)


def test_the_default_rate_of_a_regressor_is_as_good_as_scikit_learns() -> None:
    rows, targets = noisy_counts()
    ours = HogwildRegressor(policy="serial", random_state=0).fit(rows, targets)
    assert ours.score(rows, targets) > SGDRegressor(random_state=0).fit(rows, targets).score(rows, targets) - 0.01


def test_one_long_row_does_not_make_a_regressor_diverge() -> None:
    rows, targets = noisy_counts(300)
    rows[7] *= 100
    assert np.isfinite(HogwildRegressor(random_state=0).fit(rows, targets).score(rows, targets))


@pytest.mark.parametrize("kind", [HogwildClassifier, HogwildRegressor])
def test_the_rate_of_partial_fit_falls_by_calls(kind: Any) -> None:
    rows, targets = noisy_counts(500)
    labels = np.where(targets > 0, 1, -1)
    model, lengths = kind(policy="serial", random_state=0, alpha=0), []
    options = {"classes": [-1, 1]} if kind is HogwildClassifier else {}
    for _ in range(10):
        before = getattr(model, "coef_", np.zeros(40))
        model.partial_fit(rows, labels, **options)
        lengths.append(float(np.linalg.norm(model.coef_ - before)))
    assert model.t_ == 1 + 10 * 500
    assert lengths[-1] < lengths[1] / 1.2 and lengths[-1] < lengths[0] / 3
    assert model.fit(rows, labels).t_ == 1 + model.n_iter_ * 500  # from the beginning


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=6), st.integers(0, 9))
def test_no_weights_of_rows_make_a_regressor_worse_than_zero(exponents: list[float], seed: int) -> None:
    weights = 10 ** np.array(exponents)
    rows = 10 ** np.random.default_rng(seed).uniform(-2, 2, (len(weights), 2))
    targets = rows @ [1, -1]
    model = HogwildRegressor(policy="serial", random_state=0).fit(rows, targets, weights)
    assert weights @ (model.predict(rows) - targets) ** 2 <= weights @ targets**2 * (1 + 1e-9)


def test_one_class_is_refused_by_partial_fit() -> None:
    with pytest.raises(ValueError, match="wanted at least 2 classes, got one class"):
        HogwildClassifier().partial_fit([[0.0], [1.0]], [0, 0], classes=[0])


def test_a_negative_alpha_is_named() -> None:
    with pytest.raises(ValueError, match="alpha: wanted a finite number of at least 0, got -1"):
        HogwildClassifier(alpha=-1).fit([[0.0], [1.0]], [0, 1])


def test_a_rate_that_is_too_high_is_told() -> None:
    rows, targets = make_regression(100, 10, random_state=0)
    with pytest.raises(ValueError, match="the objective became infinite at rate=50"), np.errstate(all="ignore"):
        HogwildRegressor(rate=50.0).fit(rows, targets)


def test_importing_paceline_imports_no_scikit_learn() -> None:
    code = "import paceline.hogwild.engine, sys; sys.exit(any(m in sys.modules for m in ('sklearn', 'scipy', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
