"""What a step launches is compiled while the optimizer is built, many kernels at a time, so that no step waits for it.

A rehearsal goes through the step of one bucket without a message and without a launch, on no values at all, and so
finds the kernels as the step will. What is not rehearsed is compiled in the first step, one after the other: rows whose
columns are split, exchanges over several axes or of transports without a rehearsal, updates that other ranks send, and
gradients that lie otherwise than their parameters.

Legend: N matrices of a bucket, R local rows and C local columns of one, K slots a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dion_core.buckets import MatrixBucket, momentum_dtype
from dion_core.collectives import Silence
from dion_core.delivery import Here, Target
from dion_core.layout import in_pieces
from dion_core.matrices import ALIGNMENT, alike, matrices
from dion_core.newton_schulz import Orthogonalizer
from dion_core.operands import SCALARS, Operands
from dion_core.ops import KERNEL_DTYPES, accumulate_, has_triton
from dion_core.pipeline import apply, move
from dion_core.placements import local_part
from dion_core.plan import Plan
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps, done, run
from dion_core.transport import Bucket, Exchange, Traffic, Transport

Work = tuple[torch.device, Callable[[], None]]
"""What compiles something for a device."""
OTHERS = 2
"""Threads for all but the longest work."""


def prepare(plan: Plan) -> None:
    """Compiles for the buckets on GPUs; the plan need not be open."""
    transport = plan.choice.transport if plan.choice is not None else None
    on_gpus = [bucket for bucket in plan.buckets if bucket.bucket.device.type == "cuda"]
    orthogonalizers = _of_orthogonalizers(on_gpus)
    longest = [each for each, *_ in orthogonalizers]
    others = [each for _, *rest in orthogonalizers for each in rest]
    others += [(entry.bucket.device, partial(rehearse, entry, transport)) for entry in on_gpus if _has_kernels(entry)]
    if not longest and not others:
        return
    do = partial(_do, {device: torch.cuda.current_stream(device) for device, _ in (*longest, *others)})
    # The longest take as long as all others. More threads for those would be in the way, since what of the compiler is
    # Python runs in one at a time; and a rehearsal holds buffers, which a step does of few buckets at a time.
    with ThreadPoolExecutor(max(len(longest), 1)) as alone, ThreadPoolExecutor(OTHERS) as few:
        for result in (alone.map(do, longest), few.map(do, others)):
            list(result)


def _do(streams: Mapping[torch.device, torch.cuda.Stream], work: Work) -> None:
    """Does it on the stream of the thread that builds the optimizer: tables are made there, and memory is of it."""
    device, compile_all = work
    with torch.no_grad(), torch.cuda.device(device), torch.cuda.stream(streams[device]):
        compile_all()


def _of_orthogonalizers(buckets: Sequence[MatrixBucket]) -> list[list[Work]]:
    """For each orthogonalizer, and each size of what this rank owns, what compiles its kernels: the longest first."""
    found: dict[object, list[Work]] = {}
    for entry in buckets:
        bucket, owned = entry.bucket, len(entry.bucket.owned(entry.bucket.rank))
        key = (entry.orthogonalizer, bucket.device, bucket.dtype, owned, bucket.total_rows, bucket.shape[1])
        preparations = getattr(entry.orthogonalizer, "preparations", None)
        if owned and preparations is not None and key not in found:
            rows = torch.empty(0, bucket.shape[1], dtype=bucket.dtype, device=bucket.device)
            found[key] = [(bucket.device, each) for each in preparations(rows, owned, bucket.total_rows)]
    return [each for each in found.values() if each]


def _has_kernels(bucket: MatrixBucket) -> bool:
    """Whether all its rows are handled by kernels in a step, and no others hold columns of them."""
    dtypes = {bucket.bucket.dtype, *_dtypes(bucket)}
    known = bucket.has_state and bucket.addressable and not bucket.ragged and dtypes <= KERNEL_DTYPES
    return known and not bucket.bucket.layout.column_groups and has_triton()


def _dtypes(bucket: MatrixBucket) -> tuple[torch.dtype, torch.dtype]:
    """Of the parameters and of their momentum."""
    parameter = bucket.members[0].parameter
    return parameter.dtype, momentum_dtype(parameter, bucket.options)


def rehearse(bucket: MatrixBucket, transport: Transport | None) -> None:
    """Compiles what the step of a bucket with kernels launches, but for the orthogonalizer; nothing of it changes."""
    from dion_core.launching import compiles_only

    layout, device = bucket.bucket.layout, bucket.bucket.device
    silent = replace(layout, group=_Silent(layout.group.size, layout.group.rank, layout.group.ranks))
    silent_bucket = replace(bucket.bucket, layout=silent)
    exchange = transport.rehearsal(silent_bucket) if transport and in_pieces(layout) and not layout.outer else None
    copy = replace(bucket, bucket=silent_bucket, orthogonalizer=_Idle(), exchange=exchange or _Nowhere(silent_bucket))
    copy.tables = bucket.tables
    operands = _operands(bucket)
    if operands is None:
        return
    active = torch.ones(len(operands.parameters), dtype=torch.bool, device=device)
    with compiles_only():
        scores = accumulate_(
            operands.momentum,
            operands.gradients,
            copy.nonfinite,
            maximize=bucket.options["maximize"],
            proceed=active.new_ones(()),
        )
        if bucket.selector.needs_all_scores:
            scores = scores.new_empty(len(operands.parameters), layout.shape[0])
        chosen = bucket.selector.select(scores, copy.tables, active)
        run(apply(Target(copy, 0, (0,), Here()), operands, active, [move(copy, operands, chosen, [])]))


def _operands(bucket: MatrixBucket) -> Operands | None:
    """The operands as a step will have them, without addresses; None where tensors differ in strides."""
    device = bucket.bucket.device
    parts = bucket.matrices([local_part(member.parameter) for member in bucket.members])
    if not alike(parts):
        return None
    addresses = torch.zeros(len(parts), dtype=torch.int64, device=device)
    # Without the tensors themselves: nothing but kernels can go through them, and those are not launched.
    parameters = replace(matrices(parts, addresses, parts[0]), tensors=[None] * len(parts))
    (_, dtype), (stride, step) = _dtypes(bucket), parameters.stride
    column = replace(parameters, shape=(parameters.shape[0], 1), stride=(1, 1), aligned=False)
    nothing: Sequence[Tensor] = []
    return Operands(
        parameters=parameters,
        momentum=replace(parameters, dtype=dtype, aligned=step == 1 and stride * dtype.itemsize % ALIGNMENT == 0),
        gradients=parameters,
        second_moment=replace(column, dtype=torch.float32) if bucket.rule.normalizer.has_second_moment else nothing,
        waited=replace(column, dtype=torch.int32) if bucket.may_defer else nothing,
        scalars=dict(zip(SCALARS, torch.zeros(len(SCALARS), dtype=torch.float64, device=device).unbind(), strict=True)),
    )


class _Idle:
    """An orthogonalizer that does nothing."""

    def __call__(self, matrices: Tensor, /) -> Tensor:
        return torch.empty_like(matrices)

    def of_rows(self, rows: Tensor, place: Tensor, spare: Tensor | None = None) -> Tensor:
        return rows.new_empty(*place.shape, rows.shape[1])


@dataclass(frozen=True)
class _Nowhere(Exchange):
    """An exchange in which all rows of a bucket have one place, and stay there."""

    bucket: Bucket

    def reserve(self, selection: RowSelection) -> Rows:
        columns = self.bucket.layout.columns(self.bucket.layout.group.rank)
        values = torch.empty(1, columns, dtype=self.bucket.dtype, device=self.bucket.device)
        return Rows(values, torch.zeros_like(selection.index))

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        return done(rows)

    def traffic(self) -> Traffic:
        return Traffic()


@dataclass(frozen=True)
class _Silent(Silence):
    """Ranks of which this process is one."""

    size: int
    rank: int
    ranks: tuple[int, ...]
