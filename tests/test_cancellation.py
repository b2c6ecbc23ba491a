"""Cancelling a step at every point where it can be, in models of every kind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.server.cancellation import Cancellation, StepCancelled


class Layers(nn.Sequential):
    """A sequence with a forward method of its own: compiled in place, torch's modules are passed over."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


class Plain(Layers):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 3))


class InPlace(Layers):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ELU(inplace=True), nn.Linear(8, 3))


class Normed(Layers):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 3))


class Tied(nn.Module):
    """One layer used twice, and another that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.twin, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.twin.weight = self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.twin(self.layer(self.layer(x))))  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    """A block whose forward pass is run again in backward."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(inplace=True))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.block, self.first(x), use_reentrant=self.use_reentrant)
        return self.last(hidden)  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "in place": InPlace,
    "batch norm": Normed,
    "tied": Tied,
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant checkpoint": lambda: Checkpointed(use_reentrant=True),
    "compiled": lambda: compiled(Plain()),
    "compiled in place": lambda: compiled_in_place(Normed()),
    "compiled part": lambda: nn.Sequential(nn.Linear(4, 4), compiled(InPlace()), nn.Tanh()),
}
# Of torch's own: it looks at .grad of what goes into a compiled part.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
every_model = pytest.mark.parametrize("kind", MODELS)


def compiled(model: nn.Module) -> nn.Module:
    wrapper: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert isinstance(wrapper, nn.Module)
    return wrapper


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.compiler.reset()


class Bell:
    """Rings at the ``at``-th question of a step, and from then on."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.asked = at, 0

    def __call__(self) -> bool:
        self.asked += 1
        return self.at is not None and self.asked > self.at


def step(model: nn.Module) -> Tensor:
    """A step's forward and backward pass, always the same."""
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # dropout
    loss = model(torch.randn(5, 4, generator=generator)).square().mean()
    loss.backward()
    return loss.detach()  # type: ignore[no-any-return]


def outcome(model: nn.Module) -> dict[str, Tensor]:
    """All that a step leaves behind."""
    model.zero_grad()
    loss = step(model)
    gradients = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
    everything = {"loss": loss, **gradients, **dict(model.named_buffers())}
    return {name: value.clone() for name, value in everything.items() if value is not None}


def points_of(model: nn.Module) -> int:
    """How often a whole step asks."""
    bell = Bell()
    with armed(model, bell):
        step(model)
    return bell.asked


@contextmanager
def armed(model: nn.Module, bell: Callable[[], bool]) -> Iterator[Cancellation]:
    interrupts = Cancellation(model, bell)
    interrupts.arm()
    yield interrupts
    interrupts.close()


def restore(model: nn.Module, before: dict[str, Tensor]) -> None:
    """What a session does after a cancelled step."""
    model.zero_grad()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])


@pytest.mark.sampled(3)
@every_model
def test_wherever_it_is_cancelled_the_next_step_is_as_if_it_had_not_been(kind: str) -> None:
    model = MODELS[kind]()
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    wanted = outcome(model)
    restore(model, start)
    points = points_of(model)
    assert points > 1
    for point in range(points):
        restore(model, start)
        bell = Bell(at=point)
        interrupts = Cancellation(model, bell)
        interrupts.arm()
        with pytest.raises(StepCancelled):
            step(model)
        assert bell.asked == point + 1  # the step went no further
        interrupts.disarm()
        restore(model, start)
        found = outcome(model)  # with the hooks still on
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        interrupts.close()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("kind", "points"),
    [
        ("plain", 7 + 6),  # calls of modules, and parameters
        ("tied", 5 + 5),
        ("checkpoint", 7 + 4 + 6),  # the block is called twice
        ("compiled", 1 + 6),
        ("compiled in place", 1 + 6),
        ("compiled part", 4 + 8),
    ],
)
def test_every_call_of_a_module_and_every_finished_gradient_asks(kind: str, points: int) -> None:
    assert points_of(MODELS[kind]()) == points


@every_model
def test_nothing_is_asked_outside_a_step(kind: str) -> None:
    model, bell = MODELS[kind](), Bell(at=0)
    interrupts = Cancellation(model, bell)
    step(model)
    interrupts.arm()
    interrupts.disarm()
    step(model)
    assert bell.asked == 0
    interrupts.close()


@every_model
def test_closing_leaves_nothing_behind(kind: str) -> None:
    model, bell = MODELS[kind](), Bell(at=0)
    calls = [module._compiled_call_impl for module in model.modules()]
    with armed(model, bell):
        pass
    step(model)
    assert bell.asked == 0
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert [module._compiled_call_impl for module in model.modules()] == calls


def test_frozen_parameters_are_left_alone() -> None:
    model = Plain()
    model[0].requires_grad_(False)
    assert points_of(model) == 7 + 4


