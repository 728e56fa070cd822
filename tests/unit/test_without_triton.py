"""Without Triton, and without what only other ways of communicating need, everything imports and steps run."""

import subprocess
import sys

PROGRAM = """
import sys

for name in ("triton", "mpi4py", "cupy"):
    sys.modules[name] = None  # its import raises

import torch
import dion_core
import dion_comm_capped, dion_comm_nccl, dion_comm_varlen

for name in ("Muon", "NorMuon", "Dion2", "NorDion2"):
    weight, bias = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(3))
    optimizer = getattr(dion_core, name)([{"params": [weight]}, {"params": [bias], "algorithm": "adamw", "lr": 0.1}])
    weight.grad, bias.grad = torch.eye(4), torch.ones(3)
    optimizer.step()
    assert not torch.equal(weight, torch.ones(4, 4))
    assert not torch.equal(bias, torch.ones(3))
print(sorted(dion_core.available_transports()))
"""


def test_c44_steps_run_where_optional_packages_are_absent() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['capped', 'full', 'local', 'uniform', 'varlen']"
