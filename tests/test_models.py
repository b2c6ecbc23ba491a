"""The built-in networks: shapes, sizes, and what each promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.problems.models import IMAGE_MODELS, MODELS, TEXT_MODELS, VECTOR_MODELS
from paceline.problems.models.gpt import GPT

IMAGE_SHAPES: list[tuple[int, ...]] = [(1, 8, 8), (1, 28, 28), (3, 32, 32)]
CASES = [(name, shape) for name in IMAGE_MODELS for shape in IMAGE_SHAPES]
CASES += [(name, (32,)) for name in VECTOR_MODELS]
CASES += [(name, (16,)) for name in TEXT_MODELS]


def inputs_for(name: str, shape: tuple[int, ...], batch: int, num_classes: int) -> Tensor:
    if name in TEXT_MODELS:
        return torch.randint(num_classes, (batch, *shape))
    return torch.randn(batch, *shape)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_example_gets_its_logits(name: str, shape: tuple[int, ...], batch: int) -> None:
    model = MODELS[name](shape, 7)
    outputs = model(inputs_for(name, shape, batch, 7))
    assert outputs.shape == ((batch, *shape, 7) if name in TEXT_MODELS else (batch, 7))


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_gradient_reaches_every_parameter(name: str, shape: tuple[int, ...]) -> None:
    model = MODELS[name](shape, 7)
    outputs = model(inputs_for(name, shape, 5, 7)).flatten(0, -2)
    torch.autograd.backward(nn.functional.cross_entropy(outputs, torch.randint(7, (len(outputs),))))
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.any(), key


@pytest.mark.parametrize("name", sorted(MODELS))
def test_global_seed_decides_the_initial_parameters(name: str) -> None:
    shape = (16,) if name in TEXT_MODELS else (1, 8, 8)

    def fresh(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return nn.utils.parameters_to_vector(MODELS[name](shape, 5).parameters())

    assert torch.equal(fresh(1), fresh(1))
    assert not torch.equal(fresh(1), fresh(2))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("net1", ["784-10"]),
        ("net2", ["784-100", "Sigmoid", "100-10"]),
        ("net3", ["784-300", "Sigmoid", "300-100", "ReLU", "100-50", "Sigmoid", "50-10"]),
        ("mlp", ["784-2048", "ReLU", "2048-2048", "ReLU", "2048-10"]),
    ],
)
def test_layers_of_the_dense_networks(name: str, layers: list[str]) -> None:
    def describe(layer: nn.Module) -> str:
        if isinstance(layer, nn.Linear):
            assert layer.bias is not None
            return f"{layer.in_features}-{layer.out_features}"
        return type(layer).__name__

    assert [describe(layer) for layer in MODELS[name]((1, 28, 28), 10).children()] == ["Flatten", *layers]


@pytest.mark.parametrize(
    ("name", "shape", "num_classes", "count"),
    [
        ("net1", (1, 28, 28), 10, 7_850),
        ("mlp", (1, 28, 28), 10, 5_824_522),
        ("cnn", (1, 28, 28), 10, 1_630_090),
        ("cnn", (3, 32, 32), 10, 2_122_186),
        ("lenet", (1, 28, 28), 10, 61_706),  # as usually counted; LeCun et al. connect the second layer sparsely
        ("resnet20", (3, 32, 32), 10, 269_722),  # He et al., table 6: 0.27M; option A has no shortcut parameters
        ("gpt", (128,), 65, 3_208_960),
        ("tiny-gpt", (128,), 65, 112_448),
    ],
)
def test_number_of_parameters(name: str, shape: tuple[int, ...], num_classes: int, count: int) -> None:
    assert num_parameters(MODELS[name](shape, num_classes)) == count


def test_only_the_resnet_mixes_examples() -> None:
    """All others give an example the same logits in any batch, which exact averaging relies on."""
    for name, shape in CASES:
        model = MODELS[name](shape, 7)
        inputs = inputs_for(name, shape, 4, 7)
        alone, together = model(inputs[:1]), model(inputs)[:1]
        assert torch.allclose(alone, together, atol=1e-4) == (name != "resnet20"), (name, shape)


def test_resnet_has_twenty_weighted_layers() -> None:
    model = MODELS["resnet20"]((3, 32, 32), 10)
    assert sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules()) == 20


def test_resnet_ends_with_64_maps_of_a_quarter_of_the_size() -> None:
    shapes = []
    model = MODELS["resnet20"]((3, 32, 32), 10)
    for module in model.children():
        if isinstance(module, nn.AdaptiveAvgPool2d):
            module.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    model(torch.randn(2, 3, 32, 32))
    assert shapes == [(2, 64, 8, 8)]


@pytest.mark.parametrize("changed", [1, 7, 15])
def test_gpt_never_looks_ahead(changed: int) -> None:
    model = MODELS["gpt"]((16,), 11)
    tokens = torch.randint(11, (2, 16))
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % 11
    before, after = model(tokens), model(other)
    assert torch.allclose(before[:, :changed], after[:, :changed], atol=1e-6)
    assert not torch.allclose(before[:, changed:], after[:, changed:], atol=1e-3)


def test_gpt_uses_the_order_of_its_tokens() -> None:
    model = GPT(vocab=11, context=16, num_layers=2)
    tokens = torch.arange(11).unsqueeze(0)
    swapped = tokens[:, [1, 0, *range(2, 11)]]
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_gpt_starts_nearly_uniform() -> None:
    logits = GPT(vocab=65, context=32)(torch.randint(65, (4, 32)))
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(65, (128,)))
    assert loss.item() == pytest.approx(math.log(65), rel=0.1)


def test_gpt_ties_the_embedding_to_the_head() -> None:
    model = GPT(vocab=11, context=8)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert shapes.count((11, 256)) == 1
    loss = model(torch.zeros(1, 8, dtype=torch.long)).square().sum()
    loss.backward()
    # Token 5 was never read, so its row's gradient comes from the head alone.
    assert model.tokens.weight.grad is not None
    assert model.tokens.weight.grad[5].any()


def test_gpt_reads_fewer_tokens_than_its_context_but_not_more() -> None:
    model = GPT(vocab=11, context=8)
    assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 11)
    with pytest.raises(UsageError, match=r"9 tokens.*context is 8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_gpt_dropout_acts_in_training_only() -> None:
    model = GPT(vocab=11, context=8, dropout=0.5)
    tokens = torch.randint(11, (1, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize(("name", "shape"), [("cnn", (32,)), ("resnet20", (1, 3, 3)), ("gpt", (1, 28, 28))])
def test_a_shape_that_does_not_fit_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=name):
        MODELS[name](shape, 10)


def test_gpt_width_must_split_into_heads() -> None:
    with pytest.raises(UsageError, match="multiple of num_heads"):
        GPT(vocab=11, context=8, num_heads=3)
