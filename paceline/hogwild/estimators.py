"""Linear models with scikit-learn's interface, trained by the sparse engine.

>>> from paceline import HogwildClassifier
>>> HogwildClassifier(policy="serial", random_state=0).fit([[0.0], [1.0]], [3, 7]).predict([[2.0]]).tolist()
[7]
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.hogwild.engine import Engine
from paceline.hogwild.problems import CSR, SCIKIT_LOSSES, LinearProblem
from paceline.seeding import derive_seed

try:
    from scipy import sparse
    from scipy.special import expit
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.extmath import safe_sparse_dot
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets, unique_labels
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
except ImportError as error:
    raise ImportError(f"the estimators need scikit-learn ({error}); pip install 'paceline[sklearn]'") from error

Array = NDArray[Any]
Self = TypeVar("Self", bound="LinearEstimator")


class LinearEstimator(BaseEstimator):  # type: ignore[misc]
    """What the classifier and the regressor share: one engine for each column of targets."""

    coef_: Array
    intercept_: Array

    def __init__(
        self,
        loss: str = "squared_error",
        *,
        alpha: float = 1e-4,
        rate: float | None = None,
        decay: float = 0.9,
        fit_intercept: bool = True,
        max_iter: int = 20,
        tol: float | None = 1e-4,
        n_iter_no_change: int = 5,
        policy: str = "hogwild",
        random_state: Any = None,
    ) -> None:
        self.loss = loss
        self.alpha = alpha
        self.rate = rate
        self.decay = decay
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter
        self.tol = tol
        self.n_iter_no_change = n_iter_no_change
        self.policy = policy
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _read(self, X: Any, y: Any, reset: bool, **options: Any) -> tuple[Any, Array]:
        if self.loss not in self._losses:
            raise ValueError(f"loss: wanted one of {', '.join(self._losses)}, got {self.loss!r}")
        if not 0 <= self.alpha < np.inf:
            raise ValueError(f"alpha: wanted a finite number of at least 0, got {self.alpha}")
        if self.max_iter < 1:
            raise ValueError(f"max_iter: wanted at least 1, got {self.max_iter}")
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=[np.float64, np.float32], reset=reset, **options)
        return (X if sparse.issparse(X) else sparse.csr_matrix(X)), y

    def _train(self, X: Any, targets: list[Array], weights: Array | None, epochs: int, tol: float | None) -> None:
        """Make so many epochs for each column of targets, from ``coef_`` and ``intercept_``, which then are new."""
        if not hasattr(self, "rate_"):
            self.rate_ = self._steady_rate(X, weights) if self.rate is None else self.rate
        rate = self.rate_ / self.t_**0.25  # of a first call the whole rate
        seeds = _seeds(self.random_state)
        coefs, intercepts, made = self.coef_.copy(), self.intercept_.copy(), 0
        for column, target in enumerate(targets):
            problem = LinearProblem(
                CSR.from_scipy(X),
                target.astype(X.dtype),
                SCIKIT_LOSSES[self.loss],
                self.alpha,
                None if weights is None else weights.astype(X.dtype),
                self.fit_intercept,
            )
            engine = Engine(problem, self.policy, seed=next(seeds), rate=rate, decay=self.decay, watch=0)
            engine.parameters["coef"][:] = coefs[column]
            if self.fit_intercept:
                engine.parameters["intercept"][:] = intercepts[column]
            made = max(made, self._run(engine, epochs, tol))
            coefs[column] = engine.parameters["coef"]
            intercepts[column] = engine.parameters["intercept"][0] if self.fit_intercept else 0
            if not np.isfinite(problem.penalty(engine.parameters) + intercepts[column]):
                raise ValueError(
                    f"the objective became infinite at rate={self.rate_:g}; scale the data or lower the rate"
                )
        self.coef_, self.intercept_, self.n_iter_ = coefs, intercepts, made
        self.t_ += made * X.shape[0]

    def _run(self, engine: Engine, epochs: int, tol: float | None) -> int:
        """Train until ``n_iter_no_change`` epochs have not lowered the objective by ``tol``; the epochs made."""
        best, idle = np.inf, 0
        for epoch in range(1, epochs + 1):
            engine.run()
            if tol is None:
                continue
            objective = engine.objective()
            idle = 0 if objective <= best - tol else idle + 1
            best = min(best, objective)
            if idle >= self.n_iter_no_change:
                return epoch
        return epochs

    def _steady_rate(self, X: Any, weights: Array | None) -> float:
        """A rate at which an update of a mean row corrects a fifth of its error; of ``squared_error`` a tenth.

        There no row is corrected by more than its error, or a long row would make the weights grow without end.
        """
        squared = self.loss == "squared_error"
        if weights is None and not squared:  # quicker, since the lengths of single rows do not matter
            mean = float(np.square(X.data, dtype=np.float64).sum()) / X.shape[0] + self.fit_intercept
            return 0.2 / mean if mean > 0 else 0.2
        lengths = np.asarray(X.multiply(X).sum(axis=1), np.float64).ravel()
        # The intercept learns as fast as the weight of an entry of mean size.
        lengths += self.fit_intercept * (lengths.sum() / max(1, X.nnz) if squared else 1)
        lengths = lengths if weights is None else lengths * weights
        part, mean = 0.1 if squared else 0.2, float(lengths.mean())
        rate = part / mean if mean > 0 else part
        return min(rate, 1 / float(lengths.max())) if squared and mean > 0 else rate

    def _begin(self, columns: int, X: Any) -> None:
        self.coef_ = np.zeros((columns, X.shape[1]), X.dtype)
        self.intercept_ = np.zeros(columns, X.dtype)
        self.t_ = 1  # updates made, and one, as scikit-learn counts them
        if hasattr(self, "rate_"):
            del self.rate_

    def _scores(self, X: Any) -> Array:
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=[np.float64, np.float32], reset=False)
        scores: Array = safe_sparse_dot(X, np.atleast_2d(self.coef_).T, dense_output=True) + self.intercept_
        return scores.ravel() if scores.shape[1] == 1 else scores


def _are_plain(labels: Array) -> bool:
    """Whether these are whole numbers or texts; scikit-learn's own check takes 0.1 ms."""
    return labels.dtype.kind in "biuU" or (labels.dtype.kind == "f" and not (labels % 1).any())


