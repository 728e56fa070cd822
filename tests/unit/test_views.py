"""Heads, blocks, flattened convolutions and stacks on one device: each matrix is updated as if it were alone."""

import copy
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dion_core import Dion2, Muon, NorDion2, NorMuon
from dion_core.newton_schulz import NewtonSchulz
from tests.unit.test_errors import matrix, refused

OPTIMIZERS = (Muon, NorMuon, Dion2, NorDion2)
Divide = Callable[[Tensor], list[Tensor]]


def heads(value: Tensor) -> list[Tensor]:
    return list(value.split(4))


def blocks(value: Tensor) -> list[Tensor]:
    return list(value.split((8, 2, 2)))


def flat(value: Tensor) -> list[Tensor]:
    return [value.flatten(1)]


def slices(value: Tensor) -> list[Tensor]:
    return list(value.flatten(0, -3).unbind())


VIEWS: tuple[tuple[tuple[int, ...], Mapping[str, Any], Divide], ...] = (
    ((32, 6), {"num_heads": 8}, heads),
    ((12, 6), {"split_sizes": (8, 2, 2)}, blocks),
    ((64, 8, 3), {"flatten": True}, flat),
    ((8, 4, 3, 3), {"flatten": True}, flat),
    ((12, 6), {"flatten": True, "num_heads": None}, lambda value: [value]),
    ((2, 3, 8, 8), {"flatten": False}, slices),
    ((3, 8, 5), {}, slices),
)
OPTIONS: tuple[Mapping[str, Any], ...] = ({}, {"scale": "rms_norm", "lr": torch.tensor(0.05)})


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("shape", "keys", "divide"), VIEWS, ids=[f"{shape} {keys}" for shape, keys, _ in VIEWS])
def test_every_matrix_is_updated_as_if_alone(
    kind: Any, shape: tuple[int, ...], keys: Mapping[str, Any], divide: Divide
) -> None:
    """The same bits as separate 2-D parameters; the first three experts differ in scale by factors of 10."""
    torch.manual_seed(1)
    for dtype, options in ((torch.float32, OPTIONS[0]), (torch.float64, OPTIONS[1]), (torch.bfloat16, OPTIONS[0])):
        weight = nn.Parameter(torch.randn(shape).to(dtype))
        alone = [nn.Parameter(part.detach().clone()) for part in divide(weight)]
        optimizer, other = kind([{"params": [weight], **keys}], **options), kind(alone, **options)
        for _ in range(4):
            gradient = torch.randn(shape) * 10.0 ** torch.arange(shape[0]).clamp(max=2).view(
                -1, *[1] * (len(shape) - 1)
            )
            weight.grad = gradient.to(dtype)
            for parameter, part in zip(alone, divide(weight.grad), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
            other.step()
        for part, parameter in zip(divide(weight.detach()), alone, strict=True):
            assert torch.equal(part, parameter)
        for name in optimizer.state[weight]:
            for part, parameter in zip(divide(optimizer.state[weight][name]), alone, strict=True):
                assert torch.equal(part, other.state[parameter][name])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_convolutions_of_one_shape_are_orthogonalized_together(kind: Any) -> None:
    seen = []

    class Recorder(NewtonSchulz):
        def __call__(self, rows: Tensor) -> Tensor:
            seen.append(tuple(rows.shape))
            return super().__call__(rows)

    weights = [nn.Parameter(torch.randn(64, 32, 3)) for _ in range(3)]
    options = {"fraction": 1} if kind in (Dion2, NorDion2) else {}  # a whole number means all rows
    optimizer = kind([{"params": weights, "flatten": True}], orthogonalizer=Recorder(), **options)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert seen == [(3, 64, 96)]


@pytest.mark.parametrize(
    ("shape", "keys", "size"), [((8, 4, 3, 3), {"flatten": True}, 8), ((16, 36), {"num_heads": 2}, 8)]
)
def test_scale_comes_from_the_shape_of_a_matrix(shape: tuple[int, ...], keys: Mapping[str, Any], size: int) -> None:
    """8 x 36: rms_norm gives 0.2 * sqrt(36), spectral_norm sqrt(8 / 36)."""
    for scale, factor in (("rms_norm", 0.2 * 6), ("spectral_norm", math.sqrt(8 / 36))):
        torch.manual_seed(2)
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape)
        Muon([{"params": [weight], **keys}], lr=1.0, weight_decay=0.0, scale=scale).step()
        # Eight singular values near 1 in 8 x 36 entries.
        rms = float(weight.detach().view(-1, size, 36)[0].square().mean().sqrt())
        assert rms == pytest.approx(factor * math.sqrt(8 / (8 * 36)), rel=0.1)


