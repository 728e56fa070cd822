"""Newton-Schulz orthogonalization, written on the Gram matrix in segments.

One step multiplies X (m x n, m <= n) by a polynomial of its Gram matrix, ``X <- (a I + b G + c G^2) X`` with
``G = X X^T``: every singular value s becomes ``a s + b s^3 + c s^5``, the singular vectors stay. Several
steps are products of polynomials of one G, so they can be worked out on the small m x m matrix and multiplied
onto X once. All of it is therefore one line::

    for segment in segments:
        x = segment(x @ x.mT) @ x

A segment of one step is the classical iteration, a longer one is Gram-Newton-Schulz, and the next segment is
its restart. Replacing ``x @ x.mT`` by its sum over ranks gives the version for column-sharded matrices.

Legend: B matrices, m rows, n columns, X a matrix, G its Gram matrix, Q the polynomial with Q X the result.

Sources: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"
(https://kellerjordan.github.io/posts/muon); Amsel, Persson, Musco, Gower 2025, "The Polar Express"
(arXiv:2505.16932); Zhang, Amsel, Chen, Dao 2026, "Gram Newton-Schulz"
(https://dao-ailab.github.io/blog/2026/gram-newton-schulz), from which the restart comes.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import ClassVar, Final, Literal, Protocol, SupportsIndex

import torch
from torch import Tensor

from dion_core.newton_schulz_kernels.listing import list_products, parts_of
from dion_core.step_pairs import Coefficients

QUINTIC: Final[tuple[Coefficients, ...]] = ((3.4445, -4.7750, 2.0315),) * 5
"""The quintic of Jordan et al. 2024, five times: takes 0.003 to 1 into 0.68 to 1.21."""

_SAFETY: Final = 1.05  # each step is optimal up to a sharp edge, and rounding that passes it would diverge

POLAR_EXPRESS: Final[tuple[Coefficients, ...]] = tuple(
    (a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
)
"""The first five steps of Amsel et al. 2025, each taken at s / 1.05: takes 0.003 to 1 into 0.84 to 1.13."""

_RESTART: Final = 2  # steps before it

_COMPUTE_DTYPES: Final = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Orthogonalizer(Protocol):
    """Maps each matrix to (nearly) its orthogonal polar factor.

    An implementation does not modify its input, gives each matrix a result independent of the rest of the
    batch, keeps zero rows zero and commutes with row permutations up to rounding. Its ``repr`` enters the
    plan that ranks compare, so it must be the same on every rank. It may offer ``segments(rows, columns)`` as
    `NewtonSchulz` does; a transport that sums Gram matrices over ranks needs that. On a GPU its
    `of_rows(rows, place, spare)` is called in place of it where it has one: it may overwrite `rows`, and `spare`
    is memory that it may overwrite and return its result in, or None. What `preparations` returns is called while
    an optimizer is built, by several threads, and `workspace` for reports.
    """

    def __call__(self, matrices: Tensor, /) -> Tensor:
        """Returns the orthogonalized matrices, (B, m, n) in the dtype and on the device of ``matrices``."""
        ...


@dataclass(frozen=True)
class Segment:
    """The steps between two computations of the Gram matrix: a polynomial of it."""

    coefficients: tuple[Coefficients, ...]

    def __call__(self, gram: Tensor) -> Tensor:
        """Returns Q, (m, m) or (B, m, m) like ``gram``, such that Q X is X after all steps of the segment.

        With q = a I + b G + c G^2 a step is Q <- Q q, G <- q^2 G; all factors commute. The a I enter as
        ``beta``, in the wide accumulator of a product, instead of being rounded together with the rest of q.

        Args:
            gram: X X^T of the segment's input, (m, m) or (B, m, m) in the compute dtype. Not modified.
        """
        polynomial: Tensor | None = None
        for step, (a, b, c) in enumerate(self.coefficients, start=1):
            rest = _multiply_add(gram, gram, gram, beta=b, alpha=c)  # q - a I
            if step < len(self.coefficients):
                gram_rest = _multiply_add(gram, gram, rest, beta=a)
                gram = _multiply_add(gram_rest, rest, gram_rest, beta=a)
            if polynomial is None:
                polynomial = rest
                polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                polynomial = _multiply_add(polynomial, polynomial, rest, beta=a)
        assert polynomial is not None, "a segment has at least one step"
        return polynomial


def _checked_restart(value: object, steps: int) -> int | Literal["auto"] | None:
    """`restart_after` of `NewtonSchulz`, any integer as an int."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return "auto" if value else None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool) and 1 <= operator.index(value) <= steps:
        return operator.index(value)
    raise ValueError(f"restart_after must be 'auto', None or 1 to {steps}, got {value!r}")


