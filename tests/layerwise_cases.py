"""A run with every kind of parameter, whose state lies as asked for, for the tests of layer-wise state."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate

import dion_core
from dion_core import LayerWise
from tests.training import place, whole_mesh

SMALL = LayerWise(bucket_elements=700)
"""Several buckets of the parameters below; a rank has nothing in some of them."""
MODES = ("layerwise", SMALL)

ALGORITHMS = {"adamw": {"algorithm": "adamw", "lr": 0.003}, "lion": {"algorithm": "lion", "lr": 0.001}}
# Shapes and group keys. Stacks, heads and blocks are several matrices each and stay on one rank.
KINDS: tuple[tuple[tuple[int, ...], Mapping[str, Any]], ...] = (
    ((17, 32), {}),
    ((6, 8), {}),
    ((3, 8), {}),
    ((6, 8), {}),
    ((1, 8), {}),
    ((40, 100), {}),
    ((6, 8), {"momentum": 0.9, "lr": 0.01}),
    ((32, 6), {"num_heads": 8}),
    ((12, 6), {"split_sizes": (8, 2, 2)}),
    ((9, 4, 3, 2), {"flatten": True}),
    ((2, 3, 8, 6), {"flatten": False}),
    ((7,), ALGORITHMS["adamw"]),
    ((50, 3), ALGORITHMS["adamw"]),
    ((9, 3), ALGORITHMS["lion"]),
)
NUM_STEPS = 3


def draw(seed: int, dtype: torch.dtype) -> list[Tensor]:
    """A value for every parameter, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape, _ in KINDS]


class Run:
    """An optimizer in training.

    Attributes:
        layout: "ddp" and "replicate" as in `tests.training`; "plain" and "contiguous" as these are without a group.
    """

    def __init__(
        self,
        optimizer: str,
        options: Mapping[str, Any],
        *,
        layout: str = "ddp",
        dtype: torch.dtype = torch.float32,
        weights: Sequence[Tensor] | None = None,
        frozen: Sequence[int] = (),
    ) -> None:
        self.layout, self.dtype = layout, dtype
        self.mesh = whole_mesh() if layout == "replicate" else None
        self.parameters = [nn.Parameter(self.placed(value)) for value in weights or draw(0, dtype)]
        for number in frozen:
            self.parameters[number].requires_grad_(False)
        group = dist.group.WORLD if layout == "ddp" else None
        self.optimizer = getattr(dion_core, optimizer)(self.groups(range(len(KINDS))), group=group, **options)

    def groups(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Parameter groups of those parameters: neighbours with equal keys share one."""
        groups: list[dict[str, Any]] = []
        for number in numbers:
            _, keys = KINDS[number]
            if not groups or {key: value for key, value in groups[-1].items() if key != "params"} != keys:
                groups.append({"params": [], **keys})
            groups[-1]["params"].append((f"p{number}", self.parameters[number]))
        return groups

    def placed(self, value: Tensor) -> Tensor:
        """The value as it lies on this rank; convolutions in channels_last, whose columns have another order."""
        if self.mesh is not None:
            return place(value, Replicate(), self.mesh)
        last = self.layout != "contiguous" and value.shape == (9, 4, 3, 2)
        return value.clone(memory_format=torch.channels_last if last else torch.contiguous_format)

    def step(self, number: int, absent: Sequence[int] = ()) -> None:
        """Takes that step, without the gradients of some parameters on this rank."""
        for place_, (parameter, value) in enumerate(zip(self.parameters, draw(number, self.dtype), strict=True)):
            parameter.grad = None
            if place_ not in absent and parameter.requires_grad:
                parameter.grad = self.placed(value)
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [local(parameter) for parameter in self.parameters]

    def whole(self) -> dict[str, Tensor]:
        """Weights and the state of all ranks. Collective."""
        state = self.optimizer.full_state_dict()["state"]
        values = {f"{number}.{key}": value for number, each in state.items() for key, value in each.items()}
        return values | {f"{number}.weight": value for number, value in enumerate(self.weights())}

    def kept(self) -> dict[str, Tensor]:
        """The state on this rank alone."""
        states = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        return {f"{number}.{key}": value for number, each in enumerate(states) for key, value in each.items()}


def local(tensor: Any) -> Tensor:
    """A copy of this rank's part."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone()


def through_bytes(value: Any) -> Any:
    """What `torch.load` makes of what `torch.save` wrote, without trusting it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], where: object) -> None:
    """Equal names, dtypes and bits."""
    assert one.keys() == other.keys(), where
    for name, value in one.items():
        assert value.dtype == other[name].dtype, f"{where}: {name}"
        assert torch.equal(value, other[name]), f"{where}: {name} differs"
