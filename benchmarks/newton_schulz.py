"""Newton-Schulz on this GPU: captured in a CUDA graph and eager, against what its products need at least.

    python -m benchmarks.newton_schulz [--write] [--products] [--output FILE]

TFLOP/s count a symmetric product at half the cost of a dense one. --products adds the times of single products by
cuBLAS; --write measures every candidate for every shape and stores the fastest in the file that
`dion_core.newton_schulz_kernels.choices` reads. Results are kept as JSON under benchmarks/results/ with the machine
named.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import torch
from torch import Tensor

from dion_core.newton_schulz import NewtonSchulz
from dion_core.newton_schulz_kernels import choices, iteration
from dion_core.newton_schulz_kernels.choices import Choice
from dion_core.newton_schulz_kernels.listing import parts_of
from dion_core.newton_schulz_kernels.normalize import normalize
from dion_core.prediction.timing import newton_schulz_flops

RESULTS = Path(__file__).parent / "results"
SHAPES = (
    (8, 1280, 5120),
    (4, 5120, 5120),
    (4, 4480, 5120),
    (4, 1280, 17920),
    (12, 1536, 1664),
    (24, 384, 1536),
    (12, 384, 6656),
)
TARGETS = (1.15, 16.0, 12.5, 1.6, 1.8, 0.30, 0.35)
"""Milliseconds, captured, one for each shape."""
FEW = (
    *((batch, 5120, 5120) for batch in (1, 2)),
    *((batch, 1280, 5120) for batch in (1, 2, 4)),
    (2, 4480, 5120),
    *((batch, 1536, 1664) for batch in (1, 3, 4)),
    *((batch, 384, n) for batch in (2, 6) for n in (1536, 6656)),
)
"""Shapes of which a choice is stored too: with few matrices, as many ranks have them, or as parts of many have."""
WIDE = Choice(wide=2, depth=64, stages=3, band=4)
SINGLE = Choice(wide=1, depth=64, stages=5, band=8)
CANDIDATES = (WIDE, replace(WIDE, band=8), SINGLE)

ROUNDS = 3
PAUSE = 0.5
"""Seconds of rest before a shape: one that follows heavy work starts with lower clocks."""


def captured_ms(function: Callable[[], object], *, repeats: int = 10) -> float:
    """Median time of a replay of `function` as a CUDA graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return eager_ms(graph.replay, repeats=repeats)


def eager_ms(function: Callable[[], object], *, repeats: int = 10) -> float:
    """Median time of a call, host time included, with the device idle before it."""
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[2:])


def host_us(function: Callable[[], object], *, repeats: int = 20) -> float:
    """Mean host time of a call that does not wait for the device."""
    torch.cuda.synchronize()
    begin = perf_counter()
    for _ in range(repeats):
        function()
    time = perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * time / repeats


def operations(batch: int, m: int, n: int) -> float:
    """Floating-point operations of the products, symmetric ones at half cost."""
    return batch * newton_schulz_flops(m, n)


def random_matrices(batch: int, rows: int, columns: int) -> Tensor:
    """(B, R, C) bfloat16, normally distributed."""
    return torch.randn(batch, rows, columns, device="cuda").bfloat16()


def segments_of(rows: int, columns: int) -> iteration.Segments:
    """What the default does with a matrix of that size."""
    return NewtonSchulz().kernel_segments(rows, columns)


def with_choice(matrices: Tensor, segments: iteration.Segments, choice: Choice) -> Tensor:
    """The whole of `iteration.orthogonalize`, with a given choice."""
    x = torch.empty_like(matrices, dtype=torch.float16)
    counters = iteration.make_counters(matrices.shape, device=matrices.device)
    normalize(matrices, out=x, cleared=counters)
    return iteration.iterate(x, counters, segments, dtype=matrices.dtype, choice=choice)


def ceiling(dtype: torch.dtype) -> float:
    """TFLOP/s of cuBLAS for 8192^3."""
    left, right = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * 8192**3 / captured_ms(lambda: torch.mm(left, right, out=out)) / 1e9


