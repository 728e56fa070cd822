"""One-process reference of every optimizer in float64, which all distributed results are compared with.

Written from the formulas of the algorithms, row by row in plain loops, to be obviously right rather than
fast. It shares no code with the package under test and never imports it, so that no mistake is made twice.

Everything is float64: rows whose scores differ by less than a rounding of the dtype under test may be chosen
differently there. Small random cases in fp32 do not come that close; ties are tested with small whole
numbers, which are exact.

Legend: R rows and C columns of a matrix, W world size, k chosen rows.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

ALL_ROWS = ("muon", "normuon")
TOP_ROWS = ("dion2", "nordion2")
NORMALIZED = ("normuon", "nordion2")
ELEMENTWISE = ("adamw", "lion")
NORMALIZATION_EPSILON = 1e-8

# Polar Express, degree 5: Amsel, Persson, Musco, Gower, "The Polar Express" (2025), arXiv 2505.16932.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
SAFETY = 1.05


@dataclass
class Options:
    """Hyperparameters of one parameter. Not frozen: a test may change `lr` between steps, as a schedule does.

    Attributes:
        scope: "global" or "local"; ignored by Muon and NorMuon, which take all rows.
        scale: "spectral_norm", "rms_norm" or None.
        nonfinite: "rows" (leave out the rows with a non-finite gradient) or "skip" (leave out the step).
        wire: Rounds float64 values to those of the wire dtype (still as float64); None rounds nothing.
            Applied to the chosen rows on their way out and to the orthogonalized rows on their way back.
    """

    algorithm: str
    lr: float = 0.02
    momentum: float = 0.95
    beta2: float = 0.95
    weight_decay: float = 0.01
    fraction: float = 0.25
    scope: str = "global"
    scale: str | None = "spectral_norm"
    nesterov: bool = False
    cautious_weight_decay: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    maximize: bool = False
    nonfinite: str = "rows"
    wire: Callable[[Array], Array] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a misspelt choice: it would silently compare with another algorithm."""
        allowed: dict[str, tuple[str | None, ...]] = {
            "algorithm": ALL_ROWS + TOP_ROWS + ELEMENTWISE,
            "scope": ("global", "local"),
            "scale": ("spectral_norm", "rms_norm", None),
            "nonfinite": ("rows", "skip"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}; allowed: {values}")
        if (self.nesterov or self.cautious_weight_decay) and self.algorithm not in ALL_ROWS:
            raise ValueError(f"nesterov and cautious_weight_decay are for {ALL_ROWS}, not {self.algorithm!r}")


def rows_to_select(fraction: float, rows: int) -> int:
    """Number of rows that `fraction` of `rows` stands for: rounded up, at least one, none of none.

    The term 1e-9 * rows keeps whole products whole: 0.07 * 100 is 7.000000000000001 in floating point.
    """
    if rows == 0:
        return 0
    return max(1, math.ceil(fraction * rows - 1e-9 * rows))


def chunk_shards(rows: int, world_size: int) -> list[tuple[int, int]]:
    """(row offset, rows) of every rank by the rule of `torch.chunk` and DTensor's `Shard(0)`.

    Every rank takes ceil(R / W) rows until they are used up: 18 rows over 8 ranks are 3, 3, 3, 3, 3, 3, 0, 0.
    Empty shards stand at offset R.
    """
    most = math.ceil(rows / world_size)
    shards = []
    for rank in range(world_size):
        start = min(rank * most, rows)
        end = min(start + most, rows)
        shards.append((start, end - start))
    return shards


def polar_express(matrix: Array) -> Array:
    """The matrix (any shape) with its singular values moved close to 1 by five Polar Express polynomials.

    Newton-Schulz computes an odd polynomial of the matrix, X -> a X + b (X X^T) X + c (X X^T)^2 X, which is
    the scalar polynomial a s + b s^3 + c s^5 of its singular values. Here these are simply computed.
    A zero matrix stays zero, and so does a zero row.
    """
    if not matrix.any():
        return np.zeros_like(matrix)
    # Scaled by the largest entry first, as squares of very small or very large entries leave float64.
    matrix = matrix / np.abs(matrix).max()
    left, values, right = np.linalg.svd(matrix / np.linalg.norm(matrix), full_matrices=False)
    for a, b, c in POLAR_EXPRESS:
        a, b, c = a / SAFETY, b / SAFETY**3, c / SAFETY**5
        values = a * values + b * values**3 + c * values**5
    result: Array = (left * values) @ right
    for row in range(len(matrix)):
        if not matrix[row].any():
            result[row] = 0.0  # exactly: the decomposition may leave a rounding there
    return result


def update_scale(scale: str | None, rows: int, columns: int) -> float:
    """Factor of the update by the true global shape; fan-out is the rows and fan-in the columns."""
    if scale == "spectral_norm":
        return math.sqrt(rows / columns)
    if scale == "rms_norm":
        return 0.2 * math.sqrt(max(rows, columns))
    return 1.0


def _best_rows(scores: Sequence[float], candidates: Iterable[int], count: int) -> list[int]:
    """The `count` candidates of highest score, or all if they are fewer; ties to the lower row."""
    return sorted(candidates, key=lambda row: (-scores[row], row))[:count]


def _copy_of_gradient(gradient: npt.ArrayLike, maximize: bool) -> Array:
    """The gradient to descend, in float64 and in memory of its own."""
    copy = np.array(gradient, dtype=np.float64)
    return -copy if maximize else copy


class ReferenceMatrix:
    """One whole matrix parameter under Muon, NorMuon, Dion2 or NorDion2.

    Attributes:
        weight: (R, C) float64.
        momentum: (R, C) float64.
        second_moment: (R, 1) float64 for NorMuon and NorDion2, else None.
        held: the rows of every rank, for scope "local"; they may change between steps.
    """

    def __init__(
        self, weight: npt.ArrayLike, options: Options, shards: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Starts from a copy of `weight` (R, C) and zero state.

        Args:
            weight: The whole matrix.
            options: Hyperparameters, read anew in every step.
            shards: (row offset, rows) of every rank, used by scope "local" only. None: one shard.
        """
        if options.algorithm not in ALL_ROWS + TOP_ROWS:
            raise ValueError(f"{options.algorithm!r} is not a matrix algorithm")
        self.options = options
        self.weight: Array = np.array(weight, dtype=np.float64)
        self.rows, self.columns = self.weight.shape
        shards = [(0, self.rows)] if shards is None else shards
        self.held: list[Sequence[int]] = [range(offset, offset + rows) for offset, rows in shards]
        if sorted(row for rows in self.held for row in rows) != list(range(self.rows)):
            raise ValueError(f"shards {shards} do not hold each of {self.rows} rows once")
        self.momentum: Array = np.zeros_like(self.weight)
        self.second_moment: Array | None = None
        if options.algorithm in NORMALIZED:
            self.second_moment = np.zeros((self.rows, 1))

    def step(self, gradient: npt.ArrayLike | None) -> set[int]:
        """Updates weight and state, and returns the applied global rows.

        Args:
            gradient: (R, C) of the whole matrix; zero where a rank had none. None where no rank had one, and
                for a step that is skipped for the whole model: nothing moves.
        """
        if gradient is None:
            return set()
        gradient = _copy_of_gradient(gradient, self.options.maximize)
        finite = [bool(np.isfinite(gradient[row]).all()) for row in range(self.rows)]
        if self.options.nonfinite == "skip" and not all(finite):
            return set()
        for row in range(self.rows):
            if not finite[row]:
                gradient[row] = 0.0
            self.momentum[row] += gradient[row]
        chosen = self._choose(finite)
        update = self._orthogonalize(gradient, chosen)
        for row in chosen:  # error feedback; rows that were not chosen keep their momentum whole
            self.momentum[row] *= self.options.momentum
        if self.second_moment is not None:
            update = self._normalize(update, chosen, self.second_moment)
        self._move_weight(update, chosen)
        return set(chosen)

    def _choose(self, finite: Sequence[bool]) -> list[int]:
        """The chosen global rows, ascending. A row with a non-finite gradient comes after all others."""
        options = self.options
        if options.algorithm in ALL_ROWS:
            return list(range(self.rows))
        scores = [float(np.abs(self.momentum[row]).sum()) if finite[row] else -math.inf for row in range(self.rows)]
        if options.scope == "global":
            return sorted(_best_rows(scores, range(self.rows), rows_to_select(options.fraction, self.rows)))
        most_rows = math.ceil(self.rows / len(self.held))
        count = rows_to_select(options.fraction, most_rows)
        chosen: list[int] = []
        for rows in self.held:
            chosen += _best_rows(scores, rows, count)
        return sorted(chosen)

    def _orthogonalize(self, gradient: Array, chosen: Sequence[int]) -> Array:
        """U (k, C): the chosen rows of the momentum, orthogonalized, as they are received."""
        taken = np.zeros((len(chosen), self.columns))
        for slot, row in enumerate(chosen):
            taken[slot] = self.momentum[row]
            if self.options.nesterov:
                taken[slot] = gradient[row] + self.options.momentum * self.momentum[row]
        if self.options.wire is None:
            return polar_express(taken)
        return self.options.wire(polar_express(self.options.wire(taken)))

    def _normalize(self, update: Array, chosen: Sequence[int], second_moment: Array) -> Array:
        """U (k, C) with every row over the root of its second moment, at the Frobenius norm it had.

        Only the second moments of chosen rows move.
        """
        beta2 = self.options.beta2
        normalized = np.zeros_like(update)
        for slot, row in enumerate(chosen):
            mean_square = float((update[slot] ** 2).mean())
            second_moment[row, 0] = beta2 * second_moment[row, 0] + (1 - beta2) * mean_square
            normalized[slot] = update[slot] / (math.sqrt(second_moment[row, 0]) + NORMALIZATION_EPSILON)
        norm_after = float(np.linalg.norm(normalized))
        if norm_after == 0.0:
            return normalized  # a zero update stays zero
        result: Array = normalized * (float(np.linalg.norm(update)) / norm_after)
        return result

    def _move_weight(self, update: Array, chosen: Sequence[int]) -> None:
        """Decays all rows at the base learning rate, then moves the chosen by the scaled update (k, C)."""
        options = self.options
        kept = 1 - options.lr * options.weight_decay
        scale = update_scale(options.scale, self.rows, self.columns)
        update_of = {row: update[slot] for slot, row in enumerate(chosen)}
        for row in range(self.rows):
            if options.cautious_weight_decay:  # only where the update and the weight agree in sign
                agree = update_of[row] * self.weight[row] > 0
                self.weight[row] = np.where(agree, kept * self.weight[row], self.weight[row])
            else:
                self.weight[row] *= kept
            if row in update_of:
                self.weight[row] -= options.lr * scale * update_of[row]


class ReferenceElementwise:
    """One parameter of any shape under AdamW or Lion.

    AdamW: Loshchilov, Hutter (2019), arXiv 1711.05101, bias-corrected, as `torch.optim.AdamW`.
    Lion: Chen et al. (2023), arXiv 2302.06675.

    Attributes:
        weight: Float64.
        first_moment: Of the weight's shape (Lion's momentum).
        second_moment: Of the weight's shape for AdamW, None for Lion.
        num_steps: Steps that were taken; those without a gradient, or skipped, do not count.
    """

    def __init__(self, weight: npt.ArrayLike, options: Options) -> None:
        """Copies `weight`."""
        if options.algorithm not in ELEMENTWISE:
            raise ValueError(f"{options.algorithm!r} is not an elementwise algorithm")
        self.options = options
        self.weight: Array = np.array(weight, dtype=np.float64)
        self.first_moment: Array = np.zeros_like(self.weight)
        self.second_moment: Array | None = None
        if options.algorithm == "adamw":
            self.second_moment = np.zeros_like(self.weight)
        self.num_steps = 0

    def step(self, gradient: npt.ArrayLike | None) -> None:
        """Updates weight and state; nothing moves for None. Non-finite elements count as zero."""
        if gradient is None:
            return
        options = self.options
        gradient = _copy_of_gradient(gradient, options.maximize)
        finite = np.isfinite(gradient)
        if options.nonfinite == "skip" and not finite.all():
            return
        gradient = np.where(finite, gradient, 0.0)
        self.num_steps += 1
        self.weight *= 1 - options.lr * options.weight_decay
        if self.second_moment is None:
            self._step_lion(gradient)
        else:
            self._step_adamw(gradient, self.second_moment)

    def _step_adamw(self, gradient: Array, second_moment: Array) -> None:
        beta1, beta2 = self.options.betas
        self.first_moment[...] = beta1 * self.first_moment + (1 - beta1) * gradient
        second_moment[...] = beta2 * second_moment + (1 - beta2) * gradient**2
        mean = self.first_moment / (1 - beta1**self.num_steps)
        mean_square = second_moment / (1 - beta2**self.num_steps)
        self.weight -= self.options.lr * mean / (np.sqrt(mean_square) + self.options.epsilon)

    def _step_lion(self, gradient: Array) -> None:
        beta1, beta2 = self.options.betas
        self.weight -= self.options.lr * np.sign(beta1 * self.first_moment + (1 - beta1) * gradient)
        self.first_moment[...] = beta2 * self.first_moment + (1 - beta2) * gradient
