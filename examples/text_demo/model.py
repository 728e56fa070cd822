"""A small GPT on bytes, in plain torch: nothing in it knows of sharding or of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from text_demo.text import VOCABULARY_SIZE


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model; the defaults give 0.7 M parameters, which 2 CPU cores train in half a minute."""

    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    hidden: int = 384  # inner width of the feed-forward part
    context: int = 128


class Attention(nn.Module):
    """Causal self-attention with rotary positions; queries, keys and values are matrices of their own."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        half = shape.width // shape.num_heads // 2
        frequency = 1000.0 ** (-torch.arange(half) / half)
        angle = torch.arange(shape.context)[:, None] * frequency
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Turns pairs of channels by an angle that grows with position; x: (batch, heads, length, channels)."""
        length = x.shape[-2]
        cosine, sine = self.cosine[:length], self.sine[:length]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, length, width)."""
        query, key, value = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(self.rotate(query), self.rotate(key), value, is_causal=True)
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(-2))
        return mixed


class Block(nn.Module):
    """Attention and a feed-forward part, each added to what came in."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x))
        inner = functional.gelu(self.up(self.feed_forward_norm(x)))
        added: Tensor = x + self.down(inner)
        return added


class ByteGPT(nn.Module):
    """Predicts every byte of a sequence from the bytes before it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY_SIZE, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.final_norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY_SIZE, bias=False)
        nn.init.zeros_(self.head.weight)  # the first loss is then exactly log(256): 8 bits per byte

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, length) int64 bytes to (batch, length, 256) logits."""
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


@dataclass(frozen=True)
class ParameterSplit:
    """Every trainable parameter of a model, once: hidden matrices here, all else there."""

    matrices: list[nn.Parameter]
    others: list[nn.Parameter]


def split_parameters(model: ByteGPT) -> ParameterSplit:
    """Sorts the weights of linear layers inside the blocks from the embedding, the head and the norms.

    Orthogonalized updates are meant for matrices between hidden layers. An embedding is a table of rows that
    are rarely used together, the head is its counterpart, and a norm has no rows at all.
    """
    matrices = [parameter for parameter in model.blocks.parameters() if parameter.ndim == 2]
    chosen = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return ParameterSplit(matrices, others)
