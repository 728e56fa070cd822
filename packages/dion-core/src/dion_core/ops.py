"""The operations of a step on the device where its rows are: Triton kernels on CUDA, the definitions elsewhere.

The definitions in plain torch are in `rows`, `neurons`, `choice`, `compaction` and `deferral`, the kernels under the
same names in `kernels`. The kernels serve fp32, bf16 and fp16 (int32 waiting times), and matrices whose addresses are
on the device (`Matrices`); everything else goes to the definitions.

Legend: N matrices of a bucket, R local rows, C local columns, K slots a matrix, W ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TypeGuard

import torch
from torch import Tensor

from dion_core import choice, compaction, deferral, neurons
from dion_core import rows as definitions
from dion_core.layout import RowTables
from dion_core.matrices import Matrices
from dion_core.rows import Rows, RowSelection

__all__ = [
    "accumulate_",
    "choose",
    "choose_local",
    "collect",
    "neuron_factors_",
    "neuron_factors_of_rows_",
    "neuron_scale",
    "places",
    "spread_",
    "sums_of_squares",
    "take_and_decay_",
    "update_",
    "wait_",
    "with_age",
]

KERNEL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})

logger = logging.getLogger(__name__)


@cache
def has_triton() -> bool:
    """Whether kernels can be compiled here; where they cannot, one line of the log says so."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        logger.warning("Triton cannot be imported (%s): rows on CUDA are handled in plain torch, slower", error)
        return False
    return True


def _for_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in KERNEL_DTYPES and has_triton()


def _addressed(matrices: Sequence[Tensor | None]) -> TypeGuard[Matrices]:
    """Whether the kernels can go through the matrices by address."""
    return _on_device(matrices) and matrices.dtype in KERNEL_DTYPES


def _on_device(matrices: Sequence[Tensor | None]) -> TypeGuard[Matrices]:
    """Whether the addresses of the matrices are on a device where kernels run."""
    return isinstance(matrices, Matrices) and matrices.addresses.is_cuda and has_triton()


def accumulate_(
    momentum: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    left_out: Tensor,
    *,
    maximize: bool,
    proceed: Tensor,
) -> Tensor:
    """`rows.accumulate_`: adds the gradients to the momentum and returns the (N, R) row scores."""
    if _addressed(momentum) and _addressed(gradients):
        from dion_core.kernels import rows as kernels

        return kernels.accumulate_(momentum, gradients, left_out, maximize=maximize, proceed=proceed)
    return definitions.accumulate_(momentum, gradients, left_out, maximize=maximize, proceed=proceed)


def take_and_decay_(
    momentum: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    selection: RowSelection,
    rows: Rows,
    *,
    decay: float | Tensor,
    nesterov: bool,
    maximize: bool,
) -> None:
    """`rows.take_and_decay_`: writes the chosen rows to their slots and decays them in the momentum."""
    if _addressed(momentum) and _addressed(gradients) and _for_kernels(rows.values):
        from dion_core.kernels import rows as kernels

        kernels.take_and_decay_(momentum, gradients, selection, rows, decay=decay, nesterov=nesterov, maximize=maximize)
        return
    definitions.take_and_decay_(momentum, gradients, selection, rows, decay=decay, nesterov=nesterov, maximize=maximize)


def update_(
    parameters: Sequence[Tensor],
    rows: Rows,
    selection: RowSelection,
    row_scale: Tensor,
    *,
    learning_rate: float | Tensor,
    weight_decay: float | Tensor,
    active: Tensor,
    cautious: bool,
    scale: float = 1.0,
) -> None:
    """`rows.update_`: decays the parameters and subtracts the chosen rows."""
    if _addressed(parameters) and _for_kernels(rows.values) and _for_kernels(row_scale):
        from dion_core.kernels import updating as kernels

        kernels.update_(
            parameters,
            rows,
            selection,
            row_scale,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            active=active,
            cautious=cautious,
            scale=scale,
        )
        return
    definitions.update_(
        parameters,
        rows,
        selection,
        row_scale,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        active=active,
        cautious=cautious,
        scale=scale,
    )


def sums_of_squares(rows: Rows, selection: RowSelection) -> Tensor:
    """`rows.sums_of_squares`: (N, K), the sum of squares of every chosen row."""
    if _for_kernels(rows.values):
        from dion_core.kernels import neurons as kernels

        return kernels.sums_of_squares(rows, selection)
    return definitions.sums_of_squares(rows, selection)