@every_model
def test_what_comes_first_is_called_once_a_step_and_before_all_else(kind: str) -> None:
    model, bell = MODELS[kind](), Bell()
    asked: list[int] = []
    interrupts = Cancellation(model, bell)
    for _ in range(2):
        bell.asked = 0
        interrupts.arm(before_first=lambda: asked.append(bell.asked))
        step(model)
        step(model)  # accumulating
        interrupts.disarm()
    assert asked == [0, 0]
    interrupts.arm(before_first=lambda: asked.append(bell.asked))
    interrupts.disarm()
    interrupts.arm()  # a step of which nothing was called leaves nothing to the next
    step(model)
    assert len(asked) == 2
    interrupts.close()


def test_what_comes_first_may_cancel() -> None:
    def sleep() -> None:
        raise StepCancelled

    model, bell = Plain(), Bell()
    interrupts = Cancellation(model, bell)
    interrupts.arm(before_first=sleep)
    with pytest.raises(StepCancelled):
        step(model)
    assert bell.asked == 0
    interrupts.close()


def test_a_step_that_calls_no_module_still_has_what_comes_first() -> None:
    model, called = nn.Linear(2, 2), []
    interrupts = Cancellation(model, Bell())
    interrupts.arm(before_first=lambda: called.append(True))
    model.weight.sum().backward()  # type: ignore[no-untyped-call]
    assert called == [True]
    interrupts.close()


@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_handler_of_the_user_does_not_catch_it(at: int) -> None:
    def loop() -> None:
        try:
            step(model)
        except Exception:
            pytest.fail("caught")

    model = Plain()
    with armed(model, Bell(at=at)), pytest.raises(StepCancelled):
        loop()


def test_errors_of_the_user_pass_unchanged() -> None:
    def fail(*_: object) -> None:
        raise error

    error = KeyError("mine")
    for place in ("forward", "backward"):
        model = InPlace()
        with armed(model, Bell()):
            if place == "forward":
                model[2].register_forward_hook(fail)
            else:
                model.get_parameter("2.weight").register_post_accumulate_grad_hook(fail)  # type: ignore[no-untyped-call]
            with pytest.raises(KeyError) as caught:
                step(model)
            assert caught.value is error


def test_two_on_one_model_do_not_meddle() -> None:
    model = Plain()
    quiet, loud = Bell(), Bell(at=4)
    outer = Cancellation(model, quiet)
    inner = Cancellation(model, loud)
    outer.arm()
    step(model)
    assert (quiet.asked, loud.asked) == (13, 0)
    inner.arm()
    with pytest.raises(StepCancelled):
        step(model)
    inner.close()
    step(model)
    assert quiet.asked == 13 + 5 + 13
    outer.close()


def test_in_place_compiled_models_may_be_closed_in_any_order() -> None:
    model = compiled_in_place(Plain())
    first, second = Cancellation(model, Bell(at=0)), Cancellation(model, Bell(at=0))
    first.arm()
    first.close()
    second.close()
    step(model)


def pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))  # type: ignore[no-any-return]  # noqa: S301  # as torch.save(model) does


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_the_model_is_never_interrupted(copied: Callable[[nn.Module], nn.Module]) -> None:
    def bell() -> bool:
        raise AssertionError("asked by the copy")

    model = Plain()
    interrupts = Cancellation(model, bell)
    interrupts.arm()
    step(copied(model))
    interrupts.close()


class Compilations:
    """A backend that keeps the operations of the graphs it is given."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append([str(node.target) for node in graph.graph.nodes if node.op != "placeholder"])
        return graph.forward


def compile_wrapper(model: nn.Module, backend: Compilations) -> Callable[[Tensor], Any]:
    return torch.compile(model, backend=backend, fullgraph=True)


def compile_in_place(model: nn.Module, backend: Compilations) -> Callable[[Tensor], Any]:
    model.compile(backend=backend, fullgraph=True)
    return model


def compile_function(model: nn.Module, backend: Compilations) -> Callable[[Tensor], Any]:
    return torch.compile(lambda x: model(x).sum(), backend=backend, fullgraph=True)


@pytest.mark.parametrize("how", [compile_wrapper, compile_in_place, compile_function])
@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_code_has_nothing_of_ours_and_is_compiled_once(
    how: Callable[[nn.Module, Compilations], Callable[[Tensor], Any]], compiled_first: bool
) -> None:
    x = torch.randn(5, 4)
    bare = Compilations()
    how(Normed(), bare)(x)
    hooked = Compilations()
    model = Normed()
    call = how(model, hooked) if compiled_first else None
    called = call if isinstance(call, nn.Module) else model
    interrupts = Cancellation(called, Bell())
    call = call or how(model, hooked)
    for _ in range(3):
        call(x)
        interrupts.arm(before_first=lambda: None)
        call(x).sum().backward()
        interrupts.disarm()
    assert hooked.graphs == bare.graphs and len(hooked.graphs) == 1
    interrupts.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
def test_parts_that_take_no_hooks_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 3)))
    assert points_of(model) == 2 + 4
