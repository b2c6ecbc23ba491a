"""The optimizers that torch lacks, against plain numpy; and every optimizer by its name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.optim import LAMB, LARS, OPTIMIZERS, NesterovRMSprop, make_optimizer

Array = NDArray[np.float64]
Rule = Iterator[Array]  # the parameters after each step

OURS: list[Callable[..., torch.optim.Optimizer]] = [NesterovRMSprop, LARS, LAMB]

law = settings(deadline=None, max_examples=60)

rates = st.floats(1e-4, 0.5)
fractions = st.just(0.0) | st.floats(0.01, 0.99)
decays = st.sampled_from([0.0, 1e-4, 0.3])
shapes = st.sampled_from([(4,), (3, 2), (2, 2, 2), ()])
seeds = st.integers(0, 2**32 - 1)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Array, list[Array], list[float]]:
    """Starting parameters, a sequence of gradients and a rate for each; both may be zero at times."""
    random, shape = np.random.default_rng(draw(seeds)), draw(shapes)
    start = random.normal(size=shape) * draw(st.sampled_from([0.0, 1.0, 10.0]))
    scales = draw(st.lists(st.sampled_from([0.0, 1e-3, 1.0, 100.0]), min_size=1, max_size=8))
    gradients = [random.normal(size=shape) * scale for scale in scales]
    return start, gradients, draw(st.lists(rates, min_size=len(scales), max_size=len(scales)))


def assert_follows(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    rule: Callable[..., Rule],
    run: tuple[Array, list[Array], list[float]],
    **options: Any,
) -> None:
    start, gradients, lrs = run
    parameter = Parameter(torch.tensor(start))
    optimizer = optimizer_class([parameter], **options)
    wanted = rule(start, gradients, lrs, **options)
    for gradient, lr in zip(gradients, lrs, strict=True):
        parameter.grad = torch.tensor(gradient)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        np.testing.assert_allclose(parameter.detach().numpy(), next(wanted), rtol=1e-9, atol=1e-12)


def rmsprop_nesterov_rule(
    p: Array,
    gradients: list[Array],
    lrs: list[float],
    *,
    alpha: float,
    momentum: float,
    eps: float,
    weight_decay: float,
) -> Rule:
    square, buffer = np.zeros_like(p), np.zeros_like(p)
    for g, lr in zip(gradients, lrs, strict=True):
        g = g + weight_decay * p
        square = alpha * square + (1 - alpha) * g**2
        d = g / (np.sqrt(square) + eps)
        buffer = momentum * buffer + d
        p = p - lr * (d + momentum * buffer)
        yield p


def lars_rule(
    w: Array,
    gradients: list[Array],
    lrs: list[float],
    *,
    momentum: float,
    weight_decay: float,
    trust: float,
    eps: float,
    adapt_vectors: bool,
    momentum_correction: bool,
) -> Rule:
    v, last_lr = np.zeros_like(w), lrs[0]
    for g, lr in zip(gradients, lrs, strict=True):
        local, decay = 1.0, 0.0
        if w.ndim > 1 or adapt_vectors:
            decay = weight_decay
            w_norm, g_norm = float(np.sqrt((w**2).sum())), float(np.sqrt((g**2).sum()))
            if w_norm and g_norm:
                local = trust * w_norm / (g_norm + decay * w_norm + eps)
        correction = lr / last_lr if momentum_correction else 1.0
        v = momentum * correction * v + lr * local * (g + decay * w)
        w = w - v
        last_lr = lr
        yield w


def lamb_rule(
    w: Array,
    gradients: list[Array],
    lrs: list[float],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Rule:
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, (g, lr) in enumerate(zip(gradients, lrs, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        r = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * w
        w_norm, r_norm = float(np.sqrt((w**2).sum())), float(np.sqrt((r**2).sum()))
        w = w - lr * (w_norm / r_norm if w_norm and r_norm else 1.0) * r
        yield w


@law
@given(run=runs(), alpha=fractions, momentum=fractions, weight_decay=decays)
def test_rmsprop_nesterov_follows_its_rule(
    run: tuple[Array, list[Array], list[float]], alpha: float, momentum: float, weight_decay: float
) -> None:
    options = {"alpha": alpha, "momentum": momentum, "weight_decay": weight_decay, "eps": 1e-6}
    assert_follows(NesterovRMSprop, rmsprop_nesterov_rule, run, **options)


@law
@given(run=runs(), momentum=fractions, weight_decay=decays, vectors=st.booleans(), correction=st.booleans())
def test_lars_follows_its_rule(
    run: tuple[Array, list[Array], list[float]],
    momentum: float,
    weight_decay: float,
    vectors: bool,
    correction: bool,
) -> None:
    options = {"momentum": momentum, "weight_decay": weight_decay, "trust": 0.02, "eps": 1e-8}
    assert_follows(LARS, lars_rule, run, **options, adapt_vectors=vectors, momentum_correction=correction)


@law
@given(run=runs(), beta1=fractions, beta2=fractions, weight_decay=decays)
def test_lamb_follows_its_rule(
    run: tuple[Array, list[Array], list[float]], beta1: float, beta2: float, weight_decay: float
) -> None:
    assert_follows(LAMB, lamb_rule, run, betas=(beta1, beta2), weight_decay=weight_decay, eps=1e-6)


@law
@given(seed=seeds, lr=st.floats(1e-4, 0.05), alpha=st.floats(0.5, 0.99), mu=st.floats(0.0, 0.95))
def test_rmsprop_nesterov_keeps_the_look_ahead_point_of_the_textbook_form(
    seed: int, lr: float, alpha: float, mu: float
) -> None:
    random = np.random.default_rng(seed)
    curvature, start, eps = random.uniform(0.1, 3.0, size=5), random.normal(size=5), 1e-3

    def gradient_at(point: Array) -> Array:
        return curvature * point + np.sin(point)

    w, v, square = start, np.zeros(5), np.zeros(5)
    ahead = Parameter(torch.tensor(start))
    optimizer = NesterovRMSprop([ahead], lr=lr, alpha=alpha, eps=eps, momentum=mu)
    for _ in range(12):
        g = gradient_at(w + mu * v)
        square = alpha * square + (1 - alpha) * g**2
        v = mu * v - lr * g / (np.sqrt(square) + eps)
        w = w + v

        ahead.grad = torch.tensor(gradient_at(ahead.detach().numpy()))
        optimizer.step()
        np.testing.assert_allclose(ahead.detach().numpy(), w + mu * v, rtol=1e-8, atol=1e-10)


def random_steps(optimizer: torch.optim.Optimizer, parameters: list[Parameter], seed: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("optimizer_class", OURS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_state_saved_in_mid_run_continues_to_the_same_bits(
    optimizer_class: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    parameters = [Parameter(torch.ones(3, 2, dtype=dtype)), Parameter(torch.ones(4, dtype=dtype))]
    optimizer = optimizer_class(parameters, lr=4.0, weight_decay=0.01)  # bfloat16 would not see less
    random_steps(optimizer, parameters, seed=1, steps=3)

    resumed = [Parameter(parameter.detach().clone()) for parameter in parameters]
    resumed_optimizer = optimizer_class(resumed)
    resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    random_steps(optimizer, parameters, seed=2, steps=3)
    random_steps(resumed_optimizer, resumed, seed=2, steps=3)

    for one, other in zip(parameters, resumed, strict=True):
        assert one.dtype == dtype
        assert not torch.equal(one, torch.ones_like(one))
        assert torch.equal(one, other)


@pytest.mark.parametrize("optimizer_class", OURS)
def test_a_complex_parameter_moves_as_its_real_and_imaginary_parts(
    optimizer_class: Callable[..., torch.optim.Optimizer],
) -> None:
    pair = Parameter(torch.randn(3, 2, 2, dtype=torch.float64))
    number = Parameter(torch.view_as_complex(pair.detach()).clone())
    optimizers = optimizer_class([pair], lr=0.1), optimizer_class([number], lr=0.1)
    for _ in range(3):
        pair.grad = torch.randn_like(pair)
        number.grad = torch.view_as_complex(pair.grad)
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(torch.view_as_real(number.detach()), pair.detach())


@pytest.mark.parametrize("optimizer_class", OURS)
def test_a_parameter_without_gradient_is_left_alone(
    optimizer_class: Callable[..., torch.optim.Optimizer],
) -> None:
    used, unused = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2))
    optimizer = optimizer_class([used, unused], weight_decay=0.1)
    used.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2, 2))
    assert unused not in optimizer.state
    assert (used < 1).all()


@pytest.mark.parametrize("optimizer_class", OURS)
def test_a_sparse_gradient_is_refused_before_anything_moves(
    optimizer_class: Callable[..., torch.optim.Optimizer],
) -> None:
    dense, sparse = Parameter(torch.ones(2, 2)), Parameter(torch.ones(5, 3))
    dense.grad, sparse.grad = torch.ones(2, 2), torch.eye(5, 3).to_sparse()
    with pytest.raises(UsageError, match=r"dense gradients.*\(5, 3\).*sparse"):
        optimizer_class([dense, sparse]).step()
    assert torch.equal(dense, torch.ones(2, 2))


@pytest.mark.parametrize("optimizer_class", OURS)
def test_the_closure_computes_the_loss_and_the_gradients(
    optimizer_class: Callable[..., torch.optim.Optimizer],
) -> None:
    parameter = Parameter(torch.ones(2, 2))
    optimizer = optimizer_class([parameter])

    def closure() -> float:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert (parameter < 1).all()


@pytest.mark.parametrize("optimizer_class", OURS)
def test_every_group_has_its_own_rate(optimizer_class: Callable[..., torch.optim.Optimizer]) -> None:
    moving, frozen = Parameter(torch.ones(2, 2)), Parameter(torch.ones(2, 2))
    optimizer = optimizer_class([{"params": [moving]}, {"params": [frozen], "lr": 0.0}])
    random_steps(optimizer, [moving, frozen], seed=0, steps=2)
    assert not torch.equal(moving, torch.ones(2, 2))
    assert torch.equal(frozen, torch.ones(2, 2))


@law
@given(scale=st.floats(1e-3, 1e3), seed=seeds)
def test_lars_does_not_see_the_scale_of_a_layers_gradient(scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, gradient = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    plain, scaled = Parameter(start.clone()), Parameter(start.clone())
    plain.grad, scaled.grad = gradient, scale * gradient
    LARS([plain, scaled], lr=1.0, trust=0.1, eps=0.0).step()
    torch.testing.assert_close(plain, scaled)
    torch.testing.assert_close((plain - start).norm(), 0.1 * start.norm())


@law
@given(lr=rates, seed=seeds)
def test_a_step_of_lamb_is_as_long_as_the_rate_times_the_weights(lr: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    start, gradient = torch.randn(2, 4, 3, generator=generator, dtype=torch.float64)
    parameter = Parameter(start.clone())
    parameter.grad = gradient
    LAMB([parameter], lr=lr).step()
    torch.testing.assert_close((parameter - start).norm(), lr * start.norm())


def test_norms_of_a_large_half_precision_layer_do_not_overflow() -> None:
    parameter = Parameter(torch.full((300, 300), 300.0, dtype=torch.float16))  # norm 90,000; float16 ends at 65,504
    parameter.grad = torch.ones_like(parameter)
    LARS([parameter], lr=1.0, trust=0.1, momentum=0.0).step()
    torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 270.0))


def test_every_optimizer_of_torch_has_a_readable_name() -> None:
    of_torch = "adadelta adafactor adagrad adam adamax adamw asgd lbfgs muon nadam radam rmsprop rprop sgd"
    assert set(OPTIMIZERS) >= {*of_torch.split(), "sparse-adam", "rmsprop-nesterov", "lars", "lamb"}
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in OPTIMIZERS)
    assert OPTIMIZERS["sparse-adam"] is torch.optim.SparseAdam
    assert torch.optim.Optimizer not in OPTIMIZERS.values()
    assert len(set(OPTIMIZERS.values())) == len(OPTIMIZERS)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_by_name_lowers_a_quadratic(name: str) -> None:
    parameter = Parameter(torch.linspace(0.5, 2.0, 12, dtype=torch.float64).reshape(4, 3))
    optimizer = make_optimizer(name, [parameter])
    assert type(optimizer) is OPTIMIZERS[name]

    def closure() -> float:
        gradient = parameter.detach().clone()
        parameter.grad = gradient.to_sparse() if name == "sparse-adam" else gradient
        return 0.5 * parameter.detach().square().sum().item()

    before = closure()
    optimizer.step(closure)
    assert closure() < before


def test_options_reach_the_optimizer() -> None:
    parameters = torch.nn.Linear(2, 2).parameters()
    optimizer = make_optimizer("sgd(lr=1, momentum=0.9, nesterov=true)", parameters)
    assert optimizer.defaults["lr"] == 1.0
    assert optimizer.defaults["momentum"] == 0.9
    assert optimizer.defaults["nesterov"] is True


BAD_SPECS = {
    "adamm": r"no optimizer called 'adamm'\. Did you mean 'adam\w*'\? Known: adadelta, ",
    "nesterov": r"no optimizer called 'nesterov'",
    "momentum": r"no optimizer called 'momentum'",
    "sgd(momentun=0.9)": r"no option 'momentun'\. Did you mean 'momentum'\? Options: lr, momentum, ",
    "sgd(params=1)": r"has no option 'params'",
    "lars(trust_me=1)": r"Did you mean 'trust'",
    "sgd(nesterov=no)": r"nesterov wants true or false, got 'no'",
    "adam(lr=fast)": r"lr wants a number, got 'fast'",
    "adam(betas=0.9)": r"betas wants a tuple of 2: a number, a number, got 0\.9",
    "sgd(lr=-1)": r"'sgd\(lr=-1\)' cannot be made: .*-1",
    "sgd(nesterov=true)": r"'sgd\(nesterov=true\)' cannot be made: Nesterov momentum requires",
    "sgd(lr=nan)": r"lr must be a finite number, got nan",
    "adam(lr=inf)": r"lr must be a finite number, got inf",
    "lars(lr=-0.1)": r"'lars\(lr=-0\.1\)' cannot be made: lr must be at least 0, got -0\.1",
    "lars(trust=nan)": r"trust must be at least 0, got nan",
    "lars(momentum=1)": r"momentum must be at least 0 and below 1, got 1",
    "lamb(eps=-1)": r"eps must be at least 0, got -1",
    "lamb(betas=(0.9, 1.0))": r"beta2 must be at least 0 and below 1, got 1\.0",
    "rmsprop-nesterov(alpha=1.5)": r"alpha must be at least 0 and below 1, got 1\.5",
    "rmsprop-nesterov(weight_decay=-1)": r"weight_decay must be at least 0, got -1",
    "muon": r"'muon' cannot be made: .*2D",
    "sgd(lr=": r"cannot read 'sgd\(lr='",
}


@pytest.mark.parametrize("spec", BAD_SPECS)
def test_a_bad_spec_says_what_is_wrong(spec: str) -> None:
    with pytest.raises(UsageError, match=BAD_SPECS[spec]):
        make_optimizer(spec, torch.nn.Linear(2, 2).parameters())