def _seeds(random_state: Any) -> Iterator[int]:
    """A seed for each column. A number is one itself: a generator made of it takes 0.1 ms."""
    if isinstance(random_state, int | np.integer) and 0 <= random_state < 2**32:
        yield from (derive_seed(int(random_state), "column", column) for column in count())
    random = check_random_state(random_state)
    while True:
        yield int(random.randint(2**31 - 1))


class HogwildClassifier(ClassifierMixin, LinearEstimator):  # type: ignore[misc]
    """A linear support vector machine or logistic regression, trained by threads without locks.

    Under ``policy="serial"`` or ``"cyclades"`` the same ``random_state`` gives the same bits; under ``"hogwild"``,
    which is faster, it does only on one thread. More than two classes are trained one against the rest.

    Args:
        loss: ``"hinge"`` or ``"log_loss"``.
        alpha: the factor of the regulariser, as scikit-learn's.
        rate: step size of the first epoch; by default it follows the length of the rows.
        decay: the step size is multiplied by it after each epoch.
        max_iter: epochs at most.
        tol: end when the objective falls by less in ``n_iter_no_change`` epochs; ``None`` is never.
        policy: how threads share the weights: ``"serial"``, ``"hogwild(threads=2)"``, ``"cyclades"``, ...
    """

    _losses = ("hinge", "log_loss")

    def __init__(
        self,
        loss: str = "hinge",
        *,
        alpha: float = 1e-4,
        rate: float | None = None,
        decay: float = 0.9,
        fit_intercept: bool = True,
        max_iter: int = 20,
        tol: float | None = 1e-4,
        n_iter_no_change: int = 5,
        policy: str = "hogwild",
        random_state: Any = None,
        class_weight: Any = None,
    ) -> None:
        super().__init__(
            loss,
            alpha=alpha,
            rate=rate,
            decay=decay,
            fit_intercept=fit_intercept,
            max_iter=max_iter,
            tol=tol,
            n_iter_no_change=n_iter_no_change,
            policy=policy,
            random_state=random_state,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> HogwildClassifier:
        """Train on rows and their labels, from the beginning."""
        X, y = self._read(X, y, reset=True)
        self.classes_ = np.unique(y)
        if not _are_plain(self.classes_):
            check_classification_targets(y)
        if len(self.classes_) < 2:
            raise ValueError(f"wanted at least 2 classes, got one class: {self.classes_[0]!r}")
        self._begin(1 if len(self.classes_) == 2 else len(self.classes_), X)
        return self._learn(X, y, sample_weight, self.max_iter, self.tol)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> HogwildClassifier:
        """Make one epoch over these rows; the first call names all classes.

        The rate falls with the fourth root of the updates made in earlier calls.
        """
        first = not hasattr(self, "classes_")
        if first and classes is None:
            raise ValueError("classes must be passed on the first call to partial_fit.")
        X, y = self._read(X, y, reset=first)
        if first:
            labels = unique_labels(classes)
            if len(labels) < 2:
                raise ValueError(f"wanted at least 2 classes, got one class: {labels[0]!r}")
            self.classes_ = labels
            self._begin(1 if len(self.classes_) == 2 else len(self.classes_), X)
        strange = np.setdiff1d(y, self.classes_)
        if len(strange):
            raise ValueError(f"wanted labels of the first call, {self.classes_}, got {strange}")
        return self._learn(X, y, sample_weight, 1, None)

    def _learn(self, X: Any, y: Array, sample_weight: Any, epochs: int, tol: float | None) -> HogwildClassifier:
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, X, dtype=X.dtype)
        if self.class_weight is not None:
            of_class = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
            of_row = of_class[np.searchsorted(self.classes_, y)]
            weights = of_row if weights is None else weights * of_row
        positive = self.classes_[1:] if len(self.classes_) == 2 else self.classes_
        self._train(X, [np.where(y == label, 1, -1) for label in positive], weights, epochs, tol)
        return self

    def decision_function(self, X: Any) -> Array:
        """The signed distance of each row from the border, times the length of the weights; a column for each class."""
        return self._scores(X)

    def predict(self, X: Any) -> Array:
        """The label of each row."""
        scores = self.decision_function(X)
        places = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        labels: Array = self.classes_[places]
        return labels

    @available_if(lambda self: self.loss == "log_loss")  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> Array:
        """The probability of each class; of more than two, each against the rest, divided by their sum."""
        chances = expit(self.decision_function(X))
        if chances.ndim == 1:
            return np.column_stack([1 - chances, chances])
        total = chances.sum(axis=1, keepdims=True)
        probabilities: Array = np.where(total > 0, chances / np.where(total > 0, total, 1), 1 / chances.shape[1])
        return probabilities


