"""`dion doctor`: what this environment has, what it lacks, and the command that brings it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

import torch
import typer

from dion_core import groups, registry
from dion_core.cli.output import print_json, print_line
from dion_core.registry import available_transports
from dion_core.transport import TransportError

OLDEST_TORCH = (2, 9)
TRITON = "3.6"
"""The version that the kernels of Newton-Schulz were tried with."""

TRIED_SECONDS = 60.0
"""That an import in another process may take."""
MPI_REMEDY = "install an MPI library, such as openmpi-bin of Debian and Ubuntu"

COLUMNS, INDENT = 80, 26
"""Of the printed lines, and of what was found in them."""

State = Literal["ok", "optional", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        what: its name.
        state: "ok"; "optional" if it is not there and nothing breaks; "missing" if something does not work.
        found: the version, or what is wrong.
        remedy: the command that brings it, or "".
    """

    what: str
    state: State
    found: str
    remedy: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """Check this environment; exit code 1 if something that dion-core needs here is missing."""
    findings = examined()
    healthy = all(each.state != "missing" for each in findings)
    if as_json:
        print_json({"healthy": healthy, "findings": [asdict(each) for each in findings]})
    else:
        for each in findings:
            print_line("\n".join(_lines(each)))
        print_line("nothing is missing" if healthy else "something is missing: see above")
    raise typer.Exit(0 if healthy else 1)


def _lines(finding: Finding) -> list[str]:
    """What was found, and below it what to do."""
    found = _wrapped(finding.found, f"{finding.what:<16} {finding.state:<8} ")
    return [*found, *_wrapped(finding.remedy, " " * INDENT + "-> ")]


def _wrapped(text: str, start: str) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=start,
        subsequent_indent=" " * INDENT,
        break_on_hyphens=False,
        break_long_words=False,
    )


def examined() -> list[Finding]:
    """All findings."""
    return [_python(), _torch(), *_accelerator(), _triton(), *_libraries(), *_packages(), _transports(), *_groups()]


def _python() -> Finding:
    return Finding("Python", "ok", sys.version.split()[0])


def _torch() -> Finding:
    version = torch.__version__
    new_enough = tuple(int(part) for part in version.split(".")[:2]) >= OLDEST_TORCH
    wanted = ".".join(map(str, OLDEST_TORCH))
    remedy = "" if new_enough else f"pip install 'torch>={wanted}'"
    return Finding("torch", "ok" if new_enough else "missing", version, remedy)


def _accelerator() -> list[Finding]:
    """CUDA, NCCL, and whether GPUs reach each other's memory."""
    if torch.version.cuda is None:
        remedy = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
        return [Finding("CUDA", "optional", "this build of torch is for the CPU", remedy)]
    if not torch.cuda.is_available():
        found = f"torch is built for CUDA {torch.version.cuda}, but finds no GPU or driver"
        return [Finding("CUDA", "missing", found, "check nvidia-smi and CUDA_VISIBLE_DEVICES")]
    count = torch.cuda.device_count()
    names = sorted({torch.cuda.get_device_name(number) for number in range(count)})
    findings = [Finding("CUDA", "ok", f"{torch.version.cuda}, {count} x {', '.join(names)}")]
    if torch.distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        findings.append(Finding("NCCL", "ok", version))
    else:
        findings.append(Finding("NCCL", "missing", "not in this build of torch", "install a build of torch with NCCL"))
    return [*findings, _peers(count)]


def _peers(count: int) -> Finding:
    """Peer access between the GPUs here."""
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    without = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not pairs:
        return Finding("peer access", "ok", "one GPU: none is needed")
    if not without:
        return Finding("peer access", "ok", f"between all {count} GPUs")
    found = "not between GPUs " + ", ".join(f"{one} and {other}" for one, other in without)
    return Finding("peer access", "optional", found, "check nvidia-smi topo -p2p r; messages go through the host")


def _triton() -> Finding:
    version = _version("triton")
    if version is not None and version.startswith(TRITON + "."):
        return Finding("Triton", "ok", version)
    remedy = "pip install 'torch==2.11.*'"  # whose Triton it is: torch asks for one version
    found = "not installed" if version is None else f"{version}; kernels of Newton-Schulz need {TRITON}"
    return Finding("Triton", "optional", found + ": steps on a GPU are slower", remedy)


def _libraries() -> list[Finding]:
    """MPI and CuPy, which optional transports use."""
    cuda = (torch.version.cuda or "13").split(".")[0]
    return [_mpi(), _importable("CuPy", "cupy", f"pip install cupy-cuda{cuda}x")]


def _mpi() -> Finding:
    """Whether mpi4py is there and finds a library, tried in another process: to load one that is broken can end it."""
    binding = _importable("MPI", "mpi4py", "pip install mpi4py")
    if binding.state != "ok":
        return binding
    code = "from mpi4py import MPI; print(' '.join(MPI.Get_library_version().split(',')[0].splitlines()[0].split()))"
    try:
        tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TRIED_SECONDS)
    except subprocess.TimeoutExpired:
        return replace(binding, state="optional", found=f"{binding.found}, which hangs", remedy=MPI_REMEDY)
    if tried.returncode:
        return replace(binding, state="optional", found=f"{binding.found}, without a library", remedy=MPI_REMEDY)
    return replace(binding, found=f"{binding.found}, {tried.stdout.strip()}")


def _importable(what: str, module: str, remedy: str) -> Finding:
    try:
        found = str(importlib.import_module(module).__version__)
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == module
        found = f"{module} is not installed" if absent else f"{module} cannot be imported: {error}"
        return Finding(what, "optional", found, remedy)
    return Finding(what, "ok", f"{module} {found}")


def _packages() -> list[Finding]:
    """The packages of the project, which carry one version number."""
    core = _version("dion-core")
    findings = [Finding("dion-core", "ok", core or "not installed as a package")]
    for name in sorted({*registry.KNOWN_PACKAGES.values(), *groups.KNOWN_PACKAGES.values()}):
        version = _version(name)
        if version is None:
            findings.append(Finding(name, "optional", "not installed", f"pip install {name}"))
        elif core is not None and version != core:
            found = f"{version} does not match dion-core {core}"
            findings.append(Finding(name, "missing", found, f"pip install {name}=={core}"))
        else:
            findings.append(Finding(name, "ok", version))
    return findings


def _transports() -> Finding:
    try:
        names = ", ".join(available_transports())
    except TransportError as error:
        return Finding("transports", "missing", str(error), "install matching versions of the packages")
    if names:
        return Finding("transports", "ok", names)
    return Finding("transports", "missing", "none: sharded weights need one", "pip install dion-comm-capped")


def _groups() -> list[Finding]:
    """Groups of ranks that torch.distributed does not know, loaded in another process, as MPI is."""
    names = groups.available_groups()
    if not names:
        return [Finding("groups", "optional", "none beside torch.distributed", "pip install dion-comm-mpi")]
    command = [
        sys.executable,
        "-c",
        "from dion_core.groups import loading_errors as e; import json; print(json.dumps(e()))",
    ]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=TRIED_SECONDS)
        errors = json.loads(tried.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError):
        errors = dict.fromkeys(names, "the process that tried it hung or died")
    return [
        Finding(f"group {name}", "optional", errors[name], "see docs/mpi.md")
        if errors.get(name)
        # What is imported when a group is made is in the lines of MPI and CuPy.
        else Finding(f"group {name}", "ok", "installed")
        for name in names
    ]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
