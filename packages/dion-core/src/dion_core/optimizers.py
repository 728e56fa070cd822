"""The four optimizers: Muon, NorMuon, Dion2, and NorDion2, which is Dion3.

| optimizer | rows applied in a step | normalization |
|---|---|---|
| Muon | all | none |
| NorMuon | all | per neuron |
| Dion2 | a fraction, global or local choice | none |
| NorDion2 | a fraction, global or local choice | per neuron |

Options that all share:
    params: parameters, named parameters, or groups of either. A group may override any option below except
        `transport`, `nonfinite`, `group` and `state`, and has two more: `algorithm`, "matrix" (default, for 2-D
        parameters), "adamw" or "lion" (any shape; with an lr of their own, 0.02 is far too high for them), and
        `shard`, a `DeclaredShard`, which says that plain tensors are parts of whole ones.
    lr: learning rate, a float or a 0-dim tensor.
    momentum: decay of what was applied: the momentum of Muon, the error feedback of Dion2.
    weight_decay: decoupled; a step multiplies the weights by 1 - lr * weight_decay.
    scale: factor of lr by the global shape: "spectral_norm" sqrt(rows / columns), "rms_norm"
        0.2 * sqrt(max(rows, columns)), or None.
    transport: the name of an installed transport, an instance with options, or "auto": the best exact one that
        is installed. Matrices that lie whole on a rank or are replicated need none.
    orthogonalizer: "auto", a name, or an object as described by `newton_schulz.Orthogonalizer`.
    momentum_dtype: of the momentum; None takes the parameter's.
    wire_dtype: of rows between ranks; None takes bf16 for half-precision momentum, else the momentum's dtype.
    nonfinite: "rows" leaves a row whose gradient holds a non-finite value out of the momentum and goes on;
        "skip" leaves the whole step out on all ranks.
    betas, epsilon: of the AdamW and Lion groups.
    maximize: go along the gradient.
    group: process group (or 1-D DeviceMesh) of replicated plain tensors, as DDP has them; their ranks then
        share the work. DTensors say themselves where they lie. Also the name of an installed group ("mpi", "nccl") or
        a communicator of mpi4py: then nothing is sent through torch.distributed.
    state: "like_parameters": momentum and second moments lie as their parameters do. "layerwise", or `LayerWise(...)`
        with options: of replicated parameters each rank keeps the state of those that it owns, 1 / W of it.

All raise ValueError or TransportError at construction for what is not allowed, on every rank alike.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from dion_core.layerwise import StateOption
from dion_core.membership import ProcessGroupLike
from dion_core.newton_schulz import Orthogonalizer
from dion_core.normalization import NeuronNormalizer, NoNormalizer
from dion_core.optimizer import MatrixOptimizer, Parameters
from dion_core.rules import Rule, Scale
from dion_core.transport import Scope, Transport

Nonfinite = Literal["rows", "skip"]


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")}


class Muon(MatrixOptimizer):
    """Muon (Jordan et al. 2024): every row of the momentum, orthogonalized.

    Options besides the shared ones (see the module): `nesterov` orthogonalizes gradient + momentum * buffer;
    `cautious_weight_decay` decays only weights whose sign agrees with their update.
    """

    rule = Rule(NoNormalizer(), chooses_rows=False)

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        nesterov: bool = False,
        cautious_weight_decay: bool = False,
        scale: Scale = "spectral_norm",
        transport: str | Transport = "auto",
        orthogonalizer: str | Orthogonalizer = "auto",
        momentum_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        nonfinite: Nonfinite = "rows",
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        maximize: bool = False,
        group: ProcessGroupLike = None,
        state: StateOption = "like_parameters",
    ) -> None:
        super().__init__(params, _options(locals()))


class NorMuon(MatrixOptimizer):
    """NorMuon (Li et al. 2025): Muon, each row divided by the root of its second moment.

    Options besides the shared ones (see the module): those of Muon, and `beta2`, the decay of the second moment.
    """

    rule = Rule(NeuronNormalizer(), chooses_rows=False)

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        beta2: float = 0.95,
        weight_decay: float = 0.01,
        nesterov: bool = False,
        cautious_weight_decay: bool = False,
        scale: Scale = "spectral_norm",
        transport: str | Transport = "auto",
        orthogonalizer: str | Orthogonalizer = "auto",
        momentum_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        nonfinite: Nonfinite = "rows",
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        maximize: bool = False,
        group: ProcessGroupLike = None,
        state: StateOption = "like_parameters",
    ) -> None:
        super().__init__(params, _options(locals()))


class Dion2(MatrixOptimizer):
    """Dion2 (Ahn et al. 2025): the rows of the highest L1 norm, orthogonalized; the rest stays as error feedback.

    Options besides the shared ones (see the module): `fraction` of the rows to apply in a step; `scope`,
    "global" (the best rows of the whole matrix), "local" (of every shard), "all", or None (the transport's).
    """

    rule = Rule(NoNormalizer(), chooses_rows=True)

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 0.02,
        *,
        fraction: float = 0.25,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        scale: Scale = "spectral_norm",
        transport: str | Transport = "auto",
        scope: Scope | None = None,
        orthogonalizer: str | Orthogonalizer = "auto",
        momentum_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        nonfinite: Nonfinite = "rows",
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        maximize: bool = False,
        group: ProcessGroupLike = None,
        state: StateOption = "like_parameters",
    ) -> None:
        super().__init__(params, _options(locals()))


class NorDion2(MatrixOptimizer):
    """NorDion2, also called Dion3: Dion2 with NorMuon's normalization of the applied rows.

    Options besides the shared ones (see the module): those of Dion2, and `beta2`, the decay of the second moment.
    """

    rule = Rule(NeuronNormalizer(), chooses_rows=True)

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor = 0.02,
        *,
        fraction: float = 0.25,
        momentum: float = 0.95,
        beta2: float = 0.95,
        weight_decay: float = 0.01,
        scale: Scale = "spectral_norm",
        transport: str | Transport = "auto",
        scope: Scope | None = None,
        orthogonalizer: str | Orthogonalizer = "auto",
        momentum_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
        nonfinite: Nonfinite = "rows",
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        maximize: bool = False,
        group: ProcessGroupLike = None,
        state: StateOption = "like_parameters",
    ) -> None:
        super().__init__(params, _options(locals()))


Dion3 = NorDion2