class HogwildRegressor(RegressorMixin, LinearEstimator):  # type: ignore[misc]
    """Linear least squares, trained by threads without locks; the arguments are those of ``HogwildClassifier``."""

    _losses = ("squared_error",)

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> HogwildRegressor:
        """Train on rows and their targets, from the beginning."""
        X, y = self._read(X, y, reset=True, y_numeric=True)
        self._begin(1, X)
        return self._learn(X, y, sample_weight, self.max_iter, self.tol)

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> HogwildRegressor:
        """Make one epoch over these rows; the rate falls with the fourth root of the updates made in earlier calls."""
        first = not hasattr(self, "coef_")
        X, y = self._read(X, y, reset=first, y_numeric=True)
        if first:
            self._begin(1, X)
        return self._learn(X, y, sample_weight, 1, None)

    def _learn(self, X: Any, y: Array, sample_weight: Any, epochs: int, tol: float | None) -> HogwildRegressor:
        weights = None if sample_weight is None else _check_sample_weight(sample_weight, X, dtype=X.dtype)
        self.coef_ = np.atleast_2d(self.coef_)
        self._train(X, [np.asarray(y)], weights, epochs, tol)
        self.coef_ = self.coef_[0]
        return self

    def predict(self, X: Any) -> Array:
        """The prediction for each row."""
        return self._scores(X)
