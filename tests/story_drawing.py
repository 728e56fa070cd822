"""Draws stories: parameters of every kind, layouts by name, options, steps, saves and loads."""

import math
from typing import Any

import torch
from hypothesis import strategies as st

from tests.stories import Matrix, Phase, Step, Story
from tests.story_places import Spot, split_dim
from tests.training import MATRIX_FAMILY, OPTIMIZERS, transports_and_scopes

MOST_STEPS = 8

FLAT = ("shard0", "shard1", "replicate", "ddp", "plain", "mixed")
"""Layouts on one axis: all split by rows, or by another dimension, copies, tensors of one's own, or each in its way."""
MESHES = ("hsdp", "tiles", "strided", "meshes")
"""Layouts on several axes: copies of rows, rows and columns, one dimension twice, and anything on up to three."""
KINDS = (*FLAT, *MESHES, "layerwise", "moving")
"""Beside these state that owners keep, and a layout of its own for every phase."""

SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "plain": ((1,), (2,)),
    "hsdp": ((2, 1), (1, 2), (1, 3), (2, 2), (4, 1)),
    "tiles": ((1, 2), (3, 1), (2, 2), (2, 2)),
    "strided": ((2, 1), (1, 3), (2, 2), (2, 2)),
    "meshes": ((1, 1), (2, 1), (1, 3), (2, 2), (2, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)),
    "eight": ((2, 2, 2), (2, 4), (8,)),
}
ORDERS = {4: ((), (), (3, 1, 0, 2), (0, 2, 1, 3))}
"""Of the ranks on a mesh of several axes."""
WAYS = ("parts", "full_state_dict", "sharded", "flattened")
"""torch's whole state dicts are not among them: it cannot place those on strided shards, nor gather them in order."""