@dataclass(frozen=True)
class NewtonSchulz:
    """An `Orthogonalizer` that applies a composition of odd quintics to the singular values.

    Square matrices take one-step segments, since the Gram recurrence saves nothing there. Others take two: the
    recurrence amplifies the rounding errors of G, most of all in its null space, and a fresh Gram matrix in between
    keeps that harmless. (Without one, a matrix of rank 1 comes out of float16 with singular values of 9 to 45.)

    The kernels for GPUs make four products of what takes five, for the last two steps of a segment (module
    `step_pairs`). With ``restart_after="auto"`` they take segments of two steps, and of three or one what an odd number
    of steps begins with: three if the matrix is not square.

    Attributes:
        coefficients: (a, b, c) of each step, first to last.
        restart_after: how many steps the first of the two segments of a non-square matrix has; "auto" for 2, and
            for the segments that suit the kernels where they run; ``None`` for one-step segments (the classical
            iteration) at every shape.
        compute_dtype: Of the products, after normalization. ``None`` chooses: float64 for float64 matrices,
            else float16 on CUDA and float32 elsewhere. bfloat16 has to be asked for, with
            ``restart_after=None``: it makes the Gram recurrence overshoot (singular values of 1.35 and more).

    Raises:
        ValueError: A field is out of its range, or bfloat16 is combined with a ``restart_after``.
    """

    coefficients: tuple[Coefficients, ...] = POLAR_EXPRESS
    restart_after: int | Literal["auto"] | None = "auto"
    compute_dtype: torch.dtype | None = None

    replayable: ClassVar[bool] = True
    """What it launches for a shape is the same at every call: see `replay`."""

    def __post_init__(self) -> None:
        # Lists and integers, as a configuration file gives them, must not change the hash or the repr.
        steps = tuple((float(a), float(b), float(c)) for a, b, c in self.coefficients)
        object.__setattr__(self, "coefficients", steps)
        if not steps:
            raise ValueError(f"coefficients must have at least one step (a, b, c), got {self.coefficients!r}")
        if not all(math.isfinite(number) for step in steps for number in step):
            raise ValueError(f"coefficients must be finite, got {self.coefficients!r}")
        object.__setattr__(self, "restart_after", _checked_restart(self.restart_after, len(steps)))
        if self.compute_dtype not in _COMPUTE_DTYPES:
            raise ValueError(f"compute_dtype must be one of {_COMPUTE_DTYPES}, got {self.compute_dtype!r}")
        if self.compute_dtype == torch.bfloat16 and self.restart_after is not None:
            raise ValueError(
                f"compute_dtype torch.bfloat16 is allowed only with restart_after=None (one-step segments), "
                f"got restart_after={self.restart_after!r}"
            )

    def __repr__(self) -> str:
        """The known coefficients by name, so that a plan which ranks compare stays readable."""
        named = {POLAR_EXPRESS: "POLAR_EXPRESS", QUINTIC: "QUINTIC"}
        coefficients = named.get(self.coefficients, self.coefficients)
        return (
            f"NewtonSchulz(coefficients={coefficients}, restart_after={self.restart_after}, "
            f"compute_dtype={self.compute_dtype})"
        )

    def segments(self, rows: int, columns: int) -> tuple[Segment, ...]:
        """Returns what to run on the Gram matrices of a (rows, columns) matrix, first to last."""
        if self.restart_after is None or rows == columns:
            return tuple(Segment((step,)) for step in self.coefficients)
        first = _RESTART if self.restart_after == "auto" else self.restart_after
        parts = (self.coefficients[:first], self.coefficients[first:])
        return tuple(Segment(part) for part in parts if part)

    def kernel_segments(self, rows: int, columns: int) -> tuple[tuple[Coefficients, ...], ...]:
        """Returns the steps of each segment as the kernels take them, first to last."""
        if self.restart_after != "auto":
            return tuple(segment.coefficients for segment in self.segments(rows, columns))
        rest, parts = self.coefficients, list[tuple[Coefficients, ...]]()
        while rest:
            size = 3 if rows != columns and parts and len(rest) == 3 else 2
            rest, part = rest[:-size], rest[-size:]
            parts.insert(0, part)
        return tuple(parts)

    def __call__(self, matrices: Tensor) -> Tensor:
        """Returns each matrix with its singular values s replaced by p(s / Frobenius norm).

        p is the composition of all steps. The scale of a matrix does not matter; zero matrices and zero rows
        stay exactly zero. On a CPU the bits of a result depend on its own matrix alone, not on batch size,
        position, strides or alignment.

        Args:
            matrices: (B, m, n), any floating dtype, device and strides; B, m, n may be 0. Not modified.

        Returns:
            (B, m, n), contiguous, in new storage, in the dtype and on the device of ``matrices``.

        Raises:
            ValueError: ``matrices`` is not three-dimensional or not floating.
        """
        if matrices.dim() != 3 or not matrices.dtype.is_floating_point:
            raise ValueError(f"matrices must be floating (B, m, n), got {matrices.dtype} {[*matrices.shape]}")
        if matrices.numel() == 0:
            return torch.zeros_like(matrices, memory_format=torch.contiguous_format)
        # Inside autocast the products would be bfloat16 in spite of compute_dtype.
        with torch.autocast(matrices.device.type, enabled=False):
            if matrices.device.type == "cpu":
                # Batched CPU products change bits with the batch size and with the alignment of the storage.
                return torch.stack([self._orthogonalize(matrix) for matrix in matrices.unbind()])
            kernels = _kernels_for(matrices, matrices.shape[1], matrices.shape[2], self.compute_dtype)
            if kernels is None:
                return self._orthogonalize(matrices)
            result: Tensor = kernels.orthogonalize(matrices, self.kernel_segments(*matrices.shape[1:]))
            return result

    def of_rows(self, rows: Tensor, place: Tensor, spare: Tensor | None = None) -> Tensor:
        """Returns what `__call__` does of matrices whose rows lie in a buffer, which spares a copy on a GPU.

        Args:
            rows: (S, C), contiguous, floating. May be overwritten.
            place: (B, R) int64: the row of the buffer that is each row of each matrix; -1 for a row of zeros.
            spare: contiguous, what may be overwritten too, so that less memory is needed; None if there is nothing.

        Returns:
            (B, R, C) in the dtype and on the device of ``rows``, in new storage or in that of ``spare``.
        """
        shape = (*place.shape, rows.shape[1])
        kernels = _kernels_for(rows, shape[1], shape[2], self.compute_dtype)
        if kernels is None or 0 in (*shape, len(rows)):
            matrices = torch.nn.functional.pad(rows, (0, 0, 0, 1))[place]  # -1 is the row of zeros
            return self(matrices)
        result: Tensor = kernels.orthogonalize_rows(rows, place, self.kernel_segments(*shape[1:]), spare)
        return result

    def preparations(self, rows: Tensor, batch: int, num_rows: int) -> list[Callable[[], None]]:
        """What compiles the kernels of `of_rows`, which takes seconds the first time. For arguments see `workspace`."""
        shape = (batch, num_rows, rows.shape[1])
        kernels = _kernels_for(rows, *shape[1:], self.compute_dtype)
        if kernels is None or 0 in shape:
            return []
        segments = self.kernel_segments(*shape[1:])
        work: list[Callable[[], None]] = kernels.preparations(*shape, segments, dtype=rows.dtype, device=rows.device)
        return work

    def workspace(self, rows: Tensor, batch: int, num_rows: int) -> int:
        """Returns how many bytes `of_rows` has allocated at most at a time, its result included; 0 if not known.

        Args:
            rows: (S, C), such as those that `of_rows` is given.
            batch: B.
            num_rows: R.
        """
        kernels = _kernels_for(rows, num_rows, rows.shape[1], self.compute_dtype)
        if kernels is None:
            return 0
        shape = (batch, num_rows, rows.shape[1])
        # Two copies, should no other buffer have room for one; and a result that is cast.
        cast = math.prod(shape) * rows.itemsize if rows.itemsize > 2 else 0
        return kernel_workspace(*shape, self.kernel_segments(*shape[1:]), copies=2) + cast

    def _orthogonalize(self, matrices: Tensor) -> Tensor:
        """Does the work of `__call__` for (m, n) or (B, m, n), none of them 0, with torch's own products."""
        rows, columns = matrices.shape[-2:]
        x = _normalize(matrices)
        if self.compute_dtype is not None:
            x = x.to(self.compute_dtype)
        elif x.dtype == torch.float32 and x.device.type == "cuda":
            x = x.to(torch.float16)
        x = x.mT if rows > columns else x  # the Gram matrix of the shorter side
        for segment in self.segments(rows, columns):
            x = segment(x @ x.mT) @ x
        x = x.mT if rows > columns else x
        # Without `copy` the memory format would be ignored wherever the dtype is already right.
        return x.to(matrices.dtype, copy=True, memory_format=torch.contiguous_format)


