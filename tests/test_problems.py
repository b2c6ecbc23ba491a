"""The built-in problems, and problems in a user's file."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.optim import make_optimizer
from paceline.problems import MODELS, PROBLEMS, Metric, Problem, ProblemOptions, load_problem
from paceline.problems.charlm import CONTEXT, encode, loss_per_character, windows
from paceline.problems.images import accuracy
from paceline.problems.synthetic import make_quadratic, sign_accuracy

SHIPPED = ["digits", "logistic", "quadratic"]  # those that need no files
TEXT = "It is not that I have no past. " * 60


@pytest.fixture
def tiny_data(tmp_path: Path) -> Path:
    """A directory with a few examples of everything that is read from files."""
    labels = np.arange(10, dtype=np.uint8)
    for part, value in (("train", 255), ("t10k", 0)):
        images = np.full((10, 28, 28), value, dtype=np.uint8)
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, dtype=">u4").tobytes()
            (tmp_path / f"{part}-{name}-ubyte").write_bytes(header + values.tobytes())
    records = np.concatenate([labels[:, None], np.full((10, 3072), 255, dtype=np.uint8)], axis=1)
    for name in ("data_batch_1.bin", "test_batch.bin"):
        (tmp_path / name).write_bytes(records.tobytes())
    (tmp_path / "input.txt").write_text(TEXT)
    return tmp_path


def tensors(dataset: object) -> tuple[Tensor, Tensor]:
    assert isinstance(dataset, TensorDataset)
    inputs, targets = dataset.tensors
    return inputs, targets


def evaluate(problem: Problem, model: nn.Module) -> float:
    inputs, targets = tensors(problem.test)
    with torch.no_grad():
        return problem.metric.measure(model(inputs), targets).item()


def train_epoch(problem: Problem, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs, targets = tensors(problem.train)
    for batch in torch.split(torch.randperm(len(inputs)), problem.recipe.batch_size):
        optimizer.zero_grad()
        torch.autograd.backward(problem.loss(model(inputs[batch]), targets[batch]))
        optimizer.step()


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_every_problem_holds_together(name: str, tiny_data: Path) -> None:
    problem = load_problem(name, ProblemOptions(data=tiny_data))
    assert problem.name == name
    model = problem.make_model()
    optimizer = make_optimizer(problem.recipe.optimizer, model.parameters())
    for dataset in (problem.train, problem.test):
        inputs, targets = tensors(dataset)
        loss = problem.loss(model(inputs[:3]), targets[:3])
        assert loss.shape == ()
        assert loss.isfinite()
        assert problem.metric.measure(model(inputs[:3]), targets[:3]).shape == ()
    torch.autograd.backward(loss)
    optimizer.step()


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_measures_are_means_over_examples(name: str, tiny_data: Path) -> None:
    """So the value of a whole set is the weighted mean of its batches' values."""
    problem = load_problem(name, ProblemOptions(data=tiny_data))
    model = problem.make_model().eval()
    inputs, targets = (tensor[:5] for tensor in tensors(problem.train))
    with torch.no_grad():
        for measure in (problem.loss, problem.metric.measure):
            parts = 2 * measure(model(inputs[:2]), targets[:2]) + 3 * measure(model(inputs[2:]), targets[2:])
            assert parts / 5 == pytest.approx(measure(model(inputs), targets).item(), rel=1e-4)


@pytest.mark.parametrize("name", SHIPPED)
def test_recipe_reaches_the_target(name: str) -> None:
    problem = load_problem(name)
    assert problem.target is not None
    model = problem.make_model()
    optimizer = make_optimizer(problem.recipe.optimizer, model.parameters())
    assert not problem.metric.reaches(evaluate(problem, model), problem.target)
    values = []
    for _ in range(problem.recipe.epochs):
        train_epoch(problem, model, optimizer)
        values.append(evaluate(problem, model))
        if problem.metric.reaches(values[-1], problem.target):
            return
    pytest.fail(f"{problem.metric.name} never reached {problem.target}: {values}")