def some(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


small = st.one_of(st.integers(1, 12), some(17, 33))


@st.composite
def matrices(draw: st.DrawFn) -> Matrix:
    """A parameter of the matrix algorithm, most often one matrix."""
    view = draw(some(None, None, None, "num_heads", "split_sizes", "flatten", "stack"))
    turned = draw(some(False, False, False, True))
    if view == "num_heads":
        heads = draw(st.integers(1, 4))
        return Matrix((heads * draw(st.integers(1, 6)), draw(small)), (view, heads), turned)
    if view == "split_sizes":
        sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
        return Matrix((sum(sizes), draw(small)), (view, sizes), turned)
    if view == "flatten":
        rest = draw(some((2, 3), (3, 2, 2), (5,), (1, 4), (4, 1, 3)))
        return Matrix((draw(small), *rest), (view, True), turned)
    if view == "stack":
        leading = draw(some((1,), (2,), (3,), (5,), (2, 3)))
        shape = (*leading, draw(st.integers(1, 9)), draw(st.integers(1, 9)))
        return Matrix(shape, ("flatten", False) if len(shape) > 3 else None)
    return Matrix((draw(small), draw(small)), None, turned)


@st.composite
def stories(draw: st.DrawFn, kind: str) -> Story:
    """A story in which parameters lie as `kind` says."""
    drawn = tuple(draw(st.lists(matrices(), min_size=1, max_size=3)))
    drawn += drawn[:1] * draw(st.integers(0, 2))  # of one shape, so that buckets hold several
    vectors = st.lists(some((7,), (1,), (5, 3), (2, 3, 4)), max_size=2).map(tuple)
    adamw, lion = draw(vectors), draw(vectors)
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    scope, transports = draw(st.sampled_from(ways(optimizer)))
    base = Story(drawn, adamw, lion, draw(st.integers(0, 2**20)), torch.float64, optimizer, (), (), ())
    phases = draw(phases_of(base, kind, transports))
    names = list(base.shapes)
    steps = tuple(draw(steps_of(names)) for _ in range(sum(phase.num_steps for phase in phases)))
    scoped = () if scope is None else (("scope", scope),)
    story = Story(drawn, adamw, lion, base.seed, torch.float64, optimizer, scoped, phases, steps)
    dtype = torch.float64
    if story.num_exact == len(phases):  # else no bits are promised, so that the reference must judge
        dtype = draw(some(torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16))
    options = draw(options_of(optimizer, dtype)) + scoped
    return Story(drawn, adamw, lion, base.seed, dtype, optimizer, options, phases, steps)


def ways(optimizer: str) -> list[tuple[str | None, tuple[str, ...]]]:
    """Every scope, and the transports that serve it."""
    by_scope: dict[str | None, list[str]] = {}
    for way in transports_and_scopes(optimizer):
        transport = way["transport"]
        name = transport if isinstance(transport, str) else type(transport).__name__.lower()
        by_scope.setdefault(way.get("scope"), []).append(name)
    found = [(scope, tuple(names)) for scope, names in by_scope.items()]
    return found + [way for way in found if way[0] == "global"]  # the one that most transports serve


@st.composite
def options_of(draw: st.DrawFn, optimizer: str, dtype: torch.dtype) -> tuple[tuple[str, Any], ...]:
    """Options beside transport and scope, each given or left to its default."""
    choices: dict[str, st.SearchStrategy[Any]] = {
        "momentum": some(0.8, 0.0),
        "weight_decay": some(0.0, 0.5),
        "scale": some("rms_norm", None),
        "maximize": some(True),
        "nonfinite": some("skip"),
    }
    if optimizer in MATRIX_FAMILY:
        choices |= {"nesterov": some(True), "cautious_weight_decay": some(True)}
    else:
        choices["fraction"] = st.one_of(some(0.35, 1.0, 1, 1e-6), st.floats(0.01, 1))
    if "Nor" in optimizer:
        choices["beta2"] = some(0.5, 0.0)
    if dtype != torch.float64:
        choices |= {"momentum_dtype": some(torch.float32), "wire_dtype": some(torch.bfloat16, torch.float32)}
    given_names = [name for name in choices if draw(st.integers(0, 2)) == 2]
    return tuple((name, draw(choices[name])) for name in given_names)


@st.composite
def phases_of(draw: st.DrawFn, story: Story, kind: str, transports: tuple[str, ...]) -> tuple[Phase, ...]:
    """One to three phases, of MOST_STEPS steps in all at most."""
    phases = []
    for number in range(draw(st.integers(2 if kind == "moving" else 1, 3))):
        num_steps = draw(st.integers(1, MOST_STEPS // 3 + 1))
        reloads = tuple(number for number in range(num_steps) if draw(st.integers(0, 3)) == 3)
        lie = draw(st.sampled_from([each for each in KINDS if each != "moving"])) if kind == "moving" else kind
        state = draw(some("layerwise", 1, 50, 400)) if lie == "layerwise" else None
        sizes = draw(st.sampled_from(SIZES.get(lie, ((1,), (2,), (3,), (4,)))))
        ranks = draw(st.sampled_from(ORDERS.get(math.prod(sizes), ((),)))) if len(sizes) > 1 else ()
        spots = draw(spots_of(story, lie, sizes))
        way = draw(st.sampled_from(WAYS)) if number else "parts"
        transport = draw(st.sampled_from(transports))
        phases.append(Phase(sizes, num_steps, transport, spots, ranks, reloads, state, way))
    return tuple(phases)


@st.composite
def spots_of(draw: st.DrawFn, story: Story, kind: str, sizes: tuple[int, ...]) -> tuple[Spot, ...]:
    """Where the parameters lie: one spot for all, or one for each."""
    if kind == "layerwise":
        kind = draw(some("ddp", "ddp", "replicate"))
    if kind in ("plain", "ddp"):
        return ((kind,),)
    if kind == "replicate":
        return (("r",) * len(sizes),)
    return tuple(draw(spot_of(kind, shape, story.matrix(name), sizes)) for name, shape in story.shapes.items())


@st.composite
def spot_of(draw: st.DrawFn, kind: str, shape: tuple[int, ...], matrix: Matrix | None, sizes: tuple[int, ...]) -> Spot:
    """What the axes do to one parameter. The columns of what is flattened are never split: that is refused."""
    dims = range(1) if matrix is not None and matrix.keys.get("flatten") else range(len(shape))
    rows = [str(dim) for dim in dims if matrix is None or dim < matrix.kept]
    columns = [str(dim) for dim in dims[1:]] or ["0"]
    anything = st.sampled_from(["r", *map(str, dims)])
    if kind == "shard0":
        return (draw(some("0", "0", *rows)),)
    if kind == "shard1":
        return (draw(st.sampled_from(columns)),)
    if kind == "hsdp":
        return ("r", draw(some("0", "0", *rows)))
    if kind == "tiles":
        one, other = draw(st.sampled_from(rows)), draw(st.sampled_from([*columns, *columns, "r"]))
        return draw(some((one, other), (other, one)))
    if kind == "strided":
        dim = draw(st.sampled_from([*rows, *map(str, dims)]))
        return draw(strided((dim, dim), sizes))
    return draw(strided(tuple(draw(anything) for _ in sizes), sizes))


@st.composite
def strided(draw: st.DrawFn, spot: Spot, sizes: tuple[int, ...]) -> Spot:
    """The spot, in which an axis may divide after those to its right that divide the same dimension."""
    places = list(spot)
    for axis, place in enumerate(spot):
        factor = math.prod(
            size for other, size in zip(spot[axis + 1 :], sizes[axis + 1 :], strict=True) if other == place
        )
        if split_dim(place) is not None and place in spot[axis + 1 :] and draw(st.booleans()):
            places[axis] = f"s{place}/{factor}"
    return tuple(places)


@st.composite
def steps_of(draw: st.DrawFn, names: list[str]) -> Step:
    """A step; most gradients are there and finite."""
    ranks = st.sets(st.integers(0, 3), max_size=4).map(lambda held: tuple(sorted(held)))
    absent = tuple((name, draw(ranks)) for name in names if draw(st.integers(0, 5)) == 5)
    values = some(float("inf"), float("-inf"), float("nan"))
    poisoned = tuple((name, draw(st.integers(0, 200)), draw(values)) for name in names if draw(st.integers(0, 9)) == 9)
    rate, size = draw(some(1.0, 1.0, 0.5, 0.0)), draw(some(1.0, 1e-3, 100.0))
    return Step(rate, draw(st.booleans()), size, absent, poisoned)
