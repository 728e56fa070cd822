"""Makes the site: asv's pages of all commits, and the page of one commit that lays its transports side by side.

    python -m benchmarks.site_of_results [--commit COMMIT] [--output FOLDER]

Nothing of it is loaded from elsewhere: any server of files can show it, also one without a network.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import page
from benchmarks.compare import asv, git
from benchmarks.figures import RESULTS
from benchmarks.vendor import vendor


def complete(folder: Path) -> None:
    """Makes asv's pages in the folder whole: libraries are there, and no figure is asked for in vain.

    asv lists every benchmark that it knows, and its pages then ask for figures that there are not, or show nothing.
    """
    vendor(folder / "index.html")
    path = folder / "index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    drawn = {file.stem for file in (folder / "graphs" / "summary").glob("*.json") if _has_values(file)}
    index["benchmarks"] = {name: each for name, each in index["benchmarks"].items() if name in drawn}
    path.write_text(json.dumps(index), encoding="utf-8")


def _has_values(summary: Path) -> bool:
    """Whether there is any figure in the course of a benchmark; there is none where no machine can measure it."""
    return any(value is not None for _, value in json.loads(summary.read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default="HEAD", help="whose transports are laid side by side")
    parser.add_argument("--output", type=Path, default=page.OUTPUT, help="the folder of the site")
    arguments = parser.parse_args()
    of_asv = arguments.output / "asv"
    asv("publish", "--no-pull", "--html-dir", str(of_asv.resolve()))
    complete(of_asv)
    commit, subject = git("log", "-1", "--format=%H %s", arguments.commit).split(" ", 1)
    print(page.make(commit, subject, arguments.output, RESULTS))


if __name__ == "__main__":
    main()
