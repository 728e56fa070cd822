"""Stories: optimizers that live through steps, saves and loads, from one layout and number of ranks to another.

A `Story` says everything by numbers, so that it prints as what reproduces it. It is told three ways: by the package on
the ranks of each phase (`story_live`), by the float64 reference (`story_reference`), and by the package in one process
that is never interrupted.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.mesh_cases import Weight
from tests.story_places import Spot, first_copies, numbers_by_rank, of_rows, split_dim
from tests.training import ELEMENTWISE_LR, Problem, random_problem

MATRIX_LR = 0.02
ONE_A_ROW = ("second_moment", "waited")
"""State with one value a row of a matrix."""


@dataclass(frozen=True)
class Matrix:
    """A parameter of the matrix algorithm: one matrix, or several.

    Attributes:
        view: the group key that says which, with its value.
        turned: its columns lie in another order in storage, see `story_places.stored`.
    """

    shape: tuple[int, ...]
    view: tuple[str, Any] | None = None
    turned: bool = False

    @property
    def keys(self) -> dict[str, Any]:
        """Of its group."""
        return {} if self.view is None else dict([self.view])

    @property
    def weight(self) -> Weight:
        """It with the rows of its matrices, which knows how to divide tensors into them."""
        rows: tuple[int, ...] = ()
        if self.view is not None and self.view[0] == "split_sizes":
            rows = self.view[1]
        elif self.view is not None and self.view[0] == "num_heads":
            rows = (self.shape[0] // self.view[1],) * self.view[1]
        return Weight(self.shape, self.keys, rows)

    @property
    def kept(self) -> int:
        """How many of its dimensions number rows."""
        return 1 if self.keys.get("flatten") else len(self.shape) - 1


@dataclass(frozen=True)
class Phase:
    """Steps in one set of processes; a phase after the first begins with a load of what the one before left.

    Attributes:
        spots: where all parameters lie, or where each does, in the order of their names.
        sizes: of the axes of the mesh.
        ranks: of the mesh, flat; empty: ascending.
        reloads: after which of its steps (0 is the first) the optimizer is saved and loaded into a new one.
        state: "layerwise", the number of elements of its buckets, or None for state that lies as its parameters do.
        way: how the phase takes what the one before left: "parts" puts together what ranks held, "full_state_dict"
            takes what that gives, others are those of `checkpoint_cases`.
    """

    sizes: tuple[int, ...]
    num_steps: int
    transport: str
    spots: tuple[Spot, ...]
    ranks: tuple[int, ...] = ()
    reloads: tuple[int, ...] = ()
    state: str | int | None = None
    way: str = "parts"

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        rate: factor of all learning rates; given as a tensor where `as_tensor` says so.
        size: factor of all gradients.
        absent: by name the ranks without a gradient; ranks with copies of what a rank holds go with the first one.
        poisoned: by name the element that is infinite or NaN, counted on around the tensor.
    """

    rate: float = 1.0
    as_tensor: bool = False
    size: float = 1.0
    absent: tuple[tuple[str, tuple[int, ...]], ...] = ()
    poisoned: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True)
