"""What the program is asked to do: its command line, and the list of runs that follows from it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dion_core import available_transports
from dion_core.transport import Transport
from text_demo.model import ModelShape
from text_demo.rank import default_world_size
from text_demo.text import Corpus, load_text


@dataclass(frozen=True)
class Run:
    """One training from the common start."""

    name: str
    transport: str | Transport | None  # a name, an instance with options, or None: torch's AdamW, the yardstick
    exact: bool  # rows are chosen over the whole matrix, so that every such run should take the same steps


@dataclass(frozen=True)
class Settings:
    """Everything a rank needs to know; the same for all runs."""

    text: Path | None = None  # None: the documentation text of Python itself
    steps: int = 100
    world_size: int = 4
    transports: tuple[str, ...] = ()
    fraction: float = 0.25
    lr: float = 0.05
    seed: int = 1
    out: Path = Path("demo")
    min_batch_size: int = 16
    num_evaluations: int = 4
    shape: ModelShape = field(default_factory=ModelShape)

    @property
    def batch_size(self) -> int:
        """Sequences a step, of all ranks together: equally many on each, as a mean over ranks presumes."""
        return math.ceil(self.min_batch_size / self.world_size) * self.world_size

    @property
    def evaluation_batch_size(self) -> int:
        """Sequences a forward pass without gradients, which needs less memory, takes at once."""
        return 4 * self.batch_size

    @property
    def text_name(self) -> str:
        """What to call the text where results are shown."""
        return self.text.name if self.text else "pydoc_data.topics"

    def corpus(self) -> Corpus:
        """Loads and splits the text.

        Raises:
            OSError: If the file cannot be read.
            ValueError: If it is too short.
        """
        return Corpus.from_bytes(load_text(self.text), self.shape.context)

    def runs(self) -> tuple[Run, ...]:
        """One run a transport, and AdamW at the end."""
        installed = available_transports()
        of_transports = [Run(name, name, "global" in installed[name].scopes) for name in self.transports]
        return (*of_transports, Run("AdamW", None, exact=False))

    def evaluates_after(self, step: int) -> bool:
        """Whether the validation text is read after `step` steps; always after the last."""
        num_evaluations = min(self.num_evaluations, self.steps)
        return step * num_evaluations // self.steps > (step - 1) * num_evaluations // self.steps


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Reads the command line; ends the program with a usage message where it makes no sense."""
    installed = tuple(available_transports())
    default = Settings()
    parser = argparse.ArgumentParser(
        description="Trains a small GPT on bytes of text, once per installed transport and once with AdamW."
    )
    parser.add_argument("--text", type=Path, help="a file to learn from (default: Python's documentation)")
    parser.add_argument("--steps", type=int, default=default.steps, help="steps a run (%(default)s)")
    parser.add_argument(
        "--world-size", type=int, default=default_world_size(), help="number of ranks (default: GPUs, or 4)"
    )
    parser.add_argument(
        "--transports", default=",".join(installed), help="names with commas between (default: %(default)s)"
    )
    parser.add_argument(
        "--fraction",
        type=float,
        default=default.fraction,
        help="of the rows to apply in a step (%(default)s)",
    )
    parser.add_argument("--lr", type=float, default=default.lr, help="of the hidden matrices (%(default)s)")
    parser.add_argument("--seed", type=int, default=default.seed, help="of weights and batches (%(default)s)")
    parser.add_argument("--out", type=Path, default=default.out, help="folder for the report (%(default)s)")
    given = vars(parser.parse_args(arguments))
    given["transports"] = tuple(name for name in given["transports"].split(",") if name)
    unknown = sorted(set(given["transports"]) - set(installed))
    if unknown:
        parser.error(f"--transports: not installed: {', '.join(unknown)}; installed: {', '.join(installed)}")
    settings = Settings(**given)
    if settings.steps < 1 or settings.world_size < 1:
        parser.error("--steps and --world-size must be at least 1")
    num_gpus = torch.cuda.device_count()
    if num_gpus and settings.world_size > num_gpus:
        parser.error(f"--world-size {settings.world_size}: every rank needs a GPU of its own, and there are {num_gpus}")
    try:
        settings.corpus()
    except (OSError, ValueError) as error:
        parser.error(f"--text: {error}")
    return settings
