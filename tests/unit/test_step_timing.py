"""What the GPU benchmarks make of a profile, on profiles that are known."""

from types import SimpleNamespace

import torch

from benchmarks.step_timing import covered, stages_of


def test_covered_time_counts_once() -> None:
    assert covered([]) == 0.0
    assert covered([(1, 2), (0, 2), (4, 5)]) == 3.0
    assert covered([(0, 10), (2, 3), (9, 12)]) == 12.0


def event(name: str, start: float, end: float, *, device: bool = True) -> SimpleNamespace:
    """In microseconds, as torch.profiler gives it."""
    kind = torch.autograd.DeviceType.CUDA if device else torch.autograd.DeviceType.CPU
    times = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, device_type=kind, device_time=end - start, time_range=times, is_user_annotation=False
    )


def test_the_wire_is_exposed_where_nothing_else_runs() -> None:
    events = [
        event("ncclDevKernel_SendRecv", 0, 3000),
        event("nvjet_hsh_128x256", 1000, 2000),
        event("_update_kernel", 2500, 6000),
        event("Optimizer.step#NorDion2.step", 0, 9000),
        event("cudaLaunchKernel", 0, 9000, device=False),
    ]
    launches, stages, exposed = stages_of(SimpleNamespace(events=lambda: events))
    assert (launches, exposed) == (3, 1.5)
    assert {name: time for name, time in stages.items() if time} == {"wire": 3.0, "Newton-Schulz": 1.0, "update": 3.5}
