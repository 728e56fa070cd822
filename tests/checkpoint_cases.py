"""A model of parameters of every kind, saved in one layout and loaded in another, through torch's own checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dion_core
from dion_core import LayerWise
from tests.training import Snapshot, halves, placed, whole_mesh

SAVED_AT, NUM_STEPS = 2, 3

MATRICES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "plain": ((13, 6), {}),
    "short": ((3, 6), {}),  # fewer rows than ranks
    "unused": ((5, 6), {}),  # never has a gradient
    "heads": ((12, 6), {"num_heads": 3}),
    "blocks": ((12, 6), {"split_sizes": (8, 2, 2), "momentum_dtype": torch.float32}),  # its weight is bf16
    "conv": ((6, 2, 3), {"flatten": True}),
    "stack": ((4, 6, 5), {}),
}
ELEMENTWISE: dict[str, tuple[tuple[int, ...], str]] = {"vector": ((7,), "adamw"), "table": ((5, 3), "lion")}
NAMES = (*MATRICES, *ELEMENTWISE)


@dataclass(frozen=True)
class Place:
    """Where the parameters lie, and on how many ranks. A further layout is a further line of `PLACES`.

    Attributes:
        layout: as in `training`; "tiles" is rows over the first and columns over the second dimension of a (2, W / 2)
            mesh, and "layerwise" is "ddp" with state that owners keep.
        exact: a step from the same state has the same bits as anywhere else.
    """

    layout: str
    world_size: int
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.layout} x{self.world_size}"


PLACES = (
    Place("plain", 1),
    Place("shard0", 1),
    Place("shard0", 2),
    Place("shard0", 3),
    Place("shard0", 4),
    Place("shard1", 2, exact=False),
    Place("ddp", 2),
    Place("replicate", 3),
    Place("hsdp", 4),
    Place("tiles", 4, exact=False),
    Place("layerwise", 3),
)
BUCKETS = LayerWise(bucket_elements=100)
"""Several buckets of the parameters here, in some of which a rank keeps nothing."""


class Run:
    """A model and its optimizer in training; gradients are drawn by step and name, the same on every rank."""

    def __init__(self, place: Place, optimizer: str, **options: Any) -> None:
        self.place, self.mesh = place, whole_mesh()
        self.model = nn.Module()
        shapes = {name: shape for name, (shape, _) in (MATRICES | ELEMENTWISE).items()} | {"frozen": (4, 6)}
        for number, (name, shape) in enumerate(shapes.items()):
            weight = self._placed(name, _draw(shape, number))
            if name == "blocks":
                weight = weight.bfloat16()
            self.model.register_parameter(name, nn.Parameter(weight, requires_grad=name != "frozen"))
        if place.layout == "layerwise":
            options["state"] = BUCKETS
        group = dist.group.WORLD if place.layout in ("ddp", "layerwise") else None
        self.optimizer = getattr(dion_core, optimizer)(self.groups(), group=group, **options)

    def groups(self) -> list[dict[str, Any]]:
        """One for each kind; "frozen" is with "plain"."""
        by_options: dict[str, dict[str, Any]] = {}
        for name, (_, options) in MATRICES.items():
            group = by_options.setdefault(repr(options), {"params": [], **options})
            group["params"].append((name, self.model.get_parameter(name)))
        first, *others = by_options.values()
        first["params"].append(("frozen", self.model.get_parameter("frozen")))
        rest = [
            {"params": [(name, self.model.get_parameter(name))], "algorithm": algorithm, "lr": 0.003}
            for name, (_, algorithm) in ELEMENTWISE.items()
        ]
        return [first, *others, *rest]

    def _placed(self, name: str, value: Tensor) -> Tensor:
        layout = self.place.layout
        if layout == "tiles":
            columns = Shard(value.ndim - 1) if value.ndim > 1 and name != "conv" else Replicate()
            places = [Shard(1 if name == "stack" else 0), columns]
            return distribute_tensor(value.clone(), halves(dist.group.WORLD), places, src_data_rank=None)
        cuts_columns = layout == "shard1" and name == "conv"
        return placed(value, {"layerwise": "ddp"}.get(layout, "shard0" if cuts_columns else layout), self.mesh)

    def set_gradients(self, number: int) -> None:
        for place, name in enumerate(NAMES):
            parameter = self.model.get_parameter(name)
            gradient = self._placed(name, _draw(parameter.shape, 100 * number + place))
            parameter.grad = None if name == "unused" else gradient.to(parameter.dtype)

    def train(self, first: int, last: int) -> None:
        """Takes the steps with these numbers, both included."""
        for number in range(first, last + 1):
            self.set_gradients(number)
            self.optimizer.step()

    def snapshot(self) -> Snapshot:
        """Whole weights and state. Collective."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        states: Mapping[Tensor, Any] = self.optimizer.state
        if self.place.layout == "layerwise":
            whole = self.optimizer.full_state_dict()["state"]
            states = {parameter: whole.get(number, {}) for number, parameter in enumerate(parameters)}
        taken = {}
        for name, parameter in self.model.named_parameters():
            for key, value in {"weight": parameter, **states.get(parameter, {})}.items():
                taken[f"{name}.{key}"] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        return taken


def _draw(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


WAYS: dict[str, StateDictOptions] = {
    "sharded": StateDictOptions(),
    "sharded, on the CPU": StateDictOptions(cpu_offload=True),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "full, from rank 0": StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
}


def save(model: nn.Module, optimizer: torch.optim.Optimizer, way: str, directory: str) -> None:
    """Saves both: the optimizer's whole state dict through a file of rank 0, others in a sharded checkpoint."""
    options = WAYS[way]
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=Path(directory, "model"))
    of_saving = replace(options, broadcast_from_rank0=False)  # that one is for loading
    state = get_optimizer_state_dict(model, optimizer, options=of_saving)
    if not options.full_state_dict:
        dcp.save({"optimizer": state}, checkpoint_id=Path(directory, "optimizer"))
    elif dist.get_rank() == 0:
        torch.save(state, Path(directory, "optimizer.pt"))
    dist.barrier()


def load(model: nn.Module, optimizer: torch.optim.Optimizer, way: str, directory: str) -> None:
    """Takes back what `save` saved."""
    options = WAYS[way]
    dcp.load({"model": get_model_state_dict(model)}, checkpoint_id=Path(directory, "model"))
    if options.full_state_dict:
        state: Any = {}
        if dist.get_rank() == 0 or not options.broadcast_from_rank0:
            state = torch.load(Path(directory, "optimizer.pt"), weights_only=True)
    else:
        target = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.load(target, checkpoint_id=Path(directory, "optimizer"))
        state = target["optimizer"]
    set_optimizer_state_dict(model, optimizer, state, options=options)


def train_and_save(place: Place, optimizer: str, way: str, directory: str) -> list[Snapshot]:
    """State at the save and after the last step of the unbroken run."""
    run = Run(place, optimizer)
    run.train(1, SAVED_AT)
    at_save = run.snapshot()
    save(run.model, run.optimizer, way, directory)
    run.train(SAVED_AT + 1, NUM_STEPS)
    return [at_save, run.snapshot()]


def resume(place: Place, optimizer: str, way: str, directories: Sequence[str]) -> list[list[Snapshot]]:
    """For each checkpoint the state after the load and after the last step of the resumed run."""
    resumed = []
    for directory in directories:
        run = Run(place, optimizer)
        load(run.model, run.optimizer, way, directory)
        at_load = run.snapshot()
        run.train(SAVED_AT + 1, NUM_STEPS)
        resumed.append([at_load, run.snapshot()])
    return resumed
