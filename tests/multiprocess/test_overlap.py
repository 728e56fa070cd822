"""The messages of one bucket are under way while another one is orthogonalized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dion_comm_nccl import FullShard
from dion_core import NorDion2
from dion_core.newton_schulz import NewtonSchulz, Orthogonalizer
from dion_core.packing import SlotExchange
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps
from dion_core.testing.ranks import pool
from dion_core.transport import Bucket, Session

EVENTS: list[str] = []


@dataclass(frozen=True)
class Noting:
    """Newton-Schulz that notes which bucket, by its number of columns, it computes."""

    def __call__(self, matrices: Tensor) -> Tensor:
        EVENTS.append(f"compute {matrices.shape[2]}")
        return NewtonSchulz()(matrices)


class NotingExchange(SlotExchange):
    """Notes when its messages are launched and when it goes on after them."""

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        steps, columns = super().orthogonalize(rows, selection, orthogonalizer), self.bucket.shape[1]
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                result: Rows = stop.value
                return result
            EVENTS.append(f"launched {columns}")
            yield
            EVENTS.append(f"resumed {columns}")


@dataclass(frozen=True)
class Noted(FullShard):
    """`full`, whose exchanges note what they do."""

    interface_version: ClassVar[int] = 1

    def open(self, buckets: Sequence[Bucket]) -> Session:
        plans = [exchange.plan for exchange in super().open(buckets).exchanges if isinstance(exchange, SlotExchange)]
        return Session([NotingExchange(plan.bucket, plan) for plan in plans])


def events_of_a_step() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = [distribute_tensor(torch.randn(8, columns), mesh, [Shard(0)]) for columns in (3, 4, 5)]
    parameters = [nn.Parameter(weight) for weight in weights]
    optimizer = NorDion2(parameters, transport=Noted(), orthogonalizer=Noting())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    EVENTS.clear()
    optimizer.step()
    return EVENTS


def test_a_bucket_computes_while_the_next_one_is_under_way() -> None:
    for events in pool(2).run(events_of_a_step):
        a, b, c = (event.removeprefix("compute ") for event in events if event.startswith("compute"))
        assert {a, b, c} == {"3", "4", "5"}
        first, second = events.index(f"compute {a}"), events.index(f"compute {b}")
        assert events.index(f"launched {a}") < events.index(f"launched {b}") < first, events
        # The results of the first are on their way back while the second computes, and the third on its way there.
        assert events.index(f"launched {a}", first) < second < events.index(f"resumed {a}", first), events
        assert first < events.index(f"launched {c}") < second, events
