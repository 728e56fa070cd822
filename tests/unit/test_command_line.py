"""The command `dion`: what it prints, in tables and in JSON, and how it ends."""

import builtins
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import dion_core.cli
from dion_core import available_transports
from dion_core.cli import doctor
from dion_core.cli.app import app
from dion_core.inventories import INVENTORIES
from dion_core.prediction.machine import load

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
BUILDER = """
import torch
from torch import nn


def model():
    hidden = nn.Sequential(nn.Linear(64, 192), nn.Linear(192, 64))
    return nn.Sequential(nn.Embedding(128, 64), hidden, nn.Linear(64, 128))


def huge():
    layers = [nn.Sequential(nn.Linear(2**20, 2**20, bias=False)) for _ in range(4)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers)})
"""


def dion(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def dion_json(*arguments: str, code: int = 0) -> Any:
    return json.loads(dion(*arguments, "--json", code=code).stdout)


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working directory that builds models."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = f"builder_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(BUILDER)
    return name


def test_transports_says_what_each_serves() -> None:
    rows = {row.pop("name"): row for row in dion_json("transports")["transports"]}
    assert list(rows) == list(available_transports())
    assert rows["varlen"] == {
        "scopes": ["global", "all"],
        "layouts": ["columns", "rows"],
        "host_reads_per_step": 1,
        "may_defer": False,
        "package": "dion-comm-varlen",
        "version": version("dion-comm-varlen"),
    }
    assert rows["capped"]["may_defer"]
    assert rows["capped"]["host_reads_per_step"] == 0
    assert rows["local"]["scopes"] == ["local"]
    line = next(line for line in dion("transports").stdout.splitlines() if line.startswith("full"))
    assert line.split() == [
        "full",
        "global,",
        "all",
        "columns,",
        "rows",
        "0",
        "no",
        "dion-comm-nccl",
        version("dion-core"),
    ]


def test_transports_fails_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dion_core.registry.entry_points", lambda group: [])
    assert "pip install dion-comm-capped" in dion("transports", code=1).stderr
    assert dion_json("transports", code=1)["transports"] == []


def test_transports_lists_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"package": "dion-comm-mpi", "version": version("dion-comm-mpi")}
    assert dion_json("transports")["groups"] == [{"name": "mpi", **ours}, {"name": "nccl", **ours}]
    lines = [line.split() for line in dion("transports").stdout.splitlines()]
    assert ["mpi", *ours.values()] in lines
    monkeypatch.setattr("dion_core.cli.transports.entry_points", lambda group: [])
    monkeypatch.setattr("dion_core.cli.transports.described", lambda: [])
    assert dion_json("transports", code=1)["groups"] == []


REAL_RUN = subprocess.run