def test_metric_knows_which_way_is_better() -> None:
    assert Metric(name="accuracy", measure=accuracy, higher_is_better=True).reaches(0.9, 0.8)
    assert not Metric(name="loss", measure=accuracy, higher_is_better=False).reaches(0.9, 0.8)


def test_accuracy_counts_the_right_ones() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [3.0, 2.0], [0.0, 5.0]])
    assert accuracy(logits, torch.tensor([0, 1, 1, 1])).item() == 0.75
    outputs = torch.tensor([[2.0], [-1.0], [0.5], [-3.0]])
    assert sign_accuracy(outputs, torch.tensor([[1.0], [0.0], [0.0], [0.0]])).item() == 0.75


# --- digits, mnist, cifar10


def test_digits_are_split_into_disjoint_parts_that_cover_all() -> None:
    problem = load_problem("digits")
    (train, train_labels), (test, test_labels) = tensors(problem.train), tensors(problem.test)
    assert train.shape == (1437, 1, 8, 8)
    assert test.shape == (360, 1, 8, 8)
    assert (train.min().item(), train.max().item()) == (0, 1)
    # No two images of this set are equal, so rows that are all distinct and of the right number are a partition.
    assert len(set(map(tuple, torch.cat([train, test]).flatten(1).tolist()))) == 1797
    counts = torch.cat([train_labels, test_labels]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert test_labels.bincount(minlength=10).min() >= 20


def test_digits_split_does_not_depend_on_any_seed() -> None:
    first = load_problem("digits", ProblemOptions(seed=1))
    torch.manual_seed(99)
    second = load_problem("digits", ProblemOptions(seed=2))
    assert torch.equal(tensors(first.test)[0], tensors(second.test)[0])


@pytest.mark.parametrize(("name", "mean", "std"), [("mnist", 0.1307, 0.3081), ("cifar10", 0.4914, 0.2470)])
def test_images_are_normalised(name: str, mean: float, std: float, tiny_data: Path) -> None:
    inputs, targets = tensors(load_problem(name, ProblemOptions(data=tiny_data)).train)
    assert inputs.dtype == torch.float32
    assert targets.dtype == torch.int64
    assert targets.tolist() == list(range(10))
    assert torch.allclose(inputs[:, 0], torch.tensor((1 - mean) / std))  # every pixel of this data is white


@pytest.mark.data
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_real_images_have_mean_zero_and_deviation_one(name: str, data_dir: Path) -> None:
    inputs, _ = tensors(load_problem(name, ProblemOptions(data=data_dir)).train)
    assert inputs.mean(dim=(0, 2, 3)).abs().max() < 0.02
    assert inputs.std(dim=(0, 2, 3)).sub(1).abs().max() < 0.02


@pytest.mark.parametrize("name", ["mnist", "cifar10", "charlm"])
def test_problems_on_files_say_that_they_need_them(name: str) -> None:
    with pytest.raises(UsageError, match="--data"):
        load_problem(name)


# --- charlm


@given(st.text(st.characters(codec="utf-8")))
def test_tokens_spell_the_text(text: str) -> None:
    tokens, alphabet = encode(text)
    assert "".join(alphabet[token] for token in tokens.tolist()) == text
    assert sorted(set(text)) == list(alphabet)


@given(num_tokens=st.integers(1, 60), length=st.integers(1, 10))
def test_windows_read_each_token_once_and_predict_the_next(num_tokens: int, length: int) -> None:
    tokens = torch.arange(num_tokens)
    inputs, targets = tensors(windows(tokens, length))
    assert inputs.shape == targets.shape
    assert inputs.shape[1:] == (length,)
    assert inputs.flatten().tolist() == list(range(inputs.numel()))
    assert torch.equal(targets, inputs + 1)
    assert num_tokens - 1 - inputs.numel() in range(length)  # what is left over fills no window


@pytest.mark.parametrize("data", ["input.txt", "", "folder"])
def test_charlm_finds_its_text(data: str, tiny_data: Path) -> None:
    (tiny_data / "folder" / "tinyshakespeare").mkdir(parents=True)
    (tiny_data / "folder" / "tinyshakespeare" / "input.txt").write_text(TEXT)
    problem = load_problem("charlm", ProblemOptions(data=tiny_data / data))
    boundary = len(TEXT) * 9 // 10
    tokens, alphabet = encode(TEXT)
    assert tensors(problem.train)[0][0].tolist() == tokens[:CONTEXT].tolist()
    assert tensors(problem.test)[0][0].tolist() == tokens[boundary : boundary + CONTEXT].tolist()
    assert problem.make_model()(tensors(problem.test)[0]).shape[1:] == (CONTEXT, len(alphabet))


def test_charlm_loss_is_the_mean_over_characters() -> None:
    logits = torch.randn(3, 5, 7)
    targets = torch.randint(7, (3, 5))
    chosen = logits.log_softmax(dim=2).gather(2, targets.unsqueeze(2))
    assert loss_per_character(logits, targets).item() == pytest.approx(-chosen.mean().item(), rel=1e-5)


def test_charlm_refuses_a_text_without_a_window_to_test_on(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a" * 1290)
    problem = load_problem("charlm", ProblemOptions(data=path))
    assert len(tensors(problem.test)[0]) == 1
    path.write_text("a" * 1289)
    with pytest.raises(UsageError, match=r"short\.txt: wanted at least 1290 characters, found 1289"):
        load_problem("charlm", ProblemOptions(data=path))


@pytest.mark.data
def test_charlm_on_shakespeare(data_dir: Path) -> None:
    problem = load_problem("charlm", ProblemOptions(data=data_dir))
    assert tensors(problem.train)[0].shape == (1003854 // CONTEXT, CONTEXT)
    assert tensors(problem.test)[0].shape == (111540 // CONTEXT, CONTEXT)


# --- quadratic, logistic


@pytest.mark.parametrize("name", ["quadratic", "logistic"])
def test_a_seed_makes_the_same_data_and_another_one_makes_other_data(name: str) -> None:
    def data(seed: int) -> list[Tensor]:
        torch.manual_seed(torch.seed() % 2**32)  # the global stream has no say
        problem = load_problem(name, ProblemOptions(seed=seed))
        return [*tensors(problem.train), *tensors(problem.test)]

    first, again, other = data(3), data(3), data(4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def curvatures(problem: Problem, dim: int) -> Tensor:
    """The diagonal of the Hessian, read off the loss: 2 F(e_j) - 2 F(0) with the centre at 0."""
    return torch.stack([2 * problem.loss(row, torch.zeros(1, dim)) for row in torch.eye(dim)[:, None]])


def test_quadratic_curvatures_are_log_spaced_over_the_condition_number() -> None:
    curvature = curvatures(make_quadratic(dim=5, condition=81.0, num_examples=2), 5)
    assert torch.allclose(curvature, torch.tensor([1, 1 / 3, 1 / 9, 1 / 27, 1 / 81]))


@given(seed=st.integers(0, 1000))
def test_quadratic_test_loss_is_the_excess(seed: int) -> None:
    problem = make_quadratic(dim=6, num_examples=50, seed=seed)
    centres, optimum = tensors(problem.train)[0].double(), tensors(problem.test)[0].double()
    curvature = curvatures(problem, 6).double()
    w = torch.randn(1, 6, generator=torch.Generator().manual_seed(seed)).double()

    def full_loss(point: Tensor) -> Tensor:
        return (0.5 * curvature * (point - centres) ** 2).sum(dim=1).mean()

    model = problem.make_model()
    with torch.no_grad():
        next(model.parameters()).copy_(w[0])
    excess = evaluate(problem, model)
    assert excess == pytest.approx(float(full_loss(w) - full_loss(optimum)), rel=1e-4, abs=1e-6)
    assert excess == pytest.approx(float(0.5 * curvature @ (w - optimum)[0] ** 2), rel=1e-4)


def test_full_gradients_reach_the_minimum_of_the_quadratic_and_mini_batches_its_floor() -> None:
    problem = load_problem("quadratic")
    inputs, targets = tensors(problem.train)
    model = problem.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(200):
        optimizer.zero_grad()
        torch.autograd.backward(problem.loss(model(inputs), targets))
        optimizer.step()
    assert evaluate(problem, model) < 1e-9

    rate, batch, floor = 0.1, 8, []
    expected = rate / batch / 4 * curvatures(problem, 32).square().sum().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(1500):
        chosen = torch.randint(len(inputs), (batch,))
        optimizer.zero_grad()
        torch.autograd.backward(problem.loss(model(inputs[chosen]), targets[chosen]))
        optimizer.step()
        floor.append(evaluate(problem, model))
    assert np.mean(floor[500:]) == pytest.approx(expected, rel=0.3)


def test_logistic_has_a_plane_that_only_the_flipped_labels_escape() -> None:
    problem = load_problem("logistic", ProblemOptions(seed=5))
    inputs, targets = tensors(problem.train)
    normal = torch.linalg.lstsq(inputs, targets * 2 - 1).solution
    assert 0.92 < sign_accuracy(inputs @ normal, targets) < 0.97
    assert 0.4 < targets.mean() < 0.6


# --- choosing


@pytest.mark.parametrize("name", ["net1", "net2", "net3", "mlp", "cnn", "lenet", "resnet20"])
def test_a_model_can_be_chosen(name: str) -> None:
    problem = load_problem("digits", ProblemOptions(model=name))
    chosen, expected = problem.make_model(), MODELS[name]((1, 8, 8), 10)
    assert [p.shape for p in chosen.parameters()] == [p.shape for p in expected.parameters()]


@pytest.mark.parametrize(
    ("problem", "model", "reason"),
    [
        ("digits", "gpt", "'gpt' does not fit the problem 'digits'; choose from net1, .*resnet20"),
        ("mnist", "gpt", "'gpt' does not fit the problem 'mnist'"),
        ("charlm", "cnn", "'cnn' does not fit the problem 'charlm'; choose from gpt"),
        ("logistic", "cnn", "'cnn' does not fit the problem 'logistic'"),
        ("digits", "net4", "no model called 'net4'. Did you mean 'net3'"),
        ("quadratic", "net1", "'quadratic' has its own model; leave out --model net1"),
    ],
)
def test_a_model_that_cannot_be(problem: str, model: str, reason: str, tiny_data: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        load_problem(problem, ProblemOptions(model=model, data=tiny_data))


def test_an_unknown_problem_gets_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"no problem called 'cifar'\. Did you mean 'cifar10'\?"):
        load_problem("cifar")


# --- a user's file

USER_FILE = """
from __future__ import annotations
from dataclasses import dataclass
from paceline.problems import Problem
from paceline.problems.synthetic import make_quadratic

@dataclass
class Settings:
    dim: int = 3

def problem() -> Problem:
    return make_quadratic(dim=Settings().dim)

def wider() -> Problem:
    return make_quadratic(dim=7)

def nothing() -> None:
    pass

DATA = {"dim": 3}
"""


@pytest.fixture
def user_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    return path


@pytest.mark.parametrize(("suffix", "dim"), [("", 3), (":problem", 3), (":wider", 7)])
def test_a_problem_in_a_file(user_file: Path, suffix: str, dim: int) -> None:
    problem = load_problem(f"{user_file}{suffix}", ProblemOptions(data=Path("ignored")))
    assert tensors(problem.test)[0].shape == (1, dim)


def test_a_file_may_be_given_relative_to_where_we_are(user_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user_file.parent)
    assert load_problem("mine.py").name == "quadratic"


def test_a_file_may_import_the_file_beside_it(user_file: Path) -> None:
    (user_file.parent / "beside_mine.py").write_text("DIM = 9\n")
    user_file.write_text(
        USER_FILE.replace("make_quadratic(dim=7)", "make_quadratic(dim=__import__('beside_mine').DIM)")
    )
    assert tensors(load_problem(f"{user_file}:wider").test)[0].shape == (1, 9)


@pytest.mark.parametrize(
    ("suffix", "reason"),
    [
        (":narrower", r"mine\.py has no function narrower\(\).*Found: .*problem, wider, nothing"),
        (":DATA", r"mine\.py has no function DATA\(\)"),
        (":", r"mine\.py has no function \(\)"),
        (":nothing", r"nothing\(\) in .*mine\.py must return a paceline\.problems\.Problem, .* NoneType"),
    ],
)
def test_a_file_without_the_problem(user_file: Path, suffix: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load_problem(f"{user_file}{suffix}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"looked for {tmp_path}/nowhere.py"):
        load_problem(f"{tmp_path}/nowhere.py:problem")


def test_a_users_problem_takes_no_model(user_file: Path) -> None:
    with pytest.raises(UsageError, match=r"mine\.py' has its own model; leave out --model cnn"):
        load_problem(str(user_file), ProblemOptions(model="cnn"))


@pytest.mark.parametrize(
    ("content", "error"),
    [("def problem(:", SyntaxError), ("1 / 0", ZeroDivisionError), ("def problem(): raise KeyError", KeyError)],
)
def test_what_a_users_file_raises_passes_unchanged(user_file: Path, content: str, error: type[Exception]) -> None:
    user_file.write_text(content)
    with pytest.raises(error) as caught:
        load_problem(str(user_file))
    assert caught.value.__cause__ is None


# Options ----------------------------------------------------------------------------------------------------


def test_normalised_images_have_mean_0_and_deviation_1_on_the_training_data(tiny_data: Path) -> None:
    plain, normal = (load_problem("digits", ProblemOptions(normalise=on)) for on in (False, True))
    inputs, targets = tensors(normal.train)
    assert inputs.double().mean() == pytest.approx(0, abs=1e-6)
    assert inputs.double().std(correction=0) == pytest.approx(1, abs=1e-6)
    before, labels = tensors(plain.train)
    assert torch.equal(targets, labels)
    mean, deviation = before.double().mean(), before.double().std(correction=0)
    for part in (normal.train, normal.test):
        wanted = (tensors(getattr(plain, "train" if part is normal.train else "test"))[0].double() - mean) / deviation
        torch.testing.assert_close(tensors(part)[0].double(), wanted, rtol=0, atol=1e-5)
    for name in ("mnist", "cifar10"):  # all pixels are the same: there is no deviation to divide by
        options = ProblemOptions(data=tiny_data, normalise=True)
        assert not tensors(load_problem(name, options).train)[0].any()


@pytest.mark.data
def test_normalised_mnist(data_dir: Path) -> None:
    plain, normal = (
        tensors(load_problem("mnist", ProblemOptions(data=data_dir, normalise=on)).train)[0] for on in (False, True)
    )
    assert normal.double().mean() == pytest.approx(0, abs=1e-6)
    assert normal.double().std(correction=0) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(plain, normal, rtol=0, atol=1e-3)  # the published statistics have four digits


@pytest.mark.parametrize("model", ["net3", "cnn", "resnet20"])
def test_weights_are_filled_by_xaviers_rule(model: str) -> None:
    made = load_problem("digits", ProblemOptions(model=model, xavier=True)).make_model()
    filled = [module for module in made.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert filled
    for module in filled:
        assert module.bias is None or not module.bias.any()
        fan_in, fan_out = module.weight[0].numel(), module.weight[:, 0].numel()
        bound = (6 / (fan_in + fan_out)) ** 0.5
        assert 0.5 * bound < module.weight.abs().max() <= bound


def test_the_same_seed_fills_the_same_weights() -> None:
    problem = load_problem("digits", ProblemOptions(xavier=True))
    torch.manual_seed(1)
    first = problem.make_model().state_dict()
    torch.manual_seed(1)
    again = problem.make_model().state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize("name", ["charlm", "logistic", "quadratic", "own.py"])
def test_only_images_are_normalised(name: str, tiny_data: Path) -> None:
    with pytest.raises(UsageError, match="has no images to normalise; leave out --normalise"):
        load_problem(name, ProblemOptions(data=tiny_data, normalise=True))


def test_a_model_that_cannot_be_chosen_is_not_filled() -> None:
    with pytest.raises(UsageError, match="'quadratic' has its own model; leave out --xavier"):
        load_problem("quadratic", ProblemOptions(xavier=True))
