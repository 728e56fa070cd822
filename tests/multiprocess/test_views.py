"""Heads, blocks, convolutions and stacks get the bits of separate plain matrices, at every number of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dion_core
from dion_core.testing.ranks import pool
from tests.training import OPTIMIZERS, transports_and_scopes, whole_mesh

STEPS = 3


@dataclass(frozen=True)
class Weight:
    """A weight, its group keys, and the rows of each of its matrices where it is divided by rows.

    Attributes:
        dim: of the shards; None where copies are held.
    """

    shape: tuple[int, ...]
    keys: Mapping[str, Any]
    rows: tuple[int, ...] = ()
    dim: int | None = 0

    def matrices(self, value: Tensor) -> list[Tensor]:
        """The matrices in the weight, or in a tensor that lies like it; written without the code under test."""
        if self.rows:
            return list(value.split(self.rows))
        if self.keys.get("flatten"):
            return [value.flatten(1)]
        return list(value.flatten(0, -3).unbind())


# Over 3 ranks the first is split into 11, 11 and 10 rows, the second into 10, 10 and 10, which cuts heads of 4 rows and
# leaves those of 15 on two ranks; blocks of 2 rows lie on one rank each. Ranks 2 and 3 hold nothing of a stack of 2.
WEIGHTS = (
    Weight((32, 6), {"num_heads": 8}, (4,) * 8),
    Weight((30, 7), {"num_heads": 2}, (15, 15)),
    Weight((12, 6), {"split_sizes": (8, 2, 2)}, (8, 2, 2)),
    Weight((13, 40), {"split_sizes": [6, 4, 3]}, (6, 4, 3)),
    Weight((9, 4, 3, 2), {"flatten": True}),
    Weight((2, 3, 8, 6), {"flatten": False}),
    Weight((2, 5, 8, 6), {}, dim=1),
    Weight((3, 9, 6), {}, dim=1),
)
COPIES = tuple(Weight(weight.shape, weight.keys, weight.rows, None) for weight in WEIGHTS)
COLUMNS = (Weight((32, 6), {"num_heads": 8}, (4,) * 8, 1), Weight((2, 8, 6), {}, dim=2))


@dataclass(frozen=True)
class Case:
    """One optimizer to train, on all weights together."""

    weights: tuple[Weight, ...]
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    ddp: bool = False


def values(case: Case) -> list[list[Tensor]]:
    """Of the weights, then of the gradients of every step, one tensor a weight; experts differ in scale."""
    generator = torch.Generator().manual_seed(4)
    drawn = [
        [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in case.weights]
        for _ in range(1 + STEPS)
    ]
    for of_step in drawn[1:]:
        for gradient in of_step:
            if gradient.ndim > 2:
                gradient *= 10.0 ** torch.arange(len(gradient)).view(-1, *[1] * (gradient.ndim - 1))
    return [[value.to(case.dtype) for value in of_step] for of_step in drawn]


def train_here(cases: Sequence[Case]) -> list[list[dict[str, Tensor]]]:
    """On every rank: whole weights and state after training, by case and weight."""
    mesh, results = whole_mesh(), []
    for case in cases:

        def placed(value: Tensor, weight: Weight, case: Case = case) -> Tensor:
            place = Replicate() if weight.dim is None else Shard(weight.dim)
            return value.clone() if case.ddp else distribute_tensor(value.clone(), mesh, [place], src_data_rank=None)

        weights, *gradients = values(case)
        parameters = [nn.Parameter(placed(*each)) for each in zip(weights, case.weights, strict=True)]
        groups = [
            {"params": [(f"weight{number}", parameter)], **weight.keys}
            for number, (parameter, weight) in enumerate(zip(parameters, case.weights, strict=True))
        ]
        group = dist.group.WORLD if case.ddp else None
        optimizer = getattr(dion_core, case.optimizer)(groups, group=group, **case.options)
        for of_step in gradients:
            for parameter, gradient, weight in zip(parameters, of_step, case.weights, strict=True):
                parameter.grad = placed(gradient, weight)
            optimizer.step()
        results.append([whole({"weight": each, **optimizer.state[each]}) for each in parameters])
    return results


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def train_separately(case: Case) -> list[list[dict[str, Tensor]]]:
    """In this process, with every matrix as a plain 2-D parameter of its own: by weight and matrix."""
    weights, *gradients = values(case)
    parameters = [
        [nn.Parameter(matrix.clone()) for matrix in weight.matrices(value)]
        for value, weight in zip(weights, case.weights, strict=True)
    ]
    options = {name: value for name, value in case.options.items() if name not in ("transport", "scope")}
    optimizer = getattr(dion_core, case.optimizer)([each for matrices in parameters for each in matrices], **options)
    for of_step in gradients:
        for matrices, gradient, weight in zip(parameters, of_step, case.weights, strict=True):
            for parameter, part in zip(matrices, weight.matrices(gradient), strict=True):
                parameter.grad = part.clone()
        optimizer.step()
    return [[whole({"weight": each, **optimizer.state[each]}) for each in matrices] for matrices in parameters]


def compare(cases: Sequence[Case], world_size: int, tolerance: float | None = None) -> None:
    """Every matrix and its state has the bits that it has alone, or its values to a tolerance; on all ranks alike."""
    by_rank = pool(world_size).run(train_here, cases)
    for number, case in enumerate(cases):
        wanted, initial = train_separately(case), values(case)[0]
        for place, weight in enumerate(case.weights):
            for name in wanted[place][0]:
                copies = [of_rank[number][place][name] for of_rank in by_rank]
                assert all(torch.equal(copy, copies[0]) for copy in copies), f"{case}: {name} of {weight} differs"
                pieces = weight.matrices(copies[0])
                for matrix, (piece, other) in enumerate(zip(pieces, wanted[place], strict=True)):
                    where = f"{case.optimizer} {case.options}: {name} of matrix {matrix} of {weight}"
                    assert piece.shape == other[name].shape, where
                    if tolerance is None:
                        assert torch.equal(piece, other[name]), where
                    else:
                        torch.testing.assert_close(piece, other[name], rtol=tolerance, atol=tolerance, msg=where)
            assert not torch.equal(by_rank[0][number][place]["weight"], initial[place])


def exact_cases() -> list[Case]:
    """Every optimizer with every transport and scope that promises not to depend on the number of ranks."""
    return [
        Case(WEIGHTS, optimizer, {"fraction": 0.3, **way} if "Dion" in optimizer else way)
        for optimizer in OPTIMIZERS
        for way in transports_and_scopes(optimizer)
        if way.get("scope", "global") == "global"
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sharded_weights_get_the_bits_of_separate_matrices(world_size: int) -> None:
    cases = [case for case in exact_cases() if world_size == 3 or case.optimizer in ("Muon", "NorDion2")]
    other = [
        Case(WEIGHTS, "NorDion2", {"fraction": 0.3, "scale": "rms_norm"}, torch.bfloat16),
        Case(WEIGHTS, "Muon", {"nesterov": True, "cautious_weight_decay": True}, torch.float64),
    ]
    compare([*cases, *other], world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_local_choice_from_matrices_that_no_shard_cuts_is_the_whole_choice(world_size: int) -> None:
    """The ranks that hold rows of a head are one, however many there are: its share is not divided by them."""
    options = {"fraction": 0.3, "scope": "local", "transport": "local"}
    compare([Case((WEIGHTS[0], WEIGHTS[5]), optimizer, options) for optimizer in ("Dion2", "NorDion2")], world_size)


@pytest.mark.parametrize("world_size", [1, 3])
def test_copies_get_the_bits_of_separate_matrices(world_size: int) -> None:
    compare([Case(COPIES, optimizer, ddp=ddp) for optimizer in OPTIMIZERS for ddp in (False, True)], world_size)


def test_split_columns_agree_with_separate_matrices() -> None:
    """Partial sums of the mean square of a row are added in another order, in float32: a rounding a step or two."""
    compare([Case(COLUMNS, optimizer) for optimizer in OPTIMIZERS], 3, 3e-6)


def build_what_is_refused() -> list[str]:
    """On every rank: the messages of two convolutions split along dimensions that are columns of the matrix."""
    mesh, messages = whole_mesh(), []
    for dim in (1, 3):
        value = distribute_tensor(torch.ones(4, 6, 3, 3), mesh, [Shard(dim)], src_data_rank=None)
        groups = [{"params": [("conv.weight", nn.Parameter(value))], "flatten": True}]
        for kind in (dion_core.Muon, dion_core.NorDion2):
            with pytest.raises(ValueError, match=r"conv\.weight") as caught:
                kind(groups)
            messages.append(str(caught.value))
    return messages


def test_shards_that_cut_flattened_columns_are_refused() -> None:
    for messages in pool(2).run(build_what_is_refused):
        assert [message.split(" of shape ")[0] for message in messages] == [
            f"conv.weight: Shard({dim})" for dim in (1, 1, 3, 3)
        ]
        assert all("(4, 6, 3, 3) cuts the columns of the flattened matrix" in message for message in messages)
