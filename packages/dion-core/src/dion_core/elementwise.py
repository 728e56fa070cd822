"""AdamW and Lion for the parameters that are not matrices, masked on the device.

Every list has one entry per parameter, all tensors are plain local ones (a DTensor is unwrapped by the
caller), and ``active`` holds one 0-dim float32 flag per parameter: 1.0 where some rank has a gradient and the
step is not skipped, else 0.0. A flag is only ever a mask on the device. Where it is 0.0 the weight, the state
and the step count keep their bits; where it is 1.0, a gradient that is None on this rank counts as zero.
Gradient elements that are not finite (in the parameter's dtype) count as zero too and poison nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

State = dict[str, Tensor]

# The fused CPU kernel rounds the elements after the last whole vector register differently from all others,
# so that bits would depend on where a shard ends. A multiple of this many elements leaves no such remainder.
_CPU_MULTIPLE = 64


def adamw_state(param: Tensor) -> State:
    """The state of a parameter (any shape, floating dtype, also a DTensor) that AdamW has not stepped yet.

    Returns:
        ``step``, a plain 0-dim float32 on the parameter's device; ``exp_avg`` and ``exp_avg_sq``, zeros like
        the parameter (its dtype, also fp16, where a second moment above 65504 overflows as it does in torch).
    """
    return {
        "step": torch.zeros((), dtype=torch.float32, device=param.device),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
    }


def lion_state(param: Tensor) -> State:
    """The state of a parameter that Lion has not stepped yet: ``exp_avg``, zeros like it (also a DTensor)."""
    return {"exp_avg": torch.zeros_like(param)}


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    states: Sequence[State],
    active: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float,
    maximize: bool,
) -> None:
    """Parameters whose flag is 1.0 have made one step of torch's fused AdamW, the others are untouched.

    Parameters that share one flag (the same tensor object) go to torch in one call.

    Args:
        params: changed in place; any shapes, floating dtypes and strides, mixed at will.
        grads: of the parameter's shape, in any floating dtype (cast to the parameter's), or None.
        states: as from :func:`adamw_state`, changed in place; any strides.
        active: 0-dim float32 flags on the parameters' devices, exactly 0.0 or 1.0.
        lr: a float, or a 0-dim tensor on the CPU or on the parameters' device.
        betas: decay of the first and of the second moment.
        weight_decay: decoupled; a step multiplies the weight by ``1 - lr * weight_decay``.
        epsilon: added to the root of the second moment.
        maximize: step along the gradient instead of against it.

    Raises:
        ValueError: the lists have different lengths.
    """
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        lr = lr.float()  # the CUDA kernel reads it through a float pointer
    operands = [_Operands.of(*each) for each in zip(params, grads, states, strict=True)]
    for flag, members in _by_flag(operands, active):
        adamw(
            [each.param for each in members],
            [each.grad for each in members],
            [each.exp_avg for each in members],
            [each.exp_avg_sq for each in members],
            [],
            [each.step for each in members],
            fused=True,
            found_inf=1.0 - flag,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=epsilon,
            maximize=maximize,
        )
    for each in operands:
        each.write_back()


@torch.no_grad()
def lion_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    states: Sequence[State],
    active: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    maximize: bool,
) -> None:
    """Parameters whose flag is 1.0 have made one step of Lion (arXiv 2302.06675), the others are untouched.

    ``X = (1 - lr * weight_decay) * X - lr * sign(beta1 * M + (1 - beta1) * G)``, then
    ``M = beta2 * M + (1 - beta2) * G``; computed in at least fp32, M and X rounded once into their dtypes.

    Args:
        params: as for :func:`adamw_`.
        grads: as for :func:`adamw_`.
        states: as from :func:`lion_state`, changed in place; any strides.
        active: as for :func:`adamw_`.
        lr: as for :func:`adamw_`.
        betas: beta1 mixes the direction of the step, beta2 is the decay of the momentum.
        weight_decay: as for :func:`adamw_`.
        maximize: as for :func:`adamw_`.

    Raises:
        ValueError: the lists have different lengths.
    """
    for param, grad, state, flag in zip(params, grads, states, active, strict=True):
        compute_dtype = torch.promote_types(param.dtype, torch.float32)
        gradient = _finite_gradient(param, grad).to(compute_dtype)
        if maximize:
            gradient = -gradient
        exp_avg = state["exp_avg"]
        momentum = exp_avg.to(compute_dtype)
        # Plain products and sums, no lerp: whole vectors and the remainder then round alike.
        direction = torch.sign(momentum * betas[0] + gradient * (1 - betas[0]))
        weight = param.to(compute_dtype) * (1 - lr * weight_decay) - direction * lr
        momentum = momentum * betas[1] + gradient * (1 - betas[1])
        moves = flag != 0
        param.copy_(torch.where(moves, weight.to(param.dtype), param))
        exp_avg.copy_(torch.where(moves, momentum.to(exp_avg.dtype), exp_avg))


@dataclass(frozen=True)
class _Operands:
    """One parameter as the fused kernel wants it: dense, equal strides (unchecked), no remainder on a CPU."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    staged: tuple[tuple[Tensor, Tensor], ...]  # (caller's tensor, the flat copy that the kernel changes)

    @classmethod
    def of(cls, param: Tensor, grad: Tensor | None, state: State) -> "_Operands":
        """The caller's own tensors where the kernel can use them as they are, else flat copies."""
        gradient = _finite_gradient(param, grad)
        originals = (param, state["exp_avg"], state["exp_avg_sq"])
        # The gradient is freshly allocated and so dense: equal strides make the others dense too.
        alike = all(each.stride() == gradient.stride() for each in originals)
        if alike and (param.device.type != "cpu" or param.numel() % _CPU_MULTIPLE == 0):
            return cls(param, gradient, originals[1], originals[2], state["step"], staged=())
        copies = [_flat_padded(each) for each in originals]
        staged = tuple(zip(originals, copies, strict=True))
        return cls(copies[0], _flat_padded(gradient), copies[1], copies[2], state["step"], staged)

    def write_back(self) -> None:
        """The caller's tensors hold what the kernel left in the copies."""
        for original, copy in self.staged:
            original.copy_(copy[: original.numel()].view(original.shape))


def _by_flag(operands: Sequence[_Operands], active: Sequence[Tensor]) -> list[tuple[Tensor, list[_Operands]]]:
    """The operands grouped by flag object; flags are compared by identity, never by value."""
    groups: dict[int, tuple[Tensor, list[_Operands]]] = {}
    for each, flag in zip(operands, active, strict=True):
        groups.setdefault(id(flag), (flag, []))[1].append(each)
    return list(groups.values())


def _finite_gradient(param: Tensor, grad: Tensor | None) -> Tensor:
    """A fresh dense gradient of the parameter's shape, dtype and, where that is dense, strides.

    Missing and non-finite elements are zero.
    """
    if grad is None:
        return torch.zeros_like(param)
    # Cast first: a finite fp32 value may overflow in fp16.
    finite = torch.nan_to_num(grad.to(param.dtype), nan=0.0, posinf=0.0, neginf=0.0)
    return finite if finite.stride() == param.stride() else torch.empty_like(param).copy_(finite)


def _flat_padded(tensor: Tensor) -> Tensor:
    """A contiguous 1-D copy, filled up with zeros to a multiple of ``_CPU_MULTIPLE`` elements."""
    num_elements = tensor.numel()
    flat = tensor.new_zeros(-(-num_elements // _CPU_MULTIPLE) * _CPU_MULTIPLE)
    flat[:num_elements].view(tensor.shape).copy_(tensor)
    return flat
