"""Row operations: what a step does to the rows of momentum and parameters, defined in plain torch.

Every function reads a row once and writes it once. Sums run in fp32 (fp64 for fp64) and are rounded once into
the dtype of the tensor that keeps them. Nothing here reads a device value on the host.

Legend: N matrices of a bucket, R local rows and C local columns of one, K slots a matrix, W ranks,
S rows of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SKIPPED_SCORE = -1.0
"""Score of a row that a non-finite value kept from being accumulated: below every norm, so that it comes last."""


def accumulation_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtypes` are summed: fp64 if one of them is, else fp32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


@dataclass(frozen=True)
class RowSelection:
    """The rows chosen of N matrices, on this rank.

    Attributes:
        index: (N, K) int64, local row numbers. The first count[n] of matrix n are chosen, ascending; what
            follows names rows that were not chosen, none twice.
        count: (N,) int64, how many rows of each matrix are chosen on this rank (after `admit`: admitted).
        count_by_rank: (W, N) int64, how many rows each rank has chosen; alike on all ranks, also after `admit`.
        ratio: (N, K), the score of each row of `index` over the lowest score chosen of its matrix, which makes
            rows of different matrices comparable.
        age: (N, K) int32, for how many steps each row of `index` has been waiting since it was first refused.
    """

    index: Tensor
    count: Tensor
    count_by_rank: Tensor
    ratio: Tensor
    age: Tensor

    @classmethod
    def unranked(cls, index: Tensor, count: Tensor, count_by_rank: Tensor) -> RowSelection:
        """A choice in which no row is stronger than another and none has waited."""
        ratio = torch.ones(index.shape, device=index.device)
        age = torch.zeros(index.shape, dtype=torch.int32, device=index.device)
        return cls(index, count, count_by_rank, ratio, age)

    def valid(self) -> Tensor:
        """(N, K) bool: which entries of `index` are chosen rows."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.count[:, None]


@dataclass(frozen=True)
class Rows:
    """Rows in a buffer, and where each row of a selection lies in it.

    Attributes:
        values: (S, C), the rows.
        slot: (N, K) int64, 0 <= slot < S: the place of every entry of `RowSelection.index`. Entries past the
            count have a place too, where nothing that is needed lies: what is written there does not matter.
            Of a matrix that another rank sends, all entries are -1 where rows are to be written: nothing is.
    """

    values: Tensor
    slot: Tensor


def overflowing_rows(momentum: Sequence[Tensor], gradients: Sequence[Tensor | None], *, maximize: bool) -> Tensor:
    """(N, R) bool: the rows that `accumulate_` would leave out, whose sum as it would be stored is not finite.

    Where the tensors differ in rows, R is the most of them, and what is past a tensor's last row is False.
    """
    rows = []
    for state, gradient in zip(momentum, gradients, strict=True):
        if gradient is None:
            rows.append(torch.zeros(state.shape[0], dtype=torch.bool, device=state.device))
        else:
            rows.append(~_sum(state, -gradient if maximize else gradient).isfinite().all(dim=1))
    return _stacked(rows)


def _sum(state: Tensor, gradient: Tensor) -> Tensor:
    return (gradient.to(accumulation_dtype(state.dtype, gradient.dtype)) + state).to(state.dtype)


def accumulate_(
    momentum: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    left_out: Tensor,
    *,
    maximize: bool,
    proceed: Tensor,
) -> Tensor:
    """Adds the gradients to the momentum, counts the rows that were left out, and returns the row scores.

    A row whose sum holds a non-finite value is left as it is. Its score is `SKIPPED_SCORE`.

    Args:
        momentum: N tensors (R, C), any float dtype and strides; changed in place.
        gradients: N tensors (R, C), any float dtype and strides, or None (nothing to add).
        left_out: (N,) int64, increased by the number of rows of each gradient that were left out.
        maximize: subtract the gradients instead.
        proceed: 0-dim bool; where false nothing is added.

    Returns:
        (N, R) scores: the L1 norm of each local row of the momentum as stored, in fp32 (fp64 for fp64). Where the
        tensors differ in rows, R is the most of them, and what is past a tensor's last row is 0.
    """
    scores = []
    for matrix, (state, gradient) in enumerate(zip(momentum, gradients, strict=True)):
        dtype = accumulation_dtype(state.dtype)
        finite = None
        if gradient is not None:
            total = _sum(state, -gradient if maximize else gradient)
            # Of the sum as it would be stored: a finite gradient can overflow a half-precision momentum.
            finite = total.isfinite().all(dim=1)
            state.copy_(torch.where((finite & proceed)[:, None], total, state))
        # The contiguous copy of a strided row makes its sum independent of the strides.
        score = state.to(dtype).abs().contiguous().sum(dim=1)
        if finite is not None:
            score = torch.where(finite, score, SKIPPED_SCORE)
            left_out[matrix] += (~finite).sum()
        scores.append(score)
    return _stacked(scores)


