"""Newton-Schulz in kernels of its own, on a Hopper GPU, against float64 and against what a step promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dion_core.newton_schulz import POLAR_EXPRESS, QUINTIC, NewtonSchulz
from dion_core.newton_schulz_kernels.listing import parts_of
from tests.no_sync import no_sync

pytestmark = pytest.mark.gpu

if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("the kernels are for Hopper", allow_module_level=True)
iteration = pytest.importorskip("dion_core.newton_schulz_kernels.iteration")
choices = pytest.importorskip("dion_core.newton_schulz_kernels.choices")

WIDE, SINGLE = choices.DEFAULT, choices.SMALL
CHOICES = [
    WIDE,
    replace(WIDE, band=8),
    SINGLE,
]
SHAPES = [(3, 640, 1024), (2, 200, 328), (2, 384, 384), (3, 640, 256), (5, 264, 520), (1, 8, 64), (2, 1664, 1536)]


def exact(matrices: Tensor) -> Tensor:
    """The polynomials applied to the singular values in float64."""
    x = matrices.double()
    u, s, v = torch.linalg.svd(x / torch.linalg.matrix_norm(x, keepdim=True), full_matrices=False)
    for a, b, c in POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return (u * s[:, None, :]) @ v


def distance(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


def with_choice(matrices: Tensor, choice: object, spare: Tensor | None = None) -> Tensor:
    segments = NewtonSchulz().kernel_segments(*matrices.shape[1:])
    x = torch.full_like(matrices, float("nan"), dtype=torch.float16)
    counters = iteration.make_counters(matrices.shape, device=matrices.device)
    iteration.normalize(matrices, out=x, cleared=counters)
    return iteration.iterate(x, counters, segments, dtype=matrices.dtype, choice=choice, spare=spare)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_choice_agrees_with_float64(shape: tuple[int, int, int], choice: object) -> None:
    matrices = torch.randn(*shape, device="cuda")
    result = with_choice(matrices, choice)
    assert distance(result, exact(matrices)) < 0.006
    again = with_choice(matrices, choice)
    assert torch.equal(result, again)


@pytest.mark.parametrize("choice", CHOICES[:2], ids=str)
@pytest.mark.parametrize("shape", [(2, 384, 384), (2, 640, 1024), (2, 1664, 1536)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_spare_memory_changes_no_bit(shape: tuple[int, int, int], choice: object, dtype: torch.dtype) -> None:
    matrices = torch.randn(*shape, device="cuda").to(dtype)
    expected = with_choice(matrices, choice)
    for rows in (matrices.shape[0] * shape[1] + 3, 5):  # the second is too little for it
        spare = torch.full((rows, shape[2]), float("nan"), dtype=dtype, device="cuda")
        assert torch.equal(with_choice(matrices, choice, spare), expected)


@pytest.mark.parametrize("shape", [(2, 384, 384), (2, 640, 1024), (2, 1664, 1536)], ids=str)
def test_copies_lie_in_the_buffers_of_rows(shape: tuple[int, int, int]) -> None:
    batch, height, width = shape
    place = torch.arange(batch * height, device="cuda").view(batch, height)
    orthogonalize = NewtonSchulz()

    def peak_and_result(rows: Tensor, spare: Tensor | None) -> tuple[int, Tensor]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = orthogonalize.of_rows(rows, place, spare)
        return torch.cuda.max_memory_allocated() - before, result

    rows = torch.randn(batch * height, width, device="cuda").bfloat16()
    expected = orthogonalize(rows.view(shape))
    peak, result = peak_and_result(rows.clone(), torch.empty_like(rows))
    assert torch.equal(result, expected)
    assert peak <= orthogonalize.workspace(rows, batch, height) + 4096
    more, result = peak_and_result(rows.clone(), None)
    assert torch.equal(result, expected)
    assert more - peak >= rows.nbytes


@pytest.mark.parametrize("shape", [(3, 640, 1024), (2, 384, 384), (2, 520, 264)], ids=str)
@pytest.mark.parametrize("scale", [1e-10, 1e20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scale_does_not_matter(shape: tuple[int, int, int], scale: float, dtype: torch.dtype) -> None:
    matrices = (torch.randn(*shape, device="cuda") * scale).to(dtype)
    result = NewtonSchulz()(matrices)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert distance(result, exact(matrices)) < 0.014


def spectrum(m: int, n: int, values: Tensor) -> Tensor:
    u = torch.linalg.qr(torch.randn(m, m, device="cuda"))[0]
    v = torch.linalg.qr(torch.randn(n, m, device="cuda"))[0]
    return ((u * values.to(u)) @ v.mT)[None]


SPECTRA = {
    "aspect 4": lambda: torch.randn(2, 640, 2560, device="cuda"),
    "wide by a tenth": lambda: torch.randn(2, 1536, 1664, device="cuda"),
    "wide by 16 columns": lambda: torch.randn(2, 640, 656, device="cuda"),
    "rank 8": lambda: torch.randn(2, 640, 8, device="cuda") @ torch.randn(2, 8, 1280, device="cuda"),
    "four decades": lambda: spectrum(640, 1280, torch.logspace(0, -4, 640)),
    "four decades, wide by 8 columns": lambda: spectrum(640, 648, torch.logspace(0, -4, 640)),
    "square": lambda: torch.randn(2, 640, 640, device="cuda"),
    "tall": lambda: torch.randn(2, 2560, 640, device="cuda"),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("choice", [WIDE, SINGLE], ids=str)
def test_singular_values_stay_in_the_band(name: str, choice: object) -> None:
    matrices = SPECTRA[name]().bfloat16()
    before = torch.linalg.svdvals(matrices.double())
    before = before / before.square().sum(-1, keepdim=True).sqrt()
    after = torch.linalg.svdvals(with_choice(matrices, choice).double())
    print(f"{name}: {float(after.max()):.4f}")
    assert after.max() < 1.13
    assert after[before > 0.005].min() > 0.83


def test_zero_matrices_and_zero_rows_stay_zero() -> None:
    matrices = torch.randn(3, 264, 520, device="cuda").bfloat16()
    matrices[1] = 0
    matrices[2, 5] = 0
    result = NewtonSchulz()(matrices)
    assert not result[1].any()
    assert not result[2, 5].any()
    assert distance(result[[0, 2]], exact(matrices[[0, 2]])) < 0.014


def test_a_matrix_does_not_depend_on_its_batch() -> None:
    matrices = torch.randn(5, 264, 520, device="cuda").bfloat16()
    matrices[4] = float("nan")
    for choice in (WIDE, SINGLE):
        whole = with_choice(matrices, choice)
        assert whole[4].isnan().all()
        for number in range(4):
            assert torch.equal(whole[number], with_choice(matrices[number : number + 1], choice)[0])


@pytest.mark.parametrize("choice", [WIDE, SINGLE], ids=str)
@pytest.mark.parametrize("shape", [(7, 1536, 1664), (7, 1664, 1536), (6, 1536, 1536)], ids=str)
def test_a_matrix_of_a_part_gets_the_bits_of_one_alone(shape: tuple[int, int, int], choice: object) -> None:
    matrices = torch.randn(*shape, device="cuda").bfloat16()
    assert len(parts_of(shape[0], *sorted(shape[1:]))) == shape[0] // 3
    whole = with_choice(matrices, choice)
    for number in range(shape[0]):
        assert torch.equal(whole[number], with_choice(matrices[number : number + 1], choice)[0])


@pytest.mark.parametrize("choice", [WIDE, SINGLE], ids=str)
@pytest.mark.parametrize("order", [136, 200, 264, 320])
def test_tiles_of_few_slices_take_none_before_it_has_arrived(order: int, choice: object) -> None:
    """Three to five slices, as many as there is room for or fewer; and many tiles one after the other."""
    matrices = torch.randn(40, order, 2560, device="cuda").bfloat16()
    expected = torch.cat([with_choice(matrix[None], choice) for matrix in matrices])
    for _ in range(20):
        assert torch.equal(with_choice(matrices, choice), expected)


def test_many_matrices_are_worked_on_in_parts() -> None:
    matrices = torch.randn(25, 1536, 1664, device="cuda").bfloat16()
    whole, peaks = with_choice(matrices, WIDE), []
    for part in (slice(0, 25), slice(0, 13), slice(13, 25)):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        assert torch.equal(with_choice(matrices[part], WIDE), whole[part])
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] - peaks[1] < 2.5 * 2 * matrices[13:].numel()  # two copies and a comparison, and no more buffers


def test_other_coefficients_lists_and_strides() -> None:
    matrices = torch.randn(520, 3, 264, device="cuda").bfloat16().transpose(0, 1)
    fast = NewtonSchulz(coefficients=QUINTIC, restart_after=3)(matrices)
    plain = NewtonSchulz(coefficients=QUINTIC, restart_after=3, compute_dtype=torch.float32)(matrices)
    assert distance(fast, plain.double()) < 0.02


def test_capture_replays_to_the_same_bits() -> None:
    orthogonalize = NewtonSchulz()
    matrices = torch.randn(3, 384, 1536, device="cuda").bfloat16()
    expected = orthogonalize(matrices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = orthogonalize(matrices)
    for _ in range(3):
        result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(result, expected)
    matrices.copy_(torch.randn_like(matrices))
    graph.replay()
    assert torch.equal(result, orthogonalize(matrices))


def test_launches_at_the_same_time_do_not_wait_for_each_other_forever() -> None:
    """Programs of several launches share the multiprocessors, so that none of them runs as a whole."""
    inputs = [torch.randn(3, 640, 1024, device="cuda").bfloat16() for _ in range(4)]
    expected = [NewtonSchulz()(matrices) for matrices in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(5):
        results = []
        for stream, matrices in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                results.append(NewtonSchulz()(matrices))
        torch.cuda.synchronize()
        for result, right in zip(results, expected, strict=True):
            assert torch.equal(result, right)


def test_no_synchronization() -> None:
    orthogonalize = NewtonSchulz()
    matrices = torch.randn(3, 384, 1536, device="cuda").bfloat16()
    orthogonalize(matrices)
    with no_sync():
        orthogonalize(matrices)
