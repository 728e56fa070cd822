"""An environment of asv that shares torch with the one that runs asv: `asv run -E shared ...`.

Its folder of packages holds links to those of the running environment, all but the packages of this project, which asv
builds and installs for each commit. So two commits are measured with the same torch, and nothing is fetched.

asv loads this module for every command that measures; what it knows of machines is then kept beside the results, not in
the home folder.
"""

from __future__ import annotations

import re
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from asv.environment import Environment
from asv.machine import MachineCollection

MACHINES = Path(__file__).resolve().parent.parent / ".asv" / "machines.json"


def _machines() -> str:
    MACHINES.parent.mkdir(exist_ok=True)
    return str(MACHINES)


MachineCollection.get_machine_file_path = staticmethod(_machines)


def is_of_project(name: str) -> bool:
    """Whether an entry of a folder of packages belongs to a package of this project: a module, metadata, or a path."""
    return re.match(r"_*(editable[_.]*(impl_*)?)?dion_(core|comm_)", name.lower().replace("-", "_")) is not None


def link_packages(source: Path, target: Path) -> None:
    """Links all entries of a folder of packages into another one, but those of this project."""
    for entry in sorted(source.iterdir()):
        link = target / entry.name
        if not is_of_project(entry.name) and not link.exists() and entry.name != "__pycache__":
            link.symlink_to(entry)


class SharedEnvironment(Environment):  # type: ignore[misc]
    """See the module. The version of Python is the running one, whatever the configuration lists."""

    tool_name = "shared"

    def __init__(self, conf: Any, python: str, requirements: dict[str, str], variables: dict[Any, str]) -> None:
        self._python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        self._requirements: dict[str, str] = {}
        super().__init__(conf, self._python, {}, variables)

    @classmethod
    def matches(cls, python: str) -> bool:
        return False  # it is chosen by name alone

    def check_presence(self) -> bool:
        """Never: making it takes less than a second, and what is installed may have changed."""
        return False

    def _setup(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._path], check=True)
        paths = sysconfig.get_paths(vars={"base": self._path, "platbase": self._path})
        for folder in site.getsitepackages():
            link_packages(Path(folder), Path(paths["purelib"]))

    def run(self, args: list[str], **settings: Any) -> Any:
        return self.run_executable("python", args, **settings)
