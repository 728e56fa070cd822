"""Any optimizer, through any steps, saves and loads at changing numbers of ranks, does what the reference does.

`make test` draws the same examples each time, about a minute of them. `make test-long` draws for half an hour from a
seed that it prints with counts of what was drawn; LONG_SEED and LONG_MINUTES set both. A failing example is made small
by hypothesis, for five minutes at most, and printed.
"""

import os
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tests.stories import SPLIT_LAYOUTS, Phase, Step, Story, check, live, referred, tolerance
from tests.training import LAYOUTS, MATRIX_FAMILY, OPTIMIZERS, assert_close, transports_and_scopes

KINDS = (*LAYOUTS, "hsdp", "mixed")
"""The layouts of `training`, and several of them in one optimizer."""
MIXED = ("shard0", "shard1", "replicate")
MOST_STEPS = 8
WORLD_SIZES = {"hsdp": (2, 4), "plain": (1, 2)}

COMMON = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
CI = settings(COMMON, derandomize=True, max_examples=12)
ROUND = settings(COMMON, derandomize=False, max_examples=30, print_blob=True)

MINUTES = float(os.environ.get("LONG_MINUTES", 0))
drawn: Counter[str] = Counter()


def some(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


@st.composite
def stories(draw: st.DrawFn, kind: str) -> Story:
    """A story in which parameters lie as `kind` says."""
    small = st.one_of(st.integers(1, 12), some(17, 33))
    matrices = tuple(draw(st.lists(st.tuples(small, small), min_size=1, max_size=3)))
    matrices += matrices[:1] * draw(st.integers(0, 2))  # of one shape, so that buckets hold several
    vectors = st.lists(some((7,), (1,), (5, 3), (2, 3, 4)), max_size=2).map(tuple)
    adamw, lion = draw(vectors), draw(vectors)
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    dtype = draw(some(torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16))
    scope, transports = draw(st.sampled_from(ways(optimizer)))
    if scope == "local" or "shard1" in kind or kind == "mixed":
        dtype = torch.float64  # no bits are promised, so that the reference must judge
    options = draw(options_of(optimizer, scope, dtype, kind))
    names = [*(f"matrix{i}" for i in range(len(matrices))), *(f"adamw{i}" for i in range(len(adamw)))]
    names += [f"lion{i}" for i in range(len(lion))]
    layouts = tuple(draw(st.sampled_from(MIXED)) for _ in names) if kind == "mixed" else (kind,)
    phases = draw(phases_of(kind, transports))
    steps = tuple(draw(steps_of(names)) for _ in range(sum(phase.num_steps for phase in phases)))
    number = draw(st.integers(0, 2**20))
    return Story(matrices, adamw, lion, number, dtype, optimizer, options, layouts, phases, steps)


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
def options_of(
    draw: st.DrawFn, optimizer: str, scope: str | None, dtype: torch.dtype, kind: str
) -> tuple[tuple[str, Any], ...]:
    """Options beside the transport, each given or left to its default."""
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
    options = {name: draw(choices[name]) for name in given_names}
    if scope is not None:
        options["scope"] = scope
    return tuple(options.items())


@st.composite
def phases_of(draw: st.DrawFn, kind: str, transports: tuple[str, ...]) -> tuple[Phase, ...]:
    """One to three phases, of MOST_STEPS steps in all at most."""
    sizes = st.sampled_from(WORLD_SIZES.get(kind, (1, 2, 3, 4)))
    phases = []
    for _ in range(draw(st.integers(1, 3))):
        num_steps = draw(st.integers(1, MOST_STEPS // 3 + 1))
        reloads = tuple(number for number in range(num_steps) if draw(st.integers(0, 3)) == 3)
        phases.append(Phase(draw(sizes), num_steps, draw(st.sampled_from(transports)), reloads))
    return tuple(phases)


@st.composite
def steps_of(draw: st.DrawFn, names: list[str]) -> Step:
    """A step; most gradients are there and finite."""
    ranks = st.sets(st.integers(0, 3), max_size=4).map(lambda held: tuple(sorted(held)))
    absent = tuple((name, draw(ranks)) for name in names if draw(st.integers(0, 5)) == 5)
    values = some(float("inf"), float("-inf"), float("nan"))
    poisoned = tuple((name, draw(st.integers(0, 200)), draw(values)) for name in names if draw(st.integers(0, 9)) == 9)
    rate, size = draw(some(1.0, 1.0, 0.5, 0.0)), draw(some(1.0, 1e-3, 100.0))
    return Step(rate, draw(st.booleans()), size, absent, poisoned)


def checked(story: Story) -> None:
    """Checks a story and counts what is in it."""
    drawn.update(["examples", story.optimizer, str(story.dtype), *(f"layout {one}" for one in set(story.layouts))])
    drawn.update({"steps": len(story.steps), "loads at another number of ranks": 0})
    drawn["loads"] += len(story.phases) - 1 + sum(len(phase.reloads) for phase in story.phases)
    for before, after in zip(story.phases, story.phases[1:], strict=False):
        drawn["loads at another number of ranks"] += before.world_size != after.world_size
    for phase in story.phases:
        drawn.update([f"phases of {phase.world_size} ranks", f"phases with {phase.transport}"])
    drawn["missing gradients"] += sum(len(step.absent) for step in story.steps)
    drawn["gradients that are not finite"] += sum(len(step.poisoned) for step in story.steps)
    drawn.update({"compared with the reference": story.compared, "compared bit for bit": story.exact})
    check(story)


@pytest.mark.parametrize("kind", KINDS)
def test_every_story_is_that_of_the_reference(kind: str) -> None:
    CI(given(stories(kind))(checked))()


PLAIN = Step(absent=(("matrix0", (1,)),))
STORY = Story(
    matrices=((7, 5), (12, 3)),
    adamw=((7,),),
    lion=((5, 3),),
    seed=5,
    dtype=torch.float64,
    optimizer="NorDion2",
    options=(("scope", "local"), ("fraction", 0.3)),
    layouts=("shard0",),
    phases=(Phase(2, 2, "local", reloads=(0,)), Phase(3, 2, "local")),
    steps=(PLAIN, Step(poisoned=(("matrix1", 4, float("nan")),)), Step(rate=0.5), Step(size=100.0)),
)
OTHER_STORIES = {
    "another number of ranks": {"phases": (Phase(2, 2, "local"), Phase(2, 2, "local"))},
    "the gradient of another rank is missing": {"steps": (Step(absent=(("matrix0", (0,)),)), *STORY.steps[1:])},
    "another rate": {"steps": (*STORY.steps[:3], Step(rate=0.99, size=100.0))},
    "another row is not finite": {
        "steps": (PLAIN, Step(poisoned=(("matrix1", 7, float("nan")),)), *STORY.steps[2:]),
    },
    "another fraction": {"options": (("scope", "local"), ("fraction", 0.4))},
    "the whole step is left out": {"options": (*STORY.options, ("nonfinite", "skip"))},
}


def test_the_comparison_sees_what_differs() -> None:
    """A story told by the package is not that of the reference where one thing of it is another."""
    [_, told] = live(STORY)
    assert_close(told, referred(STORY)[-1], tolerance(STORY), "the same story")
    for what, changes in OTHER_STORIES.items():
        with pytest.raises(AssertionError, match="is off by"):
            assert_close(told, referred(replace(STORY, **changes))[-1], tolerance(STORY), what)


def test_stories_for_a_long_time(capsys: pytest.CaptureFixture[str]) -> None:
    if not MINUTES:
        pytest.skip("started by `make test-long`")
    first = int(os.environ.get("LONG_SEED") or random.SystemRandom().randrange(2**32))
    drawn.clear()
    start, rounds = time.monotonic(), 0
    with capsys.disabled():
        print(f"\nLONG_SEED={first}", flush=True)
        try:
            while time.monotonic() - start < 60 * MINUTES:
                kind = KINDS[rounds % len(KINDS)]
                seed(first + rounds)(ROUND(given(stories(kind))(checked)))()
                rounds += 1
        finally:
            print(f"LONG_SEED={first}: {rounds} rounds in {time.monotonic() - start:.0f} s")
            for what, count in sorted(drawn.items()):
                print(f"  {count:6d} {what}")


def test_what_is_drawn_covers_all_layouts_and_optimizers() -> None:
    """The examples of `make test` hold what they are meant to hold."""
    assert set(SPLIT_LAYOUTS) < set(KINDS)
    if drawn["examples"] < len(KINDS) * 5 or MINUTES:
        pytest.skip("the stories have not all been told in this run")
    for what in (*OPTIMIZERS, "loads at another number of ranks", "missing gradients", "compared bit for bit"):
        assert drawn[what] > 0, what
    for what in (*(f"phases of {size} ranks" for size in (1, 2, 3, 4)), "gradients that are not finite"):
        assert drawn[what] > 0, what