def neuron_factors_(
    second_moment: Sequence[Tensor], selection: RowSelection, sums: Tensor, *, columns: int, beta2: float | Tensor
) -> tuple[Tensor, Tensor]:
    """`neurons.neuron_factors_`: (N, K) factors and this rank's message, from sums of squares."""
    if _addressed(second_moment) and _for_kernels(sums):
        from dion_core.kernels import neurons as kernels

        return kernels.neuron_factors_(second_moment, selection, sums, columns=columns, beta2=beta2)
    return neurons.neuron_factors_(second_moment, selection, sums, columns=columns, beta2=beta2)


def neuron_factors_of_rows_(
    second_moment: Sequence[Tensor], selection: RowSelection, rows: Rows, *, columns: int, beta2: float | Tensor
) -> tuple[Tensor, Tensor]:
    """`neurons.neuron_factors_of_rows_`: (N, K) factors and this rank's message, from the rows."""
    if _addressed(second_moment) and _for_kernels(rows.values):
        from dion_core.kernels import neurons as kernels

        return kernels.neuron_factors_of_rows_(second_moment, selection, rows, columns=columns, beta2=beta2)
    return neurons.neuron_factors_of_rows_(second_moment, selection, rows, columns=columns, beta2=beta2)


def neuron_scale(factor: Tensor, gathered: Tensor, *, slots: Sequence[int], first_slot: Tensor, total: int) -> Tensor:
    """`neurons.neuron_scale`: (N, K) final factors, from the messages of all ranks."""
    if _for_kernels(gathered):
        from dion_core.kernels import neurons as kernels

        return kernels.neuron_scale(factor, gathered, slots=slots, first_slot=first_slot, total=total)
    return neurons.neuron_scale(factor, gathered, slots=slots, first_slot=first_slot, total=total)


def choose(scores: Tensor, tables: RowTables, active: Tensor, *, total: int, offer: int) -> RowSelection:
    """The `total` best rows of each matrix by (N, R) scores: see `choice.choose`."""
    if scores.dtype == torch.float32 and _for_kernels(scores):
        from dion_core.kernels import choice as kernels

        return kernels.choose(scores, tables, active, total=total, offer=offer)
    return choice.choose(scores, tables, active, total=total, offer=offer)


def choose_local(scores: Tensor, tables: RowTables, active: Tensor, *, share: int) -> RowSelection:
    """The `share` best rows of each shard by (N, R local) scores: see `choice.choose_local`."""
    if scores.dtype == torch.float32 and _for_kernels(scores):
        from dion_core.kernels import choice as kernels

        return kernels.choose_local(scores, tables, active, share=share)
    return choice.choose_local(scores, tables, active, share=share)


def collect(rows: Tensor, count: Tensor, start: Tensor, total: int, owned: Tensor | None = None) -> Tensor:
    """(B, T, C) matrices of (S, C) rows: see `compaction.collect`."""
    if rows.is_cuda and has_triton():
        from dion_core.kernels import compaction as kernels

        return kernels.collect(rows, count, start, total, owned)
    return compaction.collect(rows, count, start, total, owned)


def places(count: Tensor, start: Tensor, total: int, owned: Tensor | None = None) -> Tensor:
    """(B, T) rows of the buffer that make up matrices: see `compaction.places`."""
    if count.is_cuda and has_triton():
        from dion_core.kernels import compaction as kernels

        return kernels.places(count, start, total, owned)
    return compaction.places(count, start, total, owned)


def spread_(rows: Tensor, matrices: Tensor, count: Tensor, start: Tensor, owned: Tensor | None = None) -> None:
    """Writes (B, T, C) matrices to their slots in (S, C) rows: see `compaction.spread_`."""
    if matrices.is_cuda and has_triton():
        from dion_core.kernels import compaction as kernels

        kernels.spread_(rows, matrices, count, start, owned)
        return
    compaction.spread_(rows, matrices, count, start, owned)


def with_age(selection: RowSelection, waited: Sequence[Tensor]) -> RowSelection:
    """`deferral.with_age`: the selection with the waiting times of its rows."""
    if _on_device(waited):
        from dion_core.kernels import deferral as kernels

        return kernels.with_age(selection, waited)
    return deferral.with_age(selection, waited)


def wait_(waited: Sequence[Tensor], chosen: RowSelection, admitted: RowSelection) -> None:
    """`deferral.wait_`: lengthens the waiting times of refused rows and clears those of admitted ones."""
    if _on_device(waited):
        from dion_core.kernels import deferral as kernels

        kernels.wait_(waited, chosen, admitted)
        return
    deferral.wait_(waited, chosen, admitted)