_BY_NAME: Final[dict[str, Orthogonalizer]] = {
    "auto": NewtonSchulz(),
    "polar_express": NewtonSchulz(),
    "quintic": NewtonSchulz(coefficients=QUINTIC),
}

ORTHOGONALIZERS: Final = tuple(_BY_NAME)
"""The names that `orthogonalizer` knows."""


def orthogonalizer(name_or_object: str | Orthogonalizer) -> Orthogonalizer:
    """Returns the orthogonalizer of that name; a callable object is returned as it is.

    Args:
        name_or_object: "auto" or "polar_express" (`NewtonSchulz()`), "quintic" (`QUINTIC`), or an object.

    Raises:
        ValueError: An unknown name, or neither a name nor a callable object.
    """
    if isinstance(name_or_object, str) and name_or_object in _BY_NAME:
        return _BY_NAME[name_or_object]
    # A class is callable too, but makes an object, not matrices: NewtonSchulz instead of NewtonSchulz().
    if callable(name_or_object) and not isinstance(name_or_object, type):
        return name_or_object
    allowed = ", ".join(repr(name) for name in _BY_NAME)
    raise ValueError(f"orthogonalizer must be {allowed} or a callable object, got {name_or_object!r}")


def kernel_workspace(
    batch: int, rows: int, columns: int, segments: Sequence[Sequence[Coefficients]], *, copies: int
) -> int:
    """Bytes that the kernels allocate for (B, R, C) matrices, of which so many copies find no room in other buffers."""
    m, n = sorted((rows, columns))
    buffers = list_products(segments).buffers * parts_of(batch, m, n)[0]
    return 2 * (copies * batch * m * n + buffers * m**2) + 16 * batch * rows


