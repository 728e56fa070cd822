"""How plans are shown: as tables for people, as plain data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dion_core.cli.output import megabytes, milliseconds, print_line, print_table
from dion_core.prediction.comparison import Answer, Comparison
from dion_core.prediction.machine import Machine
from dion_core.prediction.scaling import AMDAHL_ROWS, Amdahl
from dion_core.prediction.timing import STAGES
from dion_core.prediction.traffic import Question

Points = Sequence[tuple[int, Comparison]]

_BYTES = ("", "to itself", "in node", "between", "sent", "mean", "first step", "workspace MiB", "imbalance", "reads")
_TIMES = ("", *(stage.replace("_", " ") for stage in STAGES), "step", "exposed")
_CLASSES = {
    "newton_schulz": "Newton-Schulz, ms",
    "chosen_rows": "take, normalize, add (chosen rows), ms",
    "all_rows": "momentum, scores, decay (all rows), ms",
    "exchange": "exchange as if alone, ms",
    "bytes_sent": "sent by a rank, MB",
    "bytes_to_a_peer": "of these to one peer, MB",
}


def answer_json(answer: Answer) -> dict[str, Any]:
    """One transport."""
    if answer.refused:
        return {"transport": answer.transport, "refused": answer.refused}
    assert answer.times is not None
    return {
        "transport": answer.transport,
        "exact": answer.exact,
        "may_defer": answer.may_defer,
        "host_reads_per_step": answer.host_reads,
        "bytes": {
            "busiest_rank": {**asdict(answer.sent), "total": answer.sent.total},
            "mean": answer.mean_bytes,
            "first_step": answer.start_bytes,
        },
        "workspace_bytes": answer.workspace,
        "newton_schulz": {"flops": answer.flops, "imbalance": answer.imbalance},
        "seconds": {
            "stages": answer.times.stages,
            "step": answer.times.step,
            "exposed": answer.times.exposed,
        },
        "buckets": list(answer.buckets),
    }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """All transports and the recommendation."""
    return {
        "transports": [answer_json(each) for each in comparison.answers],
        "recommendation": {"transport": comparison.recommended, "reason": comparison.reason},
    }


def sweep_json(points: Points) -> dict[str, Any]:
    """By number of ranks, without buckets."""
    found = []
    for world_size, comparison in points:
        content = comparison_json(comparison)
        for each in content["transports"]:
            each.pop("buckets", None)
        found.append({"world_size": world_size, **content})
    return {"sweep": found}


def amdahl_json(table: Amdahl) -> dict[str, Any]:
    """Values by W and fraction, and their ratios."""
    values = [{"world_size": w, "fraction": f, **classes} for (w, f), classes in table.values.items()]
    return {"amdahl": {"values": values, "by_world": table.by_world, "by_fraction": table.by_fraction}}


def print_comparison(comparison: Comparison, question: Question, machine: Machine) -> None:
    """Bytes and memory, then times, then what to take."""
    served = [each for each in comparison.answers if not each.refused]
    print_line(f"{question.mesh.describe()}; {question.optimizer} {_options(question)}".rstrip())
    print_line(f"machine: {machine.describe()}")
    print_line()
    if served:
        print_table("MB that the busiest rank sends in a step", _BYTES, [_bytes_row(each) for each in served])
        print_line()
        print_table("predicted ms, each stage as if alone", _TIMES, [_times_row(each) for each in served])
        print_line()
    for each in comparison.answers:
        if each.refused:
            print_line(f"{each.transport} cannot: {each.refused}")
    name = f"take {comparison.recommended}: " if comparison.recommended else ""
    print_line(name + comparison.reason)


def print_sweep(points: Points) -> None:
    """Bytes and predicted times by number of ranks."""
    names = [each.transport for each in points[0][1].answers]
    for title, cell in (("predicted ms a step", _step), ("of these exposed", _exposed), ("MB sent", _sent)):
        rows = [
            (f"{world_size:,}", *(cell(each) for each in comparison.answers), comparison.recommended or "")
            for world_size, comparison in points
        ]
        print_table(title, ("ranks", *names, "take"), rows)
        print_line()


def print_amdahl(table: Amdahl, transport: str, question: Question, machine: Machine) -> None:
    """Classes of work, and by what factor each changes."""
    print_line(f"{transport}; {question.optimizer}; machine: {machine.describe()}")
    keys = list(table.values)
    columns = ("", *(f"W {w}, fraction {f:g}" for w, f in keys), "2 W", "2 fraction")
    rows = []
    for name in AMDAHL_ROWS:
        show = milliseconds if name in ("newton_schulz", "chosen_rows", "all_rows", "exchange") else megabytes
        ratios = (f"x {ratios[name]:.2f}" for ratios in (table.by_world, table.by_fraction))
        rows.append((_CLASSES[name], *(show(table.values[key][name]) for key in keys), *ratios))
    print_table("", columns, rows)


def _bytes_row(answer: Answer) -> tuple[str, ...]:
    sent = answer.sent
    mean = "-" if answer.mean_bytes is None else megabytes(answer.mean_bytes)
    sizes = (megabytes(size) for size in (sent.itself, sent.in_node, sent.between, sent.total))
    workspace = f"{answer.workspace / 2**20:,.0f}" if answer.workspace else "-"
    rest = (workspace, f"{answer.imbalance:.2f}", str(answer.host_reads))
    return (answer.transport, *sizes, mean, megabytes(answer.start_bytes), *rest)


def _times_row(answer: Answer) -> tuple[str, ...]:
    assert answer.times is not None
    stages = (milliseconds(answer.times.stages[stage]) for stage in STAGES)
    return (answer.transport, *stages, _step(answer), _exposed(answer))


def _step(answer: Answer) -> str:
    return "-" if answer.times is None else milliseconds(answer.times.step)


def _exposed(answer: Answer) -> str:
    return "-" if answer.times is None else milliseconds(answer.times.exposed)


def _sent(answer: Answer) -> str:
    return "-" if answer.times is None else megabytes(answer.sent.total)


def _options(question: Question) -> str:
    return ", ".join(f"{name} {value}" for name, value in question.options.items() if value is not None)
