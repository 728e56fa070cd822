"""The report: one page with its pictures inside, that opens offline, and the numbers beside it as JSON."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from text_demo.results import COLUMNS, RunResult, conclusions, table_rows
from text_demo.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
caption {{ caption-side: bottom; text-align: left; padding: .5rem 0; color: #555; }}
th, td {{ padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; vertical-align: bottom; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ white-space: pre-line; border-bottom: 2px solid #888; }}
td {{ font-variant-numeric: tabular-nums; }}
img {{ max-width: 100%; height: auto; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{introduction}</p>
<table>
<caption>{caption}</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table>
{conclusions}
{curves}
{costs}
</body>
</html>
"""


def table_caption(settings: Settings, unigram_entropy: float) -> str:
    """What the numbers of the table have to be measured against."""
    return (
        f"Loss on the held-out last tenth of {settings.text_name}, whose unigram entropy is"
        f" {unigram_entropy:.3f} bits per byte, after {settings.steps} steps of {settings.batch_size} x"
        f" {settings.shape.context} bytes on {settings.world_size} ranks, fraction {settings.fraction:g}."
        " Bytes: of the matrices' rows, both ways, to itself too, mean over ranks. Rows: a step, of all ranks."
        " Times: medians."
    )


def write_report(settings: Settings, results: Sequence[RunResult], unigram_entropy: float) -> Path:
    """Writes report.html and report.json into `settings.out`; returns the path of the page."""
    settings.out.mkdir(parents=True, exist_ok=True)
    page = settings.out / "report.html"
    page.write_text(render_page(settings, results, unigram_entropy), encoding="utf-8")
    numbers = json.dumps(as_data(settings, results, unigram_entropy), indent=1, allow_nan=False)
    (settings.out / "report.json").write_text(numbers + "\n", encoding="utf-8")
    return page


def as_data(settings: Settings, results: Sequence[RunResult], unigram_entropy: float) -> dict[str, Any]:
    """All numbers, JSON-serializable."""
    return {
        "settings": {
            "text": settings.text_name,
            "steps": settings.steps,
            "world_size": settings.world_size,
            "batch_size": settings.batch_size,
            "context": settings.shape.context,
            "fraction": settings.fraction,
            "lr": settings.lr,
            "seed": settings.seed,
        },
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        },
        "unigram_bits_per_byte": unigram_entropy,
        "runs": [
            {
                "name": result.run.name,
                "transport": result.run.transport,
                "exact": result.run.exact,
                "validation_nats": _finite(result.final_loss),
                "validation_bits_per_byte": _finite(result.bits_per_byte),
                "bytes_per_step": result.bytes_per_step,
                "rows_applied_per_step": result.rows_applied,
                "rows_deferred_per_step": result.rows_deferred,
                "step_ms": result.step_ms,
                "optimizer_ms": result.optimizer_ms,
                "training_curve": [_finite(loss) for loss in result.training_loss],
                "validation_curve": [[step, _finite(loss)] for step, loss in result.validation_loss],
            }
            for result in results
        ],
        "conclusions": conclusions(results, unigram_entropy),
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None  # JSON has no word for NaN


def render_page(settings: Settings, results: Sequence[RunResult], unigram_entropy: float) -> str:
    """The whole page as text; everything that comes from outside is escaped."""

    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values)

    def paragraphs(lines: Sequence[str]) -> str:
        return "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)

    introduction = (
        "A small GPT on bytes, trained from the same weights on the same batches by NorDion2, once per"
        " transport, and by AdamW. Runs that choose the same rows take the same steps: their curves coincide."
    )
    return PAGE.format(
        title=html.escape(f"NorDion2 on {settings.text_name}"),
        introduction=html.escape(introduction),
        caption=html.escape(table_caption(settings, unigram_entropy)),
        head=cells("th", COLUMNS),
        body="\n".join(f"<tr>{cells('td', row)}</tr>" for row in table_rows(results)),
        conclusions=paragraphs(conclusions(results, unigram_entropy)),
        curves=_picture("Loss by step", lambda axes: _draw_curves(axes, results, unigram_entropy)),
        costs=_picture("Bytes and milliseconds a step", lambda axes: _draw_costs(axes, results)),
    )


def _picture(description: str, draw: Callable[[Sequence[Axes]], None]) -> str:
    """Two panels side by side as an `img` element that holds its own data."""
    from matplotlib.figure import Figure  # here: ranks import this file too, and draw nothing

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    draw(list(figure.subplots(1, 2)))
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=144)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return f'<p><img src="data:image/png;base64,{data}" alt="{html.escape(description)}"></p>'


def _draw_curves(axes: Sequence[Axes], results: Sequence[RunResult], unigram_entropy: float) -> None:
    bits = 1 / math.log(2)
    for index, result in enumerate(results):
        # Curves that coincide stay visible one under the other: broad below, narrow above.
        width = 1.0 + 1.0 * (len(results) - 1 - index)
        steps = range(1, len(result.training_loss) + 1)
        label = result.run.name
        axes[0].plot(steps, [loss * bits for loss in result.training_loss], label=label, linewidth=width)
        done, losses = zip(*result.validation_loss, strict=True)
        axes[1].plot(done, [loss * bits for loss in losses], label=label, linewidth=width, marker="o")
    for panel, title in zip(axes, ("Training batches", "Validation text"), strict=True):
        panel.axhline(unigram_entropy, color="gray", linestyle=":", label="unigram entropy")
        panel.set(title=title, xlabel="step", ylabel="bits per byte")
    axes[0].legend()


def _draw_costs(axes: Sequence[Axes], results: Sequence[RunResult]) -> None:
    names = [result.run.name for result in results]
    bytes_bars = axes[0].bar(names, [result.bytes_per_step / 1e6 for result in results])
    axes[0].bar_label(bytes_bars, fmt="%.3g")
    axes[0].set(title="Sent by the optimizer, a rank and step", ylabel="MB (1e6 bytes)")
    optimizer = [result.optimizer_ms for result in results]
    rest = [result.step_ms - result.optimizer_ms for result in results]
    axes[1].bar(names, optimizer, label="optimizer")
    axes[1].bar(names, rest, bottom=optimizer, label="model")
    axes[1].set(title="Median step", ylabel="ms")
    axes[1].legend()