def _normalize(matrices: Tensor) -> Tensor:
    """Returns each matrix over its Frobenius norm, (..., m, n) float32 (float64 for float64), in new storage.

    The largest entry is divided out first, so that no square overflows or vanishes at any scale (the largest
    row norm would serve as well, but at 1e30 cannot itself be computed). That leaves an entry of exactly 1,
    hence a norm of at least 1 unless the matrix is zero.
    """
    wide = torch.float64 if matrices.dtype == torch.float64 else torch.float32
    # Contiguous, since the order of a reduction follows the strides.
    x = matrices.contiguous().to(wide)
    largest: Tensor = torch.linalg.vector_norm(x, ord=math.inf, dim=(-2, -1), keepdim=True)
    x = x / largest.masked_fill(largest == 0, 1)
    # By rows, then over rows: a single float32 sum over a large matrix is off by 1e-3 and more on a CPU.
    row_norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(row_norms, dim=-2, keepdim=True)
    return x / norm.clamp(min=1)


def _kernels_for(values: Tensor, rows: int, columns: int, compute_dtype: torch.dtype | None) -> ModuleType | None:
    """The module that does the same in kernels of its own, in float16; None where it cannot be used."""
    if values.device.type != "cuda" or values.dtype == torch.float64:
        return None
    if compute_dtype not in (None, torch.float16):
        return None
    kernels = _import_kernels()
    usable = kernels is not None and kernels.runs_on(values.device, rows, columns)
    return kernels if usable else None


@lru_cache(maxsize=1)
def _import_kernels() -> ModuleType | None:
    """The module with the kernels, or None where triton is missing or not the version they were tried with."""
    try:
        import triton
    except ImportError:
        return None
    if not triton.__version__.startswith("3.6."):
        # The kernels use an interface of Triton that may still change.
        warnings.warn(
            f"Newton-Schulz falls back to torch's products, which take 1.5 to 2 times as long: its kernels need "
            f"triton 3.6, not {triton.__version__}",
            stacklevel=4,
        )
        return None
    from dion_core.newton_schulz_kernels import iteration

    return iteration


def _multiply_add(base: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """Returns ``beta * base + alpha * left @ right`` in one product, for one matrix or a batch of them."""
    multiply = torch.addmm if base.dim() == 2 else torch.baddbmm
    return multiply(base, left, right, beta=beta, alpha=alpha)
