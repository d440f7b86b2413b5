"""Noise that is sized for everybody surviving: how much of it stays after losses, and that none that is needed falls.

The adversary is a server that may ask silos for what it likes: two sets of survivors, a component that is still needed,
a take once more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats
from sum_driver import NOW, Late, Seen, Train, Vanished, label_in, play, rostered

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted
from moretta.errors import MisuseError, ParameterError, PeerError, SumSpent
from moretta.secure_aggregation import shamir
from moretta.secure_aggregation.cohort import Origin, Rules
from moretta.secure_aggregation.discrete_gaussian import discrete_gaussian
from moretta.secure_aggregation.keyed_sums import KeyedContributor
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.pairwise import NoisedUpload
from moretta.secure_aggregation.removable_noise import RATIO, Noise, Removable, removable_noise
from moretta.secure_aggregation.schemes import aggregator, contributor
from moretta.secure_aggregation.sums import Sum, query_of
from moretta.secure_aggregation.unmasking import (
    DIGEST_BYTES,
    NoisedShares,
    SelfMaskShares,
    Survivors,
    Unmask,
    UnmaskNoised,
    commitment,
    pieces,
    sealed_bytes,
)

NAMES = tuple("abcdefghij")  # of whom 7 are needed, so 3 may be lost
ENTRIES, WANTED, STEP = 3000, 4.0e8, 2.0**-10
NOISE = Noise(WANTED, STEP)


class Noisy:
    """A silo that uploads nothing but its noise, in whole steps."""

    def __init__(
        self, name: str, rules: Rules, credentials: Any = None, noise: Noise = NOISE, scheme: str = "pairwise"
    ) -> None:
        self.name, self.noise = name, noise
        self.helped = HelpedSums()
        self.contributor = contributor(scheme, name, 64, rules, origin=Origin(credentials), helped=self.helped)
        self.root, self.drawn = SecretRoot.insecure(0, name), np.zeros(0, np.int64)

    def __call__(self, asked: Message) -> Any:
        if not isinstance(asked, Train):
            return self.contributor.answer(asked)
        levels, of = self.contributor.levels(self.noise), (asked.stamp.round, asked.stamp.take)
        self.part = Removable.of(levels, self.root.stream("seeds", *of))
        base = discrete_gaussian(math.sqrt(levels.variances[0])).draw(self.root.stream("base", *of), ENTRIES)
        more = removable_noise(self.part.seeds[0], 1, levels, ENTRIES) if levels.removable else 0
        self.base, self.drawn = base, base + more
        tensors = {"v": np.zeros(0), "w": self.drawn * STEP}
        part = self.part if levels.removable else None
        assert isinstance(self.contributor, KeyedContributor)
        return self.contributor.upload(asked.stamp, tensors, 1, asked.encoding, asked=query_of(asked), noise=part)


class Room:
    """A cohort, and its server."""

    def __init__(
        self, names: Sequence[str] = NAMES, *, roster: bool = False, scheme: str = "pairwise", colluding: int = 0
    ) -> None:
        noise = replace(NOISE, colluding=colluding)
        made, credentials, run = rostered(names) if roster else (Rules(), {}, NOW.run)
        self.silos = {name: Noisy(name, made, credentials.get(name), noise, scheme) for name in names}
        self.server, self.now = aggregator(scheme, 64, made), Stamp(run, 0, 0)
        assert play(self.server.setup(self.now, list(names)), self.silos) is None
        self.wanted = replace(
            self.server.want({"v": (0,), "w": (ENTRIES,)}, {"v": 1.0, "w": 1e6}, len(names)), noise=noise
        )
        self.now = replace(self.now, round=1)

    def ask(self) -> Train:
        return Train(stamp=self.now, encoding=self.wanted.fraction_bits)

    def sum(self, lost: Sequence[str] = (), changed: Mapping[str, Any] = {}, seen: Seen | None = None) -> Any:
        """Sum what silos upload; those that are lost vanish before they have."""

        def gone(asked: Message) -> Any:
            raise Vanished

        silos: dict[str, Any] = {**self.silos, **dict.fromkeys(lost, gone), **changed}
        return play(self.server.sum(self.ask(), self.wanted), silos, seen)

    def steps(self, found: Sum) -> NDArray[np.float64]:
        """Return the noise in a sum, in steps."""
        exact = found.means["w"] * found.weight / STEP  # but for a division by the number of silos
        assert np.abs(exact - np.rint(exact)).max() < 1e-6
        return np.rint(exact)


# -- levels ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)  # of 200 levels each, at most
@given(st.integers(2, 300), st.integers(0, 200), st.integers(0, 20), st.floats(4096.0, 1e12))
def test_the_noise_of_those_who_do_not_collude_is_as_much_as_wanted_and_hardly_more(
    cohort: int, losses: int, colluding: int, each: float
) -> None:
    wanted = each * cohort  # as `Lattice` has it: at least 64 steps of deviation a silo
    if cohort - losses <= colluding:
        with pytest.raises(ParameterError, match=f"dp-colluding = {colluding}: of {cohort} silos"):
            Noise(wanted, STEP, colluding).levels(cohort, losses)
        return
    levels = Noise(wanted, STEP, colluding).levels(cohort, losses)
    for lost in range(losses + 1):
        first = levels.first_removed(lost)
        left = sum(levels.variances[:first]) * (cohort - lost - colluding)
        assert wanted + 8 * (1 - 1e-9) <= left * (1 + 1e-12)  # (C) of the discrete Gaussian takes 8 off
        assert left <= RATIO * wanted * (1 + 1e-12)
    assert min(levels.variances) >= 16  # or (B) would not hold
    with pytest.raises(PeerError, match=f"expected at most {losses} silos to be lost"):
        levels.first_removed(losses + 1)


def test_a_table_of_variance_by_losses() -> None:
    """In docs/noise.md: what stays of sigma^2 with ten and with 100 silos, and without removal."""
    rows = []
    for cohort, losses in ((10, (0, 1, 2, 3)), (100, (0, 1, 5, 15, 33))):
        levels = NOISE.levels(cohort, losses[-1])
        for lost in losses:
            kept = sum(levels.variances[: levels.first_removed(lost)]) * (cohort - lost) / WANTED
            rows.append(f"| {cohort} | {lost} | {kept:.3f} | {sum(levels.variances) * (cohort - lost) / WANTED:.3f} |")
    page = (Path(__file__).parents[2] / "docs" / "noise.md").read_text()
    assert "\n".join(rows) in page


def test_a_seed_gives_those_after_it_and_none_before() -> None:
    levels = NOISE.levels(10, 3)
    assert levels.removable == 3
    chain = Removable.of(levels, SecretRoot.insecure(0, "a").stream("seeds"))
    assert len(set(chain.seeds)) == 3
    whole = [removable_noise(seed, first, levels, 500) for first, seed in enumerate(chain.seeds, 1)]
    assert (whole[0] != whole[1]).any()
    parts = [whole[0] - whole[1], whole[1] - whole[2], whole[2]]
    for part, variance in zip(parts, levels.variances[1:], strict=True):
        # 500 squares over the variance are chi-square; a chance of 1e-6 on either side.
        low, high = stats.chi2.ppf([1e-6, 1 - 1e-6], 500)
        assert low < float(np.square(part).sum()) / variance < high
    assert np.abs(np.corrcoef(parts)[np.triu_indices(3, 1)]).max() < 5 / math.sqrt(500)


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roster", [False, True])
@pytest.mark.parametrize("lost", [0, 1, 3])
def test_what_stays_in_a_sum_is_the_noise_that_is_wanted(lost: int, roster: bool) -> None:
    """A test of the code that draws against the variance that is accounted for: half the deviation fails, too."""
    stage = Room(roster=roster)
    seen: Seen = []
    found = stage.sum(NAMES[:lost], seen=seen)
    assert isinstance(found, Sum)
    assert found.excess == ()
    left = [silo for name, silo in stage.silos.items() if name not in NAMES[:lost]]
    levels = NOISE.levels(10, 3)
    first = levels.first_removed(lost)
    kept = [silo.drawn - (removable_noise(silo.part.seeds[first - 1], first, levels, ENTRIES) if first <= 3 else 0)
            for silo in left]  # fmt: skip
    assert (stage.steps(found) == np.sum(kept, axis=0)).all()  # exactly: whole steps in the ring
    squares = float(np.square(stage.steps(found)).sum())
    for part, expected in ((1.0, True), (0.25, False), (1 / 0.7, False)):  # half the deviation; nothing taken off
        chance = 2 * min(
            stats.chi2.cdf(squares / WANTED / part, ENTRIES), stats.chi2.sf(squares / WANTED / part, ENTRIES)
        )
        assert chance > 1e-3 if expected else (chance < 1e-6 or (lost == 3 and part > 1))
    assert all(isinstance(reply, NoisedUpload) for name, reply in seen if "tensors" in reply.KINDS)


def test_more_losses_than_are_tolerated_end_the_sum_and_nothing_is_revealed() -> None:
    seen: Seen = []
    assert isinstance(Room().sum(NAMES[:4], seen=seen), Aborted)
    assert not [reply for _, reply in seen if isinstance(reply, SelfMaskShares)]


def test_additive_shares_bear_no_losses_so_nothing_is_taken_off() -> None:
    stage = Room(NAMES[:4], scheme="additive-shares")
    found = stage.sum()
    assert stage.silos["a"].contributor.levels(NOISE).removable == 0
    assert (stage.steps(found) == np.sum([silo.drawn for silo in stage.silos.values()], axis=0)).all()


def test_colluding_silos_are_not_counted_on() -> None:
    stage = Room(colluding=2)
    found = stage.steps(stage.sum())
    others = found - np.sum([stage.silos[name].base for name in "ab"], axis=0)  # they tell the server their own
    squares = float(np.square(others).sum()) / WANTED
    assert 1e-3 < stats.chi2.cdf(squares, ENTRIES) < 1 - 1e-3


@pytest.mark.parametrize("roster", [False, True])
def test_a_seed_that_cannot_be_had_leaves_its_excess_which_is_reported(roster: bool) -> None:
    stage = Room(roster=roster)

    def liar(asked: Message) -> Any:
        reply = stage.silos["c"](asked)
        if isinstance(reply, NoisedUpload):
            return replace(reply, noise=bytes(len(reply.noise)))
        return replace(reply, seed=b"\1" * 32) if isinstance(reply, NoisedShares) and reply.seed else reply

    found = stage.sum(changed={"c": liar})
    assert found.excess == ["c"]
    kept = [silo.drawn if name == "c" else silo.base for name, silo in stage.silos.items()]
    assert (stage.steps(found) == np.sum(kept, axis=0)).all()


def test_a_silo_that_vanishes_before_it_gives_shares_has_its_excess_taken_off() -> None:
    stage = Room()
    silent = lambda asked: Late(stage.silos["c"](asked)) if isinstance(asked, Unmask) else stage.silos["c"](asked)  # noqa: E731
    found = stage.sum(changed={"c": silent})
    assert found.excess == ()
    assert (stage.steps(found) == np.sum([silo.base for silo in stage.silos.values()], axis=0)).all()


# -- a server that asks for what it should not have --------------------------------------------------------------------


class Server:
    """What a server that follows no rule knows: all uploads, and what silos have given it, by the set that it named."""

    def __init__(self, stage: Room) -> None:
        self.stage = stage
        self.uploads: dict[str, NoisedUpload] = {name: silo(stage.ask()) for name, silo in stage.silos.items()}
        self.given = dict[tuple[str, tuple[str, ...]], NoisedShares]()

    def unmask(self, holder: str, survivors: Sequence[str], **changes: Any) -> NoisedShares:
        levels, shown = self.uploads[holder].levels, []
        for maker in survivors:
            if maker != holder:
                others = [name for name in NAMES if name != maker]
                sealed = dict(zip(others, pieces(self.uploads[maker].sealed, sealed_bytes(levels)), strict=True))
                digests = pieces(self.uploads[maker].digests, DIGEST_BYTES * (levels + 1))
                shown.append((sealed[holder], dict(zip(NAMES, digests, strict=True))[holder]))
        asked = UnmaskNoised(
            stamp=self.stage.now,
            survivors=tuple(survivors),
            signatures={},
            sealed=b"".join(one for one, _ in shown),
            digests=b"".join(one for _, one in shown),
            levels=levels,
        )
        reply: NoisedShares = self.stage.silos[holder](replace(asked, **changes))
        self.given[holder, tuple(survivors)] = reply
        return reply

    def confirm(self, holder: str, survivors: Sequence[str]) -> Any:
        return self.stage.silos[holder](Survivors(stamp=self.stage.now, survivors=tuple(survivors)))

    def opens(self, survivors: Sequence[str]) -> bool:
        """Return whether it can put together the self-masks of all of these."""
        return all(self._had(maker, 0, "shares") for maker in survivors)

    def seeds(self, maker: str) -> set[int]:
        """Return the numbers of the seeds of a silo that it can put together, whatever it was told they are for."""
        return {level for level in range(1, self.uploads[maker].levels + 1) if self._had(maker, level, "noise")}

    def _had(self, maker: str, level: int, field: str) -> bool:
        contributor = self.stage.silos["a"].contributor
        assert isinstance(contributor, KeyedContributor)
        label = label_in(self.stage.now, contributor._keys.agreed[0].cohort, self.stage.wanted)
        committed = [self.uploads[maker].committed, *pieces(self.uploads[maker].noise, DIGEST_BYTES)][level]
        held = dict[int, bytes]()
        for (holder, _), reply in self.given.items():
            shares = reply.by_maker if field == "shares" else reply.noise_by_maker
            if maker in shares:
                held[NAMES.index(holder) + 1] = shares[maker]
        for points in itertools.combinations(held, 7):
            secret = shamir.reconstruct({point: held[point] for point in points}, 7)
            if commitment(secret, label, maker, level) == committed:
                return True
        return False


FEWER = NAMES[:8]  # two losses: component 3 alone is taken off


@pytest.mark.parametrize("told", range(3, 8))
def test_two_sets_of_survivors_never_open_a_sum_whose_noise_falls(told: int) -> None:
    """Some silos are told that all are left, which takes the most noise off, the others that two are lost."""
    server = Server(Room())
    for holder in NAMES[:told]:
        server.unmask(holder, NAMES)
    for holder in NAMES[told:] if told < 8 else ():
        if holder in FEWER:
            server.confirm(holder, FEWER)
            server.unmask(holder, FEWER)
    for holder in NAMES[:told]:  # those that have given once give nothing else
        with pytest.raises((PeerError, MisuseError)):
            server.confirm(holder, FEWER)
        with pytest.raises((PeerError, MisuseError)):
            server.unmask(holder, FEWER)
    # Of a silo in both sets it has shares from all that it asked; what counts is which sets' sums it can open, and from
    # which component on noise is taken off. Seven silos that are told of all ten may give all of it away, and of eight
    # nobody is left to open the smaller sum.
    whole = told >= 7
    assert server.opens([name for name in NAMES if name not in FEWER]) == whole
    assert {frozenset(server.seeds(maker) & {1, 2}) for maker in NAMES} == {frozenset({1} if whole else ())}


def test_with_a_roster_a_silo_signs_one_set_of_survivors() -> None:
    server = Server(Room(roster=True))
    server.confirm("a", FEWER)
    with pytest.raises((PeerError, SumSpent)):
        server.confirm("a", NAMES)
    with pytest.raises(PeerError, match="expected to unmask the sum of the survivors that were confirmed"):
        server.unmask("a", NAMES)
    with pytest.raises(PeerError, match="expected a signature of each survivor"):
        server.unmask("a", FEWER)


def test_no_message_asks_for_a_component_that_is_still_needed() -> None:
    """It has no field for one; and what is given follows from the set that the silo is bound to."""
    assert "first" not in UnmaskNoised.KINDS
    server = Server(Room())
    server.confirm("a", FEWER)
    for levels in (1, 2, 4):  # as if fewer, or other, components were shared
        with pytest.raises(PeerError):
            server.unmask("a", FEWER, levels=levels)
    plain = Unmask(stamp=server.stage.now, survivors=FEWER, signatures={}, sealed=b"", digests=b"")
    with pytest.raises(PeerError, match="expected shares of 3 seeds of noise"):
        server.stage.silos["a"](plain)
    reply = server.unmask("a", FEWER)
    assert reply.noise_by_maker.keys() == set(FEWER)  # of nobody who is lost
    seven = [server.unmask(name, FEWER) if server.confirm(name, FEWER) else reply for name in FEWER[1:7]]
    assert len(seven) == 6
    assert {frozenset(server.seeds(maker)) for maker in FEWER} == {frozenset({3})}
    assert server.opens(FEWER)


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("roster", [False, True])
def test_a_silo_gives_its_own_seed_only_with_a_roster_and_only_the_one_that_is_taken_off(
    roster: bool, lost: int
) -> None:
    stage, seen, first = Room(roster=roster), Seen(), NOISE.levels(10, 3).first_removed(lost)
    assert isinstance(stage.sum(NAMES[:lost], seen=seen), Sum)
    given = {name: reply.seed for name, reply in seen if isinstance(reply, NoisedShares)}
    assert given.keys() == set(NAMES[lost:])
    for name, seed in given.items():
        assert seed == (stage.silos[name].part.seeds[first - 1] if roster and first <= 3 else b"")


def test_a_take_that_is_repeated_over_others_is_spent() -> None:
    stage = Room()
    assert isinstance(stage.sum(), Sum)  # all are left, so everything is taken off
    stage.now = replace(stage.now, attempt=1)
    again = stage.sum(NAMES[:2])
    assert isinstance(again, Aborted)
    stage.now = replace(stage.now, attempt=2)
    assert isinstance(stage.sum(), Sum)  # the same silos: the same noise, which says nothing new
    stage.now = replace(stage.now, take=1, attempt=3)
    assert isinstance(stage.sum(NAMES[:2]), Sum)
