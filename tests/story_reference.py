"""Tells stories by the float64 reference, matrix by matrix, and compares how they are told."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dion_core.testing.ranks import pool
from tests.mesh_cases import Weight
from tests.reference import Options, ReferenceElementwise, ReferenceMatrix
from tests.stories import MATRIX_LR, Matrix, Story, held_by_rank, problem_of, whole_gradients
from tests.story_live import live, live_alone
from tests.training import ELEMENTWISE_LR, Snapshot, _reference_state, assert_close, assert_equal_bits


@dataclass
class Member:
    """A parameter as the reference holds it: the matrices that it is, or one tensor of AdamW's or Lion's."""

    base_rate: float
    pieces: Sequence[ReferenceMatrix | ReferenceElementwise]
    weight: Weight | None = None

    def step(self, rate: float, gradient: Tensor | None) -> None:
        """Takes a step; without a gradient nothing moves."""
        parts: Sequence[Tensor | None] = [gradient] * len(self.pieces)
        if self.weight is not None and gradient is not None:
            parts = self.weight.matrices(gradient)
        for piece, part in zip(self.pieces, parts, strict=True):
            piece.options.lr = self.base_rate * rate
            piece.step(None if part is None else part.numpy())

    def state(self, story: Story, name: str) -> Snapshot:
        """Weight and state in whole tensors."""
        of_pieces = [dict(_reference_state(name, piece)) for piece in self.pieces]
        if self.weight is None:
            return of_pieces[0]
        return {key: self.weight.joined([each[key] for each in of_pieces], story.shape_of(key)) for key in of_pieces[0]}


def members_of(story: Story) -> dict[str, Member]:
    """All parameters by name."""
    known = {key: value for key, value in story.options if key not in ("scope", "wire_dtype", "momentum_dtype")}
    scope = dict(story.options).get("scope")
    if scope == "all":
        known["fraction"] = 1.0
    if scope == "local":
        known["scope"] = scope
    shared = {key: known[key] for key in ("weight_decay", "maximize", "nonfinite") if key in known}
    members = {}
    for name, value in problem_of(story).weights.items():
        matrix = story.matrix(name)
        if matrix is None:
            options = Options(name.rstrip("0123456789"), **shared)
            members[name] = Member(ELEMENTWISE_LR, [ReferenceElementwise(value.numpy(), options)])
            continue
        pieces = [
            ReferenceMatrix(part.numpy(), Options(story.optimizer.lower(), **known))
            for part in matrix.weight.matrices(value)
        ]
        members[name] = Member(MATRIX_LR, pieces, matrix.weight)
    return members


def rows_held(story: Story, phase: int, name: str, matrix: Matrix) -> list[list[list[int]]]:
    """For each matrix of a parameter the rows of every rank that holds any, copies left out."""
    key = f"{name}.second_moment"
    [numbers] = held_by_rank(story, phase, {key: None}).values()
    shape = story.shape_of(key)
    rows = torch.arange(torch.Size(shape).numel()).view(shape)
    found = []
    for part in matrix.weight.matrices(rows):
        of_ranks = [torch.isin(part.flatten(), held).nonzero().flatten().tolist() for held in numbers]
        found.append([list(each) for each in dict.fromkeys(map(tuple, of_ranks)) if each])
    return found


def referred(story: Story) -> list[Snapshot]:
    """Weights and state after every phase, in float64 loops."""
    members = members_of(story)
    snapshots = []
    for phase in range(len(story.phases)):
        for name, matrix in story.named_matrices():
            for piece, held in zip(members[name].pieces, rows_held(story, phase, name, matrix), strict=True):
                assert isinstance(piece, ReferenceMatrix)
                piece.held = held
        for number in story.numbers(phase):
            for name, gradient in whole_gradients(story, number, phase).items():
                members[name].step(story.steps[number].rate, gradient)
        snapshots.append({key: value for name, one in members.items() for key, value in one.state(story, name).items()})
    return snapshots


def tolerance(story: Story) -> dict[str, float]:
    """Relative to the largest entry of a tensor.

    Float64 rounds by 1e-16, which Newton-Schulz raises up to some hundred times and every step anew. The second moment
    is kept in float32 by definition: a step rounds what is added three times, by 2^-24 at most, and the sum once. Half
    of that is the error of an update of less than 0.1, on weights that may be small.
    """
    if "Nor" not in story.optimizer:
        return {"other": 1e-11}
    return {"second_moment": (len(story.steps) + 3) * 2**-24, "weight": 1e-6, "other": 1e-11}


def check(story: Story) -> None:
    """The package does what the reference does, and where it is promised what one process does, bit for bit."""
    told = live(story)
    if story.compared:
        for phase, (actual, wanted) in enumerate(zip(told, referred(story), strict=True)):
            assert_close(actual, wanted, tolerance(story), f"phase {phase}")
    if story.num_exact:
        gradients = [
            whole_gradients(story, number, phase)
            for phase in range(len(story.phases))
            for number in story.numbers(phase)
        ]
        [alone] = pool(1).run(live_alone, story, gradients)
        for phase, (actual, wanted) in enumerate(zip(told[: story.num_exact], alone, strict=False)):
            assert_equal_bits(actual, wanted, f"phase {phase}")