@cache
def tried(command: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """What a process of this environment says, which was found once."""
    return REAL_RUN(command, capture_output=True, text=True, timeout=doctor.TRIED_SECONDS)


@pytest.fixture
def tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dion doctor` starts a process for the MPI library and for the groups once for all tests."""
    monkeypatch.setattr(subprocess, "run", lambda command, **options: tried(tuple(command)))


tries_once = pytest.mark.usefixtures("tried_once")


def findings(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str | None]) -> Any:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions[name] if name in versions else real(name))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    content = json.loads(result.stdout)
    assert result.exit_code == (0 if content["healthy"] else 1)
    return content["healthy"], {each["what"]: each for each in content["findings"]}


def test_doctor_finds_this_environment() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    content = json.loads(result.stdout)
    found = {each["what"]: each for each in content["findings"]}
    assert found["torch"]["found"] == torch.__version__
    assert found["transports"]["found"] == ", ".join(available_transports())
    assert {"CUDA", "Triton", "MPI", "CuPy", "dion-core", "dion-comm-nccl", "dion-comm-mpi"} <= set(found)
    assert found["group mpi"]["state"] == "ok"
    assert found["group nccl"]["state"] == ("ok" if found["CuPy"]["state"] == "ok" else "optional")
    assert result.exit_code == (0 if content["healthy"] else 1)
    for each in found.values():
        assert each["state"] == "ok" or each["remedy"], each
    shown = CliRunner().invoke(app, ["doctor"]).stdout
    assert max(map(len, shown.splitlines())) <= doctor.COLUMNS == 80
    for each in found.values():
        assert each["what"] in shown
        assert {*each["found"].split(), *each["remedy"].split()} <= set(shown.split())


@tries_once
def test_doctor_refuses_versions_that_do_not_match(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy, found = findings(monkeypatch, {"dion-comm-nccl": "0.0.9"})
    assert not healthy
    assert found["dion-comm-nccl"] == {
        "what": "dion-comm-nccl",
        "state": "missing",
        "found": f"0.0.9 does not match dion-core {version('dion-core')}",
        "remedy": f"pip install dion-comm-nccl=={version('dion-core')}",
    }


@tries_once
def test_doctor_takes_what_is_optional_for_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy, found = findings(monkeypatch, {"triton": "3.5.1", "dion-comm-varlen": None})
    assert healthy
    assert found["Triton"]["state"] == found["dion-comm-varlen"]["state"] == "optional"
    assert found["Triton"]["remedy"] == "pip install 'torch==2.11.*'"
    assert found["dion-comm-varlen"]["remedy"] == "pip install dion-comm-varlen"


@pytest.mark.parametrize(("code", "found"), [(0, "mpi4py 9.9, A Library 1"), (1, "mpi4py 9.9, without a library")])
def test_doctor_tries_the_mpi_library(code: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        mpi = "from mpi4py import MPI" in command[-1]
        errors = {"mpi": "no library", "nccl": ""} if code else {}
        return subprocess.CompletedProcess(command, code, "A Library 1\n" if mpi else json.dumps(errors), "")

    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(__version__="9.9"))
    monkeypatch.setattr(subprocess, "run", run)
    healthy, all_found = findings(monkeypatch, {})
    assert healthy
    assert all_found["MPI"]["found"] == found
    assert bool(all_found["MPI"]["remedy"]) == bool(code)
    assert all_found["group mpi"]["state"] == ("optional" if code else "ok")
    assert all_found["group mpi"]["found"] == ("no library" if code else "installed")


@tries_once
def test_doctor_says_how_groups_are_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dion_core.groups.entry_points", lambda group: [])
    _, found = findings(monkeypatch, {"dion-comm-mpi": None})
    assert found["groups"]["remedy"] == found["dion-comm-mpi"]["remedy"] == "pip install dion-comm-mpi"
    assert found["groups"]["state"] == "optional"


@tries_once
def test_doctor_looks_at_pairs_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "get_device_name": lambda number: "GPU",
        "can_device_access_peer": lambda one, other: {one, other} != {0, 2},
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    _, found = findings(monkeypatch, {})
    assert found["CUDA"]["found"] == "13.0, 3 x GPU"
    assert found["NCCL"]["state"] == "missing"
    assert found["peer access"]["found"] == "not between GPUs 0 and 2, 2 and 0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert findings(monkeypatch, {})[1]["CUDA"]["state"] == "missing"


def test_plan_of_an_inventory() -> None:
    content = dion_json("plan", "5120x8", "--nodes", "2", "--gpus-per-node", "4")
    assert content["mesh"] == "8 ranks: 2 nodes x 4 GPUs; shard 8"
    found = {each["transport"]: each for each in content["transports"]}
    assert list(found) == list(available_transports())
    assert round(found["full"]["bytes"]["mean"] / 1e6) == 1271
    assert round(found["local"]["bytes"]["mean"] / 1e6) == 318
    sent = found["local"]["bytes"]["busiest_rank"]
    assert sent["total"] == sent["itself"] + sent["in_node"] + sent["between"]
    # Four of eight ranks are on the other node, three beside this one.
    assert sent["between"] / sent["in_node"] == pytest.approx(4 / 3)
    assert found["capped"]["bytes"]["first_step"] == found["full"]["bytes"]["first_step"]
    assert found["varlen"]["host_reads_per_step"] == 1
    owners = [bucket["owners"] for bucket in found["local"]["buckets"]]
    assert sorted(map(len, owners)) == sorted(INVENTORIES["5120x8"].values())
    assert content["recommendation"]["transport"] == "capped"


def test_plan_tells_people_the_same() -> None:
    text = dion("plan", "5120x8", "--nodes", "2", "--gpus-per-node", "4").stdout
    lines = [line.split() for line in text.splitlines()]
    assert next(line for line in lines if line[:1] == ["local"])[:6] == ["local", "43", "123", "164", "329", "318"]
    assert lines[-1][:2] == ["take", "capped:"]


def test_links_decide_the_times() -> None:
    def exchange(*options: str) -> float:
        content = dion_json("plan", "5120x8", "--nodes", "2", "--gpus-per-node", "4", "--transport", "full", *options)
        return float(content["transports"][0]["seconds"]["stages"]["exchange"])

    slow, fast = exchange("--between", "10"), exchange("--between", "40")
    assert slow == pytest.approx(4 * fast, rel=0.01)
    assert exchange("--link", "25.2") == pytest.approx(1317e6 / 25.2e9, rel=0.05)
    dion("plan", "5120x8", "--link", "0", code=2)


def test_blocks_are_those_of_the_review() -> None:
    content = dion_json("plan", "5120x8", "--nodes", "4", "--gpus-per-node", "4", "--blocks", "--link", "12.5")
    full, local, capped = content["transports"]
    assert [round(each["bytes"]["mean"] / 1e6, 1) for each in (full, local, capped)] == [734.0, 183.5, 205.1]
    assert 1e3 * full["seconds"]["stages"]["exchange"] == pytest.approx(58.7, rel=0.05)


def test_amdahl_ratios() -> None:
    table = dion_json("plan", "5120x8", "--gpus-per-node", "2", "--amdahl")["amdahl"]
    assert table["by_fraction"]["bytes_sent"] == 2.0
    assert table["by_fraction"]["all_rows"] == 1.0
    assert table["by_world"]["all_rows"] == 0.5
    assert [(row["world_size"], row["fraction"]) for row in table["values"]] == [
        (2, 0.25),
        (2, 0.5),
        (4, 0.25),
        (4, 0.5),
    ]
    text = dion("plan", "5120x8", "--gpus-per-node", "2", "--amdahl").stdout
    assert next(line for line in text.splitlines() if line.startswith("sent by a rank")).split()[-2:] == ["x", "2.00"]
    dion("plan", "5120x8", "--amdahl", "--fraction", "0.75", code=1)


def test_sweep_to_4096_ranks(builder: str, tmp_path: Path) -> None:
    picture = tmp_path / "sweep.png"
    options = ("plan", f"{builder}:model", "--sweep", "world", "--png", str(picture), "--transport", "full")
    points = dion_json(*options)["sweep"]
    assert [point["world_size"] for point in points] == [2**power for power in range(1, 13)]
    assert [each["transport"] for each in points[0]["transports"]] == ["full"]
    assert all(each["seconds"]["step"] > 0 for point in points for each in point["transports"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    dion("plan", "1b", "--png", str(picture), code=2)


def test_sweep_shows_what_grows() -> None:
    """Bytes of full at 2, 4 and 8 ranks; each step's transport to take."""
    text = dion(
        "plan", "5120x8", "--sweep", "world", "--largest", "8", "--transport", "full", "--transport", "local"
    ).stdout
    sent = text.split("MB sent")[1].splitlines()
    assert [line.split() for line in sent[2:5]] == [
        ["2", "5,112", "1,278", "full"],
        ["4", "2,582", "646", "full"],
        ["8", "1,317", "329", "full"],
    ]


def test_plan_of_a_builder_allocates_nothing(builder: str) -> None:
    """Four matrices of 2^40 elements, 8 TB: shapes are enough. A shard gives a quarter of its rows, 2^37 bytes.

    Each of four ranks sends that of four matrices, and the results of the one that it owns to four ranks.
    """
    found = dion_json("plan", f"{builder}:huge", "--transport", "local", "--gpus-per-node", "4")["transports"][0]
    assert found["bytes"]["first_step"] == (4 + 4) * 2**37


def test_plan_of_a_config(tmp_path: Path) -> None:
    """Heads and embeddings are no matrices; two layers of query, key, value, output, gate, up and down are."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = dion_json("plan", str(path), "--gpus-per-node", "2", "--transport", "local")["transports"][0]
    shapes = {tuple(bucket["shape"]): len(bucket["owners"]) for bucket in found["buckets"]}
    assert shapes == {(64, 64): 4, (32, 64): 4, (192, 64): 4, (64, 192): 2}
    assert found["seconds"]["stages"]["elementwise"] > 0


def test_layouts_that_cannot_be(builder: str) -> None:
    model = f"{builder}:model"
    assert "must be nodes 1 * 4 GPUs" in dion("plan", model, "--gpus-per-node", "4", "--shard", "3", code=2).stderr
    replicated = dion_json("plan", model, "--gpus-per-node", "4", "--replicate", "4")
    assert [each["transport"] for each in replicated["transports"]] == ["(none)"]
    assert replicated["recommendation"]["transport"] is None
    muon = dion_json("plan", model, "--gpus-per-node", "4", "--optimizer", "muon")["transports"]
    assert {each["transport"] for each in muon if "refused" in each} == {"capped", "local"}
    dion("plan", model, "--gpus-per-node", "4", "--optimizer", "muon", "--transport", "local", code=1)
    refused = dion_json("plan", model, "--transport", "pigeon", code=1)["transports"]
    assert "transport='pigeon' is not installed" in refused[0]["refused"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nothing"], "is no model"),
        (["plan", "1b", "--fraction", "1.5"], "fraction=1.5 is not allowed"),
        (["plan", "1b", "--machine", "nothing.json"], "no machine profile can be read"),
        (["plan", "1b", "--optimizer", "muon", "--amdahl"], "--amdahl varies the fraction"),
        (["plan", "1b", "--optimizer", "muon", "--blocks"], "--blocks is for"),
        (["bench", "--out", "no/such/folder/m.json"], "is no folder"),
    ],
)
def test_wrong_usage_ends_with_2(arguments: Sequence[str], message: str) -> None:
    assert message in dion(*arguments, code=2).stderr


def test_bench_keeps_a_profile_that_plan_reads(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    options = ("bench", "--out", str(path), "--side", "16", "--side", "8", "--copy-mib", "1")
    content = dion_json(*options)
    machine = load(path)
    assert [side for side, _ in machine.newton_schulz] == [8, 16]
    assert machine.copy > 0
    assert "assumed as of an H200" in machine.name
    assert content["machine"]["copy"] == machine.copy
    planned = dion_json("plan", "5120x8", "--machine", str(path), "--transport", "local")
    assert planned["machine"] == machine.describe()
    # Every side is beyond the last one measured.
    local = planned["transports"][0]
    flops, seconds = local["newton_schulz"]["flops"], local["seconds"]["stages"]["newton_schulz"]
    assert seconds == pytest.approx(flops / machine.newton_schulz[-1][1], rel=0.05)
    assert f"written to {path}" in dion(*options).stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_how_to_get_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SystemExit) as ended:
        dion_core.cli.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"dion: the command line needs {missing}, which is not installed: pip install 'dion-core[cli]'\n"
    )


def test_main_runs_the_app(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["dion", "transports", "--json"])
    with pytest.raises(SystemExit) as ended:
        dion_core.cli.main()
    assert ended.value.code == 0
    assert list(json.loads(capsys.readouterr().out)) == ["transports", "groups"]