def test_every_head_gives_the_same_part_of_its_rows() -> None:
    """The second head's gradient is a thousand times as large, and still has one row of four chosen."""
    for kind in (Dion2, NorDion2):
        weight = nn.Parameter(torch.zeros(8, 6))
        weight.grad = torch.randn(8, 6)
        weight.grad[4:] *= 1000
        kind([{"params": [weight], "num_heads": 2}], fraction=0.25, weight_decay=0.0).step()
        moved = (weight != 0).any(dim=1)
        assert moved.view(2, 4).sum(dim=1).tolist() == [1, 1]
        for fraction in (1, 1.0, 1e-6):  # of whole numbers, and of one row at least
            kind([{"params": [weight], "num_heads": 2}], fraction=fraction).step()


def test_shapes_of_the_state() -> None:
    for shape, keys, rows in (
        ((8, 6), {"num_heads": 2}, (8, 1)),
        ((8, 4, 3, 3), {"flatten": True}, (8, 1)),
        ((2, 3, 8, 6), {"flatten": False}, (2, 3, 8, 1)),
    ):
        weight = matrix(*shape)
        state = NorDion2([{"params": [weight], **keys}]).state[weight]
        assert (state["momentum"].shape, state["second_moment"].shape) == (shape, rows)
        assert state["second_moment"].dtype is torch.float32


def test_report_names_heads_blocks_and_slices() -> None:
    groups = [
        {"params": [("query", matrix(8, 6))], "num_heads": 2},
        {"params": [("fused", matrix(12, 6))], "split_sizes": (8, 2, 2)},
        {"params": [("conv", matrix(8, 4, 3))], "flatten": True},
        {"params": [("experts", matrix(1, 2, 8, 6))], "flatten": False},
    ]
    buckets = Muon(groups).report()["buckets"]
    assert [(bucket["parameters"], bucket["shape"]) for bucket in buckets] == [
        (["query (head 0)", "query (head 1)"], [4, 6]),
        (["fused (block 0)"], [8, 6]),
        (["fused (block 1)", "fused (block 2)"], [2, 6]),
        (["conv"], [8, 12]),
        (["experts (slice 0, 0)", "experts (slice 0, 1)"], [8, 6]),
    ]


# --- convolutions in another memory format


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("same_gradients", [True, False], ids=["plain gradients", "gradients like weights"])
def test_channels_last_gets_the_same_update_to_rounding(kind: Any, same_gradients: bool) -> None:
    """Columns are in another order there, which Newton-Schulz does not see; sums are in another order, too."""
    torch.manual_seed(3)
    value = torch.randn(8, 4, 3, 3, dtype=torch.float64)
    weights = [nn.Parameter(value.clone()), nn.Parameter(value.to(memory_format=torch.channels_last))]
    assert weights[1].stride() != weights[0].stride()
    optimizers = [kind([{"params": [weight], "flatten": True}]) for weight in weights]
    for _ in range(3):
        gradient = torch.randn_like(value)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone() if same_gradients else torch.empty_like(weight).copy_(gradient)
            optimizer.step()
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-6, atol=1e-8)
    assert not torch.equal(weights[0], value)
    assert weights[1].is_contiguous(memory_format=torch.channels_last)


def test_a_checkpoint_moves_between_memory_formats() -> None:
    torch.manual_seed(4)
    value = torch.randn(8, 4, 3, 3, dtype=torch.float64)
    results = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        first = nn.Parameter(value.clone())
        optimizer = NorMuon([{"params": [first], "flatten": True}])
        first.grad = value.cos()
        optimizer.step()
        second = nn.Parameter(first.detach().clone(memory_format=memory_format))
        resumed = NorMuon([{"params": [second], "flatten": True}])
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert resumed.state[second]["momentum"].stride() == second.stride()
        second.grad = value.sin()
        resumed.step()
        results.append(second.detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-8)


def test_a_weight_that_cannot_be_flattened_in_place() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 5)[:, :, :2])
    for kind in OPTIMIZERS:
        groups = [{"params": [("conv.weight", weight)], "flatten": True}]
        refused(lambda kind=kind, g=groups: kind(g), "conv.weight", "(15, 5, 1)", "(4, 3, 2)", "memory format")
    weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    optimizer = Muon([{"params": [("conv.weight", weight)], "flatten": True}])
    weight.grad = torch.randn_like(weight)
    weight.data = weight.data.to(memory_format=torch.channels_last)
    refused(optimizer.step, "conv.weight", "memory format", "before its optimizer is made")


def test_a_convolution_without_the_key_is_a_stack_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "dion_core"):
        Muon([("conv.weight", matrix(8, 4, 3, 3))])
    assert "conv.weight of shape (8, 4, 3, 3) is taken as 32 matrices of 3 x 3; flatten=True" in caplog.text
    caplog.clear()
    for keys in ({"flatten": True}, {"flatten": False}):
        Muon([{"params": [matrix(8, 4, 3, 3)], **keys}])
    Muon([matrix(8, 4, 3)])
    assert not caplog.text


