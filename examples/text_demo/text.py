"""The text as bytes: where it comes from, how it is split, how it is cut into sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY_SIZE = 256
IGNORED_TARGET = -100  # what torch's cross_entropy leaves out by default
VALIDATION_SHARE = 0.1


def load_text(path: Path | None = None) -> bytes:
    """The bytes of a file, or by default the documentation text that comes with every Python (half a MB)."""
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics  # here, because `--text` does not need it

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def unigram_entropy(text: Tensor) -> float:
    """Bits per byte of the best model that knows only how often each byte occurs in `text` (uint8)."""
    frequency = torch.bincount(text.long(), minlength=VOCABULARY_SIZE).double() / len(text)
    frequency = frequency[frequency > 0]
    return float(-(frequency * frequency.log2()).sum())


@dataclass(frozen=True)
class Corpus:
    """A text split in two: `training` is its beginning, `validation` its last tenth (uint8 tensors)."""

    training: Tensor
    validation: Tensor
    context: int  # bytes a sequence holds

    @classmethod
    def from_bytes(cls, text: bytes, context: int) -> Corpus:
        """Splits a text.

        Raises:
            ValueError: If one of the two parts would be shorter than a sequence and the byte after it.
        """
        num_validation = int(len(text) * VALIDATION_SHARE)
        if num_validation < context + 1:
            needed = int((context + 1) / VALIDATION_SHARE)
            raise ValueError(f"the text has {len(text)} bytes, but at least {needed} are needed")
        values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return cls(values[:-num_validation], values[-num_validation:], context)

    @property
    def num_validation_targets(self) -> int:
        """How many bytes `validation_batches` predicts: every one but the first, which nothing precedes."""
        return len(self.validation) - 1

    def training_batches(
        self, batch_size: int, *, rank: int, world_size: int, seed: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless (inputs, targets), each (batch_size / world_size, context) int64: a rank's part of a batch.

        Every rank draws the same positions and takes its own slice of them, so that the batches that all
        ranks together see depend on the seed only, neither on the number of ranks nor on the optimizer.
        """
        generator = torch.Generator().manual_seed(seed)
        num_starts = len(self.training) - self.context
        within = torch.arange(self.context + 1)
        while True:
            starts = torch.randint(num_starts, (batch_size,), generator=generator)
            mine = starts.tensor_split(world_size)[rank]
            sequences = self.training[mine[:, None] + within].long()
            yield sequences[:, :-1], sequences[:, 1:]

    def validation_batches(self, batch_size: int, *, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(inputs, targets) that together predict every validation byte but the first exactly once.

        All ranks get equally many batches of (batch_size / world_size, context), because a forward pass of a
        sharded model is a collective. What is missing to full batches is filled up with `IGNORED_TARGET`.
        """
        chunk = batch_size * self.context
        num_padding = -self.num_validation_targets % chunk
        inputs = torch.nn.functional.pad(self.validation[:-1].long(), (0, num_padding))
        targets = torch.nn.functional.pad(self.validation[1:].long(), (0, num_padding), value=IGNORED_TARGET)
        for first in range(0, self.num_validation_targets, chunk):
            part = slice(first, first + chunk)
            yield (
                inputs[part].view(batch_size, self.context).tensor_split(world_size)[rank],
                targets[part].view(batch_size, self.context).tensor_split(world_size)[rank],
            )