def _stacked(values: Sequence[Tensor]) -> Tensor:
    """(N, R) of N tensors (R,), zero where another one is longer."""
    if len(set(map(len, values))) == 1:
        return torch.stack(list(values))
    return torch.nn.utils.rnn.pad_sequence(list(values), batch_first=True)


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
    """Writes the chosen rows to their slots, in the wire's dtype, and decays them in the momentum.

    With `nesterov` the row written is gradient + decay * momentum (a row of the gradient that is not finite counts as
    zero). The decay is the error feedback: rows not chosen keep their momentum whole.

    Args:
        momentum: N tensors (R, C); the chosen rows are multiplied by `decay` in place, rounded once.
        gradients: N tensors (R, C) or None; read only with `nesterov`.
        selection: the rows admitted.
        rows: where they go; `rows.values` is written.
        decay: factor of the error feedback.
        nesterov: write the look-ahead row.
        maximize: the gradients were subtracted.
    """
    valid = selection.valid()
    for matrix, (state, gradient) in enumerate(zip(momentum, gradients, strict=True)):
        offered = min(selection.index.shape[1], state.shape[0])
        index, slot = selection.index[matrix, :offered], rows.slot[matrix, :offered]
        stored = state.index_select(0, index)
        kept = taken = stored.to(accumulation_dtype(stored.dtype))
        decayed = kept * decay
        if nesterov:
            taken = decayed
            if gradient is not None:
                ahead = gradient.index_select(0, index).to(kept.dtype)
                finite = ahead.isfinite().all(dim=1, keepdim=True)
                taken = torch.where(finite, -ahead if maximize else ahead, 0) + decayed
        _write_(rows.values, slot, taken.to(rows.values.dtype))
        chosen = valid[matrix, :offered, None]
        state.index_copy_(0, index, torch.where(chosen, decayed.to(state.dtype), stored))


def _write_(values: Tensor, slot: Tensor, rows: Tensor) -> None:
    """Writes the (K, C) rows of one matrix to their slots, or, if these are -1, leaves the values as they are."""
    if not len(values):
        return
    place = slot.clamp(min=0)
    kept = values.index_select(0, place)
    values.index_copy_(0, place, torch.where(slot[:, None] < 0, kept, rows))


def sums_of_squares(rows: Rows, selection: RowSelection) -> Tensor:
    """(N, K): the sum of squares of every chosen row as received, in fp32 (fp64 for fp64); 0 past the count."""
    num_matrices, slots = rows.slot.shape
    values = rows.values.index_select(0, rows.slot.flatten())
    values = values.to(accumulation_dtype(values.dtype))
    sums = values.square_().sum(dim=1).view(num_matrices, slots)
    return torch.where(selection.valid(), sums, 0)


def update_second_moment_(
    second_moment: Sequence[Tensor], selection: RowSelection, mean: Tensor, *, beta2: float | Tensor
) -> Tensor:
    """Moves the second moment of the chosen rows towards `mean` and returns its value for them.

    Args:
        second_moment: N tensors (R, 1) fp32; v = beta2 * v + (1 - beta2) * mean for chosen rows alone.
        selection: which rows are chosen.
        mean: (N, K), the mean square of each row.
        beta2: decay of the second moment.

    Returns:
        (N, K) in the dtype of `mean`: v of every entry of `selection.index`; 0 where there is no row.
    """
    valid = selection.valid()
    values = torch.zeros_like(mean)
    for matrix, state in enumerate(second_moment):
        offered = min(selection.index.shape[1], state.shape[0])
        index = selection.index[matrix, :offered]
        old = state[:, 0].index_select(0, index)
        new = old * beta2 + mean[matrix, :offered].to(old.dtype) * (1 - beta2)
        new = torch.where(valid[matrix, :offered], new, old)
        state[:, 0].index_copy_(0, index, new)
        values[matrix, :offered] = new
    return values


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
    """Decays the parameters and subtracts the chosen rows, computed in fp32 and rounded once.

    Args:
        parameters: N tensors (R, C), any float dtype and strides; changed in place.
        rows: the orthogonalized rows as they came back.
        selection: which rows they are.
        row_scale: (N, K), the factor of every row besides `scale` and the learning rate.
        learning_rate: step size; the decay is 1 - learning_rate * weight_decay (the base rate, unscaled).
        weight_decay: decoupled weight decay.
        active: (N,) bool; a matrix that is not active keeps its bits.
        scale: a factor of all rows.
        cautious: decay only where update and weight agree in sign (Chen et al. 2025, cautious weight decay).
    """
    valid = selection.valid()
    row_scale = row_scale * scale
    decay = learning_rate * weight_decay
    for matrix, parameter in enumerate(parameters):
        offered = min(selection.index.shape[1], parameter.shape[0])
        weight = parameter.to(accumulation_dtype(parameter.dtype, rows.values.dtype))
        received = rows.values.index_select(0, rows.slot[matrix, :offered]).to(weight.dtype)
        scaled = received * (row_scale[matrix, :offered, None].to(weight.dtype) * learning_rate)
        scaled = torch.where(valid[matrix, :offered, None], scaled, 0)
        update = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
        update.index_copy_(0, selection.index[matrix, :offered], scaled)
        decayed = weight * (1 - decay)
        if cautious:
            decayed = torch.where(update.sign() * weight.sign() > 0, decayed, weight)
        parameter.copy_(torch.where(active[matrix], (decayed - update).to(parameter.dtype), parameter))
