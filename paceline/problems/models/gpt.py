"""A small decoder-only transformer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError


def gpt(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A GPT of 3.2 million parameters (13 MB): the shape is (context,), the classes are the vocabulary."""
    if len(input_shape) != 1:
        raise UsageError(f"gpt reads sequences of tokens, and the inputs here have the shape {input_shape}")
    return GPT(vocab=num_classes, context=input_shape[0])


def tiny_gpt(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A GPT of two layers, 64 wide: 450 kB for 65 characters, quick enough to train many replicas of it."""
    if len(input_shape) != 1:
        raise UsageError(f"tiny-gpt reads sequences of tokens, and the inputs here have the shape {input_shape}")
    return GPT(vocab=num_classes, context=input_shape[0], num_layers=2, num_heads=2, width=64)


class GPT(nn.Module):
    """Token ids of shape (batch, time) -> logits of the next token, of shape (batch, time, vocab).

    The form of GPT-2 (Radford et al., 2019): normalisation before each sublayer, learned positions, and one
    matrix that both embeds the tokens and scores them.
    """

    def __init__(
        self,
        *,
        vocab: int,
        context: int,
        num_layers: int = 4,
        num_heads: int = 4,
        width: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise UsageError(f"gpt: width must be a multiple of num_heads, got {width} and {num_heads}")
        self.context = context
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(_initialise)
        for block in self.blocks.children():
            # Each block adds two terms to the residual stream; this keeps its variance independent of depth.
            for name in ("attention.output.weight", "feed_forward.2.weight"):
                nn.init.normal_(block.get_parameter(name), std=0.02 / math.sqrt(2 * num_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > self.context:
            raise UsageError(f"gpt: got {time} tokens, but its context is {self.context}")
        x = self.tokens(tokens) + self.positions(torch.arange(time, device=tokens.device))
        x = self.norm(self.blocks(self.dropout(x)))
        return F.linear(x, self.tokens.weight)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to its input."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = CausalAttention(width, num_heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.feed_forward(self.norm2(x))
        return out


class CausalAttention(nn.Module):
    """Each token looks at itself and at the tokens before it."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.input = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.input(x).unflatten(2, (3, self.num_heads, -1))  # batch, time, 3, heads, width of a head
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.dropout(self.output(mixed.transpose(1, 2).flatten(2)))
        return out


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
