"""Builds, installs and removes all packages of a commit; asv calls it in the environment of the commit.

    python benchmarks/packages.py build SOURCE WHEELS
    python benchmarks/packages.py install WHEELS KIND
    python benchmarks/packages.py uninstall

SOURCE is the tree of the commit. KIND is asv's type of environment: "shared" has what the packages need, any other gets
it by the constraints of this tree. Needs nothing but pip, which brings hatchling.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PREFIXES = ("dion-core", "dion-comm-")
NEEDED = ("torch==2.13.0", "numpy")
"""What a commit needs besides its packages. The version of torch is named since another may bring gigabytes."""


def sources(tree: Path) -> list[Path]:
    """The folders of all packages of a tree."""
    return sorted(path.parent for path in tree.glob("packages/*/pyproject.toml"))


def installed() -> list[str]:
    """The names of the packages of any commit that are installed."""
    names = (each.metadata["Name"].lower().replace("_", "-") for each in distributions())
    return sorted({name for name in names if name.startswith(PREFIXES)})


def pip(*words: object) -> None:
    """Runs pip of this environment; raises CalledProcessError where it fails."""
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)], check=True)


def build(tree: Path, wheels: Path) -> None:
    """Makes a wheel of every package of the tree.

    Raises:
        SystemExit: there is none.
    """
    found = sources(tree)
    if not found:
        sys.exit(f"no packages/*/pyproject.toml under {tree}")
    constraints = ROOT / "constraints.txt"
    pip("install", "--quiet", "-c", constraints, "hatchling")
    for folder in found:
        words = ["-m", "hatchling", "build", "--target", "wheel", "--directory", str(wheels.resolve())]
        subprocess.run([sys.executable, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def install(wheels: Path, kind: str) -> None:
    """Installs the wheels, and what they need where the environment is not shared."""
    fetching = ["-c", ROOT / "constraints.txt", *NEEDED]
    pip("install", "--quiet", *(["--no-deps", "--no-index"] if kind == "shared" else fetching), *wheels_in(wheels))


def wheels_in(folder: Path) -> list[Path]:
    """The wheels of all packages."""
    return sorted(folder.glob("*.whl"))


def uninstall() -> None:
    """Removes all packages of the last commit."""
    if names := installed():
        pip("uninstall", "--quiet", "--yes", *names)


def main() -> None:
    match sys.argv[1:]:
        case ["build", tree, wheels]:
            build(Path(tree), Path(wheels))
        case ["install", wheels, kind]:
            install(Path(wheels), kind)
        case ["uninstall"]:
            uninstall()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
