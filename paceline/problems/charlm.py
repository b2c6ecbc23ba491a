"""The problem ``charlm``: predict the next character of a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.errors import UsageError
from paceline.problems.models import TEXT_MODELS
from paceline.problems.options import ProblemOptions, choose_model, refuse_normalise
from paceline.problems.problem import Metric, Problem, Recipe
from paceline.problems.readers import find_file, read_text

CONTEXT = 128
_MIN_CHARACTERS = 10 * (CONTEXT + 1)  # the held-out tenth must fill one window


def charlm(options: ProblemOptions) -> Problem:
    """Train a language model on a text: ``options.data`` is the file, or a directory with an ``input.txt``.

    The first nine tenths are training data, the rest is the test. An epoch reads each character once.
    """
    refuse_normalise("charlm", options)
    path = _text_path(options.data)
    tokens, alphabet = encode(read_text(path))
    if len(tokens) < _MIN_CHARACTERS:
        raise UsageError(f"{path}: wanted at least {_MIN_CHARACTERS} characters, found {len(tokens)}")
    boundary = len(tokens) * 9 // 10
    return Problem(
        name="charlm",
        make_model=choose_model(
            "charlm",
            options,
            default="gpt",
            fitting=TEXT_MODELS,
            input_shape=(CONTEXT,),
            num_classes=len(alphabet),
        ),
        train=windows(tokens[:boundary], CONTEXT),
        test=windows(tokens[boundary:], CONTEXT),
        loss=loss_per_character,
        metric=Metric(name="loss", measure=loss_per_character, higher_is_better=False),
        recipe=Recipe(batch_size=32, epochs=5, optimizer="adamw(lr=0.001)"),
    )


def loss_per_character(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, in nats, of logits (batch, time, vocab) for ids (batch, time)."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def encode(text: str) -> tuple[Tensor, str]:
    """Number a text's characters; ``alphabet[tokens[i]]`` is its i-th character."""
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    distinct, tokens = np.unique(code_points, return_inverse=True)
    return torch.from_numpy(tokens.astype(np.int64)), "".join(map(chr, distinct))


def windows(tokens: Tensor, length: int) -> TensorDataset:
    """Cut a text into windows without overlap, each paired with itself one character later.

    A remainder shorter than a window is not used.
    """
    count = (len(tokens) - 1) // length
    inputs = tokens[: count * length].view(count, length)
    targets = tokens[1 : count * length + 1].view(count, length)
    return TensorDataset(inputs, targets)


def _text_path(data: Path | None) -> Path:
    if data is None:
        raise UsageError("charlm trains on a text of yours; name the file with --data FILE or PACELINE_DATA")
    if data.is_file():
        return data
    return find_file(data, "tinyshakespeare", "input.txt")
