"""Lists of operations as Hypothesis draws them: mostly the same question again, over somebody else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from coalition import Job, Operation, Resend, Resume, SetUp, Sum, Swap
from hypothesis import strategies as st
from silos import World

ROUNDS = 2  # so few that most lists ask about one of them twice
MOST = 5  # operations in a list


@dataclass(frozen=True)
class Case:
    """A list and what it is played against. one_model: all rounds and jobs of it have one model."""

    world: World
    one_model: bool
    operations: list[Operation]


@st.composite
def cases(draw: st.DrawFn, protocol: str, scheme: str) -> Case:
    world, one_model = draw(_worlds(protocol, scheme)), draw(st.booleans())
    if one_model and draw(st.booleans()):
        # So far apart that in what two sets differ by there is more than one honest silo.
        world = replace(world, apart=world.corrupted + 2)
    return Case(world, one_model, draw(_lists(world, one_model=one_model)))


@st.composite
def _worlds(draw: st.DrawFn, protocol: str, scheme: str) -> World:
    """Draw who takes part: of n silos with threshold t fewer than 2 t - n work with the server."""
    silos = draw(st.integers(3, 5))
    threshold = silos * 2 // 3 + 1
    least = 1 if protocol == "cgd" else 0  # its sums are blind: without a silo of its own the coalition sees nothing
    corrupted = draw(st.integers(least, min(silos - 2, 2 * threshold - silos - 1)))
    return World(protocol, scheme, silos, corrupted, draw(st.sampled_from([3, 0])), draw(st.booleans()))


def _lists(world: World, *, one_model: bool) -> st.SearchStrategy[list[Operation]]:
    """Return lists in which each round has models of its own, or all rounds and jobs have one model."""
    cohorts, silo = _some(world.names, world.floor), st.sampled_from(world.names)
    kinds: list[st.SearchStrategy[Operation]] = [
        *[_sums(world, one_model=one_model)] * 4,
        st.builds(Resume, silos=cohorts, sums=st.integers(0, 2)),
        st.builds(SetUp, round=st.just(0), silos=cohorts, mute=_few(world)),
        _resent(world, one_model=one_model),
    ]
    if world.roster:
        kinds.append(st.builds(Swap, of=silo, silos=st.just(world.names)))
    if one_model:
        kinds.append(st.builds(Job, number=st.integers(2, 3)))
    honest = st.just(Sum(1, world.names, 0.0 if one_model else 1.0))
    rest = st.lists(st.one_of(kinds), min_size=2, max_size=MOST)
    begun = st.builds(lambda first, others: [first, *others], honest, rest)
    return begun | begun | rest


@st.composite
def _sums(draw: st.DrawFn, world: World, *, one_model: bool) -> Sum:
    """Draw an honest round, or one in which the coalition does one or two things of its own."""
    number = draw(st.integers(1, ROUNDS))
    # Halves are nearly the model below; 10 and more are other models that the same round is said to have.
    model = 0.0 if one_model else number + draw(st.sampled_from([0.0, 0.0, 0.5, 10.0]))
    few = _few(world)
    deviations: dict[str, st.SearchStrategy[object]] = {
        "silos": _some(world.names, world.floor),
        "take": st.integers(0, 2),
        "lost": few,
        "late": few,
        "unsigned": few,
        "mute": few,
        "odd": few,
        "told": st.tuples(_some(world.honest, 1), _some(world.names, world.floor)),
    }
    if world.protocol == "pbpfl-ce":
        deviations["fooled"] = st.tuples(few, st.integers(0, 3))
    chosen = draw(st.lists(st.sampled_from(sorted(deviations)), max_size=2, unique=True))
    drawn = {name: draw(deviations[name]) for name in chosen}
    return Sum(**{"round": number, "silos": world.names, "model": model, **drawn})  # type: ignore[arg-type]


def _resent(world: World, *, one_model: bool) -> st.SearchStrategy[Resend]:
    """Return a message again, one of the latest. As of another round it would be about this one's model."""
    rounds = st.none() | st.integers(0, ROUNDS) if one_model else st.none()
    return st.builds(
        Resend,
        nth=st.integers(0, 15),
        to=st.sampled_from(world.honest),
        round=rounds,
        attempt=st.none() | st.integers(0, 4),
    )


def _some(names: str, least: int) -> st.SearchStrategy[str]:
    """Return some of the names, in order; most likely nearly all."""
    sizes = range(len(names), least - 1, -1)
    return st.sampled_from(["".join(some) for size in sizes for some in combinations(names, size)])


def _few(world: World) -> st.SearchStrategy[str]:
    return st.sampled_from(["", *world.names, *("".join(two) for two in combinations(world.names, 2))])