class Story:
    """An optimizer's life."""

    matrices: tuple[Matrix, ...]
    adamw: tuple[tuple[int, ...], ...]
    lion: tuple[tuple[int, ...], ...]
    seed: int
    dtype: torch.dtype
    optimizer: str
    options: tuple[tuple[str, Any], ...]
    phases: tuple[Phase, ...]
    steps: tuple[Step, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all parameters, by name."""
        kinds = {"matrix": [each.shape for each in self.matrices], "adamw": self.adamw, "lion": self.lion}
        return {f"{kind}{number}": shape for kind, shapes in kinds.items() for number, shape in enumerate(shapes)}

    @property
    def compared(self) -> bool:
        """Whether the reference computes in the same precision."""
        return self.dtype == torch.float64 and dict(self.options).get("wire_dtype") is None

    @property
    def num_exact(self) -> int:
        """How many phases from the first on are promised to leave the bits of one process."""
        if dict(self.options).get("scope") == "local":
            return 0
        split = (number for number in range(len(self.phases)) if self.splits_columns(number))
        return next(split, len(self.phases))

    def splits_columns(self, phase: int) -> bool:
        """Whether several ranks hold columns of one row there."""
        for name, matrix in self.named_matrices():
            for place, size in zip(self.spot(phase, name), self.phases[phase].sizes, strict=False):
                dim = split_dim(place)
                if dim is not None and dim >= matrix.kept and size > 1:
                    return True
        return False

    def named_matrices(self) -> Iterator[tuple[str, Matrix]]:
        return ((f"matrix{number}", matrix) for number, matrix in enumerate(self.matrices))

    def matrix(self, name: str) -> Matrix | None:
        """The matrix of that name; None for what is AdamW's or Lion's."""
        return dict(self.named_matrices()).get(name)

    def spot(self, phase: int, name: str) -> Spot:
        """Where a parameter lies."""
        spots = self.phases[phase].spots
        return spots[0] if len(spots) == 1 else spots[list(self.shapes).index(name)]

    def numbers(self, phase: int) -> range:
        """Of the steps of that phase."""
        first = sum(each.num_steps for each in self.phases[:phase])
        return range(first, first + self.phases[phase].num_steps)

    def shape_of(self, tensor: str) -> tuple[int, ...]:
        """The whole shape of a weight or a state tensor, such as "matrix0.momentum"."""
        name, key = tensor.split(".")
        matrix, shape = self.matrix(name), self.shapes[name]
        if key == "step":
            return ()
        return (*shape[: matrix.kept], 1) if matrix is not None and key in ONE_A_ROW else shape


@cache
def problem_of(story: Story) -> Problem:
    """Weights and gradients before anything is left out, in the story's dtype."""
    problem = random_problem(
        [each.shape for each in story.matrices],
        adamw=story.adamw,
        lion=story.lion,
        num_steps=len(story.steps),
        seed=story.seed,
    )
    for step, gradients in zip(story.steps, problem.gradients, strict=True):
        for gradient in gradients.values():
            assert gradient is not None
            gradient *= step.size
        for name, place, value in step.poisoned:
            flat = gradients[name].view(-1)  # type: ignore[union-attr]
            flat[place % len(flat)] = value
    return problem.to(story.dtype)


def held_by_rank(story: Story, phase: int, tensors: Mapping[str, Any]) -> dict[str, tuple[Tensor, ...]]:
    """By tensor, such as "matrix0.momentum", and rank the numbers of its elements that lie there."""
    each, wanted = story.phases[phase], []
    for tensor in tensors:
        name, key = tensor.split(".")
        matrix, spot = story.matrix(name), story.spot(phase, name)
        if key == "step" or (each.state is not None and key != "weight"):
            spot = ("plain",)
        elif matrix is not None and key in ONE_A_ROW:
            spot = of_rows(spot, matrix.kept)
        wanted.append((spot, story.shape_of(tensor)))
    return dict(zip(tensors, numbers_by_rank(each.sizes, each.ranks, tuple(wanted)), strict=True))


def missing_ranks(story: Story, number: int, name: str, phase: int) -> list[int]:
    """The ranks without a gradient of that parameter in that step."""
    each, ranks = story.phases[phase], set(dict(story.steps[number].absent).get(name, ()))
    copies = first_copies(each.sizes, each.ranks, story.spot(phase, name))
    return [rank for rank, first in enumerate(copies) if first in ranks]


def whole_gradients(story: Story, number: int, phase: int) -> dict[str, Tensor | None]:
    """What the step amounts to: zero where ranks miss a part, None where all do or where the step is skipped."""
    gradients: dict[str, Tensor | None] = {}
    held = held_by_rank(story, phase, {f"{name}.weight": None for name in story.shapes})
    for name, gradient in problem_of(story).gradients[number].items():
        assert gradient is not None
        missing, value = missing_ranks(story, number, name, phase), gradient.clone()
        for rank in missing:
            value.view(-1)[held[f"{name}.weight"][rank]] = 0
        gradients[name] = None if len(missing) == story.phases[phase].world_size else value
    finite = all(bool(value.isfinite().all()) for value in gradients.values() if value is not None)
    if dict(story.options).get("nonfinite") == "skip" and not finite:
        return dict.fromkeys(gradients)
    return gradients


def set_rates(story: Story, number: int, optimizer: torch.optim.Optimizer) -> None:
    """Gives every group its learning rate of the step."""
    step = story.steps[number]
    for group in optimizer.param_groups:
        rate = (MATRIX_LR if group["algorithm"] == "matrix" else ELEMENTWISE_LR) * step.rate
        group["lr"] = torch.tensor(rate, dtype=torch.float64) if step.as_tensor else rate