def print_products(batch: int, m: int, n: int) -> None:
    """The times of single products by cuBLAS, and of everything else than products."""
    x = torch.randn(batch, m, n, device="cuda").half()
    q = torch.randn(batch, m, m, device="cuda").half()
    matrices, room = x.bfloat16(), torch.empty_like(x)
    times = {
        "X X^T": captured_ms(lambda: torch.bmm(x, x.mT)),
        "G G": captured_ms(lambda: torch.bmm(q, q)),
        "Q X": captured_ms(lambda: torch.bmm(q, x)),
        "normalize": captured_ms(lambda: normalize(matrices, out=room)),
    }
    print("    dense, us:", ", ".join(f"{name} {1e3 * time:.0f}" for name, time in times.items()), flush=True)


def compare(batch: int, m: int, n: int) -> Choice:
    """Prints the time of every candidate for a shape, and returns the fastest.

    The candidates take turns, because a GPU at its power limit changes its clocks from second to second.
    """
    matrices, segments = random_matrices(batch, m, n), segments_of(m, n)
    rounds: dict[Choice, list[float]] = {choice: [] for choice in CANDIDATES}
    for _ in range(ROUNDS):
        for choice, times in rounds.items():
            times.append(captured_ms(lambda choice=choice: with_choice(matrices, segments, choice), repeats=5))
    for choice, times in rounds.items():
        print(f"    {median(times):8.3f} ms  {choice}", flush=True)
    return min(rounds, key=lambda choice: median(rounds[choice]))


def write() -> None:
    """Stores the fastest choice of every shape under the device's name."""
    name = torch.cuda.get_device_name()
    content = json.loads(choices.MEASURED.read_text(encoding="utf-8")) if choices.MEASURED.exists() else {}
    content[name] = []
    for batch, m, n in SHAPES + FEW:
        if parts_of(batch, m, n) != [batch]:
            continue  # takes the choice of a part
        print(f"{batch} x {m} x {n}", flush=True)
        content[name].append({"batch": batch, "m": m, "n": n, "choice": asdict(compare(batch, m, n))})
    choices.MEASURED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    choices.choose.cache_clear()
    choices._measured.cache_clear()


def measure(batch: int, m: int, n: int) -> dict[str, float]:
    """Times of one shape: captured, eager, on the host, and captured with torch's products; and FLOP/s."""
    orthogonalize, matrices = NewtonSchulz(), random_matrices(batch, m, n)
    sleep(PAUSE)
    captured = captured_ms(lambda: orthogonalize(matrices))
    return {
        "captured_ms": captured,
        "eager_ms": eager_ms(lambda: orthogonalize(matrices)),
        "host_us": host_us(lambda: orthogonalize(matrices)),
        "flops": 1e3 * operations(batch, m, n) / captured,
        "torch_ms": captured_ms(lambda: orthogonalize._orthogonalize(matrices)),
    }


def main() -> None:
    """Measures, after writing if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the fastest choices")
    parser.add_argument("--products", action="store_true", help="print times of single products too")
    parser.add_argument("--output", type=Path, help="default: benchmarks/results/newton_schulz-MACHINE.json")
    arguments = parser.parse_args()
    if arguments.write:
        write()
    machine, product = torch.cuda.get_device_name(), ceiling(torch.float16)
    print(f"cuBLAS 8192^3: bf16 {ceiling(torch.bfloat16):.0f}, fp16 {product:.0f} TFLOP/s")
    print(
        "batch x m x n          captured ms  target   eager ms   host us  TFLOP/s  captured with torch's products, ms"
    )
    rows = []
    for shape, target in zip(SHAPES, TARGETS, strict=True):
        row = measure(*shape)
        rows.append({"shape": shape, "target_ms": target} | row)
        print(
            f"{' x '.join(map(str, shape)):22} {row['captured_ms']:11.3f} {target:7.2f} {row['eager_ms']:10.3f} "
            f"{row['host_us']:9.0f} {row['flops'] / 1e12:8.0f} {row['torch_ms']:8.3f}",
            flush=True,
        )
        if arguments.products:
            print_products(*shape)
    content = {
        "machine": machine,
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "product": product,
        "rows": rows,
    }
    output = arguments.output or RESULTS / f"newton_schulz-{machine.replace(' ', '-')}.json"
    output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
