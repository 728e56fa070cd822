"""The pages of benchmarks in a browser: nothing is missing, nothing complains, and the curves are there."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.site_of_results import complete
from tests.benchmark_results import keep
from tests.browser import Browser, browser, executable, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(executable() is None, reason="needs Chromium (Debian: apt-get install chromium)"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm, which brings the libraries of asv's pages"),
]
TRANSPORTS = ["capped", "full"]
PARAMS = [[repr(name) for name in TRANSPORTS], ["2", "4"]]
BYTES, TIME, UNMEASURED = (
    "bench_counts.Counts.track_bytes",
    "bench_steps.Steps.time_step",
    "bench_steps.OneGpu.time_step",
)
START = 1_700_000_000
COLOURED = """
(() => {
  for (const canvas of document.querySelectorAll("%s")) {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    for (let i = 0; i < data.length; i += 4) {
      const high = Math.max(data[i], data[i + 1], data[i + 2]), low = Math.min(data[i], data[i + 1], data[i + 2]);
      if (data[i + 3] > 200 && high - low > 60) colours.add([data[i], data[i + 1], data[i + 2]].join());
    }
    if (colours.size >= %d) return colours.size;
  }
})()
"""
"""How many different colours, greys apart, one of the canvases has, if there are enough."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a site of three commits."""
    folder = tmp_path_factory.mktemp("site")
    results, output = folder / "results", folder / "output"
    results.mkdir()
    for number in range(3):
        commit = _commit(folder / "repository", number)
        values = {BYTES: [10 + number, 20, 30, 40], TIME: [0.1, 0.2 + number, 0.3, 0.4]}
        keep(results, values, PARAMS, commit=commit, time=START + 1000 * number)
    known = json.loads((results / "benchmarks.json").read_text())
    known[UNMEASURED] = known[TIME] | {"name": UNMEASURED}
    (results / "benchmarks.json").write_text(json.dumps(known))
    settings = {"version": 1, "project": "made-up", "project_url": "#", "repo": str(folder / "repository")}
    settings |= {"branches": ["HEAD"], "benchmark_dir": ".", "results_dir": str(results)}
    settings |= {"html_dir": str(output / "asv"), "environment_type": "existing", "show_commit_url": "#"}
    (folder / "asv.conf.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "asv", "--config", str(folder / "asv.conf.json"), "publish", "--no-pull"]
    subprocess.run(command, check=True, capture_output=True)
    complete(output / "asv")
    page.make(commit, "three", output, results)
    with serving(output) as address:
        yield address


def _commit(repository: Path, number: int) -> str:
    """The hash of a new commit."""
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    if not number:
        subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
    date = f"{START + 1000 * number} +0000"
    words = ["commit", "--quiet", "--allow-empty", "-m", str(number), "--date", date]
    subprocess.run([*git, *words], check=True, env={"PATH": "/usr/bin:/bin", "GIT_COMMITTER_DATE": date})
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def test_transports_lie_side_by_side(site: str, tab: Browser) -> None:
    tab.open(f"{site}/index.html")
    tab.wait_for("document.querySelectorAll('table').length === 2")
    assert tab.evaluate("document.querySelectorAll('figure > svg').length") == 2
    for benchmark in (BYTES, TIME):
        name = benchmark.replace(".", "-") + "-world_size-"
        for transport in TRANSPORTS:
            path = tab.evaluate(f"document.querySelector(\"g[id='{name}-{transport}'] path\").getAttribute('d')")
            assert path.count("L") == 1, path  # from the point of 2 ranks to that of 4
    assert not tab.errors


def test_the_grid_of_asv_draws_every_benchmark_that_was_run(site: str, tab: Browser) -> None:
    tab.open(f"{site}/asv/index.html")
    tab.wait_for("document.querySelectorAll('#summarygrid-display .benchmark-container').length >= 2")
    tab.wait_for(COLOURED % ("#summarygrid-display canvas", 1))
    assert not tab.errors


@pytest.mark.parametrize("benchmark", [BYTES, TIME])
def test_asv_draws_the_course_of_a_figure(site: str, tab: Browser, benchmark: str) -> None:
    tab.open(f"{site}/asv/index.html#{benchmark}")
    tab.wait_for(COLOURED % ("#main-graph canvas", len(TRANSPORTS)))
    assert tab.wait_for("document.querySelectorAll('#main-graph .flot-tick-label').length") > 2
    legend = tab.evaluate("document.querySelector('#main-graph .legend').textContent")
    assert all(f"transport-{name}" in legend for name in TRANSPORTS), legend
    assert not tab.errors


@pytest.mark.parametrize("place", ["/summarylist", "/regressions"])
def test_the_lists_of_asv_come_up(site: str, tab: Browser, place: str) -> None:
    tab.open(f"{site}/asv/index.html#{place}")
    tab.wait_for(f"document.querySelector('#{place[1:]}-display').textContent.length > 20")
    assert not tab.errors