# --- what is refused

BAD_KEYS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"num_heads": 0}, "num_heads=0 in parameter group 0"),
    ({"num_heads": 2.0}, "num_heads=2.0 in parameter group 0"),
    ({"num_heads": True}, "num_heads=True in parameter group 0"),
    ({"split_sizes": ()}, "split_sizes=() in parameter group 0"),
    ({"split_sizes": 4}, "split_sizes=4 in parameter group 0"),
    ({"split_sizes": (4, 0)}, "split_sizes=(4, 0) in parameter group 0"),
    ({"flatten": 1}, "flatten=1 in parameter group 0"),
    ({"flatten": True, "num_heads": 2}, "num_heads=2 and flatten=True in parameter group 0"),
    ({"flatten": True, "split_sizes": (2, 2)}, "split_sizes=(2, 2) and flatten=True in parameter group 0"),
    ({"num_heads": 2, "split_sizes": (2, 2)}, "num_heads=2 and split_sizes=(2, 2) in parameter group 0"),
)


@pytest.mark.parametrize(("keys", "message"), BAD_KEYS, ids=[message for _, message in BAD_KEYS])
def test_keys_that_cannot_be(keys: Mapping[str, Any], message: str) -> None:
    for kind in OPTIMIZERS:
        refused(lambda kind=kind: kind([{"params": [matrix()], **keys}]), message, "allowed")
        optimizer = kind([{"params": [matrix()], "algorithm": "adamw", **keys}])  # nothing to divide there
        assert optimizer.param_groups[0].items() >= keys.items()


BAD_SHAPES: tuple[tuple[tuple[int, ...], Mapping[str, Any], tuple[str, ...]], ...] = (
    ((10, 6), {"num_heads": 4}, ("num_heads=4", "10 rows", "(10, 6)")),
    ((10, 6), {"split_sizes": (4, 4)}, ("split_sizes=(4, 4)", "8 rows", "has 10")),
    ((2, 10, 6), {"num_heads": 5}, ("num_heads=5", "(2, 10, 6)")),
    ((2, 10, 6), {"split_sizes": (1, 1)}, ("split_sizes=(1, 1)", "(2, 10, 6)")),
    ((10,), {"flatten": True}, ("(10,)", "not a matrix")),
)


@pytest.mark.parametrize(("shape", "keys", "message"), BAD_SHAPES)
def test_shapes_that_cannot_be_divided(
    shape: tuple[int, ...], keys: Mapping[str, Any], message: tuple[str, ...]
) -> None:
    for kind in OPTIMIZERS:
        groups = [{"params": [("qkv.weight", matrix(*shape))], **keys}]
        refused(lambda kind=kind, g=groups: kind(g), "qkv.weight", *message)
        kind([{**groups[0], "algorithm": "lion", "lr": 1e-4}])
        optimizer = kind([matrix()])
        refused(lambda optimizer=optimizer, g=groups: optimizer.add_param_group(g[0]), "qkv.weight", *message)
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("key", "before", "after"), [
    ("num_heads", None, 2),
    ("num_heads", 2, 4),
    ("split_sizes", (2, 2), (1, 3)),
    ("split_sizes", [2, 2], None),
    ("flatten", True, False),
])  # fmt: skip
def test_a_change_between_steps_is_refused(key: str, before: Any, after: Any) -> None:
    weight = matrix()
    weight.grad = torch.eye(4)
    optimizer = NorDion2([{"params": [matrix()]}, {"params": [weight], key: before}])
    optimizer.param_groups[1][key] = after
    refused(optimizer.step, f"{key}={after!r} in parameter group 1", "cannot change")
    assert torch.equal(weight, torch.ones(4, 4))
    optimizer.param_groups[1][key] = before
    optimizer.step()
    assert not torch.equal(weight, torch.ones(4, 4))


def test_a_list_changed_in_place_is_noticed() -> None:
    optimizer = Muon([{"params": [matrix()], "split_sizes": [2, 2]}])
    optimizer.param_groups[0]["split_sizes"][:] = [1, 3]
    refused(optimizer.step, "split_sizes=(1, 3) in parameter group 0", "(2, 2)")


def test_saved_keys_that_do_not_fit_the_weights() -> None:
    saved = Muon([{"params": [matrix(4, 4)], "num_heads": 2}]).state_dict()
    saved["param_groups"][0]["num_heads"] = 3
    weight = matrix(4, 4)
    optimizer = Muon([{"params": [("query", weight)], "num_heads": 2}])
    refused(lambda: optimizer.load_state_dict(saved), "query", "num_heads=3")
    weight.grad = torch.eye(4)
    optimizer.step()
