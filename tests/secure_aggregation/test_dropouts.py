"""Silos that vanish, come late or misbehave: the survivors' exact sum, or an abort that names who it was.

A sum is compared with whole numbers that are added in the clear, so that nothing but the exact sum passes.
"""

from __future__ import annotations

import random
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from sum_driver import (
    ASKED,
    NOW,
    Answer,
    Late,
    Seen,
    Silo,
    Train,
    Vanished,
    agreed,
    exact_means,
    label_in,
    one_sum,
    play,
    rostered,
    unmask_of,
)

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Missing, Reason
from moretta.errors import MisuseError, PeerError
from moretta.secure_aggregation import shamir
from moretta.secure_aggregation.agreement import AdvertiseKey, KeyAdvert, KeysAccepted, PeerKeys
from moretta.secure_aggregation.cohort import Credentials, Rules
from moretta.secure_aggregation.graph import neighbourhoods
from moretta.secure_aggregation.keyed_sums import Aggregator
from moretta.secure_aggregation.keystream import Extracted, Keystream, SecretRoot, derive
from moretta.secure_aggregation.masks import pair_key
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.schemes import RULES, aggregator
from moretta.secure_aggregation.sums import Sum
from moretta.secure_aggregation.unmasking import Confirmed, SelfMaskShares, Survivors, Unmask

BEFORE: dict[str, tuple[type[Message], ...]] = {
    "upload": (Train, Survivors, Unmask),
    "confirm": (Survivors, Unmask),
    "unmask": (Unmask,),
}
"""Which messages a silo gets no more that vanishes before it uploads, confirms or unmasks."""


def names_of(count: int) -> list[str]:
    return [f"s{k:02}" for k in range(count)]


def cohort_of(
    count: int,
    bits: int = 64,
    rules: Rules = RULES,
    credentials: Mapping[str, Credentials] | None = None,
    secret_seed: int | None = None,
) -> dict[str, Silo]:
    """Silos with weights and data of their own. secret_seed: makes their masks the same each time."""
    rng, silos = np.random.default_rng(count), {}
    for k, name in enumerate(names_of(count)):
        silos[name] = Silo(
            "pairwise",
            name,
            bits,
            {"w": rng.uniform(-9, 9, 3), "b": rng.uniform(-1, 1)},
            weight=2 * k + 1,
            rules=rules,
            credentials=(credentials or {}).get(name),
            insecure=None if secret_seed is None else SecretRoot.insecure(secret_seed, name),
        )
    return silos


def vanishing(silo: Answer, before: str) -> Answer:
    def answer(asked: Message) -> Any:
        if isinstance(asked, BEFORE[before]):
            raise Vanished
        return silo(asked)

    return answer


def assert_exact(total: Any, silos: Mapping[str, Silo], among: Collection[str], server: Aggregator) -> None:
    assert isinstance(total, Sum), total
    assert list(total.silos) == sorted(among)
    assert total.weight == sum(silos[name].weight for name in among)
    shapes = {name: value.shape for name, value in next(iter(silos.values())).tensors.items()}
    bits = server.want(shapes, dict.fromkeys(shapes, 100.0), sum(silo.weight for silo in silos.values())).fraction_bits
    for name, mean in total.means.items():
        assert mean.ravel().tolist() == exact_means(silos, total.silos, name, bits[name]).tolist()


# Any pattern of dropouts.


def expected_survivors(names: Sequence[str], pattern: Mapping[str, str], threshold: int) -> set[str] | None:
    """Return who is in the sum where each of some silos vanishes before a step; None where too few are left."""
    survivors = {name for name in names if pattern.get(name) != "upload"}
    if len(survivors) < len(names):  # only then are the survivors asked to confirm
        survivors -= {name for name in names if pattern.get(name) == "confirm"}
    holders = {name for name in survivors if name not in pattern}
    return survivors if len(holders) >= threshold else None


def random_pattern(rng: random.Random, names: Sequence[str]) -> dict[str, str]:
    chance = rng.choice([0.05, 0.2, 0.4])
    return {name: rng.choice(list(BEFORE)) for name in names if rng.random() < chance}


def assert_pattern(server: Aggregator, silos: dict[str, Silo], now: Stamp, pattern: dict[str, str]) -> bool:
    """Play a sum with these dropouts. Returns whether there was one."""
    played = {name: vanishing(silos[name], before) for name, before in pattern.items()}
    missing: dict[str, Missing] = {}
    total = one_sum(server, silos, now, replaced=played, missing=missing, codec=False)
    survivors = expected_survivors(list(silos), pattern, 2 * len(silos) // 3 + 1)
    if survivors is None:
        assert isinstance(total, Aborted), pattern
        assert {why.reason for why in total.missing.values()} == {Reason.DISCONNECTED}
        assert set(total.missing) <= set(pattern)
    else:
        assert_exact(total, silos, survivors, server)
    assert set(missing) <= set(pattern)
    return survivors is not None


@pytest.mark.parametrize("patterns", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_dropouts_over_one_set_up(patterns: int) -> None:
    silos, rng = cohort_of(10), random.Random(patterns)
    server, summed = agreed(silos), 0
    for number in range(patterns):
        now = Stamp(NOW.run, 2 + number, 0)
        summed += assert_pattern(server, silos, now, random_pattern(rng, list(silos)))
    assert patterns / 4 < summed < patterns  # both outcomes are frequent


@pytest.mark.parametrize("patterns", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_random_dropouts_with_a_set_up_each(patterns: int) -> None:
    rng = random.Random(patterns)
    for number in range(patterns):
        rules, credentials, run = rostered(names_of(10)) if number % 4 == 0 else (RULES, {}, "r")
        bits = 32 if number % 3 == 0 else 64
        silos = cohort_of(10, bits, rules, credentials)
        now = Stamp(run, number, 0)
        server = agreed(silos, bits=bits, rules=rules, now=now)
        pattern = random_pattern(rng, list(silos))
        if credentials:  # with a roster all confirm, always
            pattern = {name: "upload" if before == "confirm" else before for name, before in pattern.items()}
        assert_pattern(server, silos, now, pattern)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("before", BEFORE)
def test_one_of_four_vanishes(before: str, bits: int) -> None:
    silos = cohort_of(4, bits)
    server = agreed(silos, bits=bits)
    total = one_sum(server, silos, NOW, replaced={"s01": vanishing(silos["s01"], before)})
    counted = set(silos) - ({"s01"} if before == "upload" else set())
    assert_exact(total, silos, counted, server)


def test_vanishing_one_after_the_other_while_it_is_confirmed() -> None:
    silos = cohort_of(10)
    server, times = agreed(silos), {"s01": 0, "s02": 1}

    def leaving(name: str) -> Answer:
        def answer(asked: Message) -> Any:
            if isinstance(asked, Survivors):
                times[name] -= 1
                if times[name] < 0:
                    raise Vanished
            return silos[name](asked)

        return answer

    played = {"s00": vanishing(silos["s00"], "upload"), **{name: leaving(name) for name in times}}
    assert_exact(one_sum(server, silos, NOW, replaced=played), silos, set(silos) - played.keys(), server)


def test_with_a_roster_nobody_may_vanish_while_survivors_sign() -> None:
    rules, credentials, run = rostered(names_of(10))
    silos, now = cohort_of(10, 64, rules, credentials), Stamp(run, 1, 0)
    server = agreed(silos, rules=rules, now=now)
    aborted = one_sum(server, silos, now, replaced={"s03": vanishing(silos["s03"], "confirm")})
    assert isinstance(aborted, Aborted)
    assert {name: why.reason for name, why in aborted.missing.items()} == {"s03": Reason.DISCONNECTED}


@pytest.mark.parametrize("roster", [False, True])
def test_an_abort_names_all_who_vanished_before_the_survivors_were_agreed_on(roster: bool) -> None:
    rules, credentials, run = rostered(names_of(5)) if roster else (RULES, {}, NOW.run)
    silos, now = cohort_of(5, 64, rules, credentials), Stamp(run, 1, 0)
    server = agreed(silos, rules=rules, now=now)
    gone = {name: vanishing(silos[name], before) for name, before in (("s00", "upload"), ("s03", "confirm"))}
    aborted = one_sum(server, silos, now, replaced=gone)
    assert isinstance(aborted, Aborted)
    assert aborted.missing.keys() == gone.keys()


def test_an_abort_names_those_who_vanished_and_not_whose_shares_they_held() -> None:
    silos = cohort_of(5)
    server = agreed(silos)
    gone = {name: vanishing(silos[name], "unmask") for name in ("s01", "s02")}
    aborted = one_sum(server, silos, NOW, replaced=gone)
    assert isinstance(aborted, Aborted)
    assert aborted.missing.keys() == gone.keys()


def test_two_silos_or_three_need_everybody() -> None:
    for count in (2, 3):
        silos = cohort_of(count)
        server = agreed(silos)
        aborted = one_sum(server, silos, NOW, replaced={"s00": vanishing(silos["s00"], "upload")})
        assert isinstance(aborted, Aborted)
        assert {name: why.reason for name, why in aborted.missing.items()} == {"s00": Reason.DISCONNECTED}
        assert_exact(one_sum(server, silos, replace(NOW, attempt=1)), silos, silos, server)


@pytest.mark.parametrize(("least", "fits"), [(7, True), (8, False)])
def test_fewer_than_may_be_revealed_abort(least: int, fits: bool) -> None:
    rules = Rules(min_survivors=least, threshold=6)
    silos = cohort_of(10, rules=rules)
    server = agreed(silos, rules=rules)
    gone = {name: vanishing(silos[name], "upload") for name in ("s00", "s03", "s09")}
    total = one_sum(server, silos, NOW, replaced=gone)
    assert isinstance(total, Sum if fits else Aborted)


def test_where_all_are_needed_one_that_is_missing_aborts() -> None:
    silos = cohort_of(5)
    server = agreed(silos)
    aborted = one_sum(server, silos, NOW, replaced={"s04": vanishing(silos["s04"], "upload")}, whole=True)
    assert isinstance(aborted, Aborted)
    assert set(aborted.missing) == {"s04"}
    assert_exact(one_sum(server, silos, replace(NOW, attempt=1), whole=True), silos, silos, server)


def test_who_is_not_asked_is_lost() -> None:
    silos = cohort_of(5)
    server, asked = agreed(silos), ["s00", "s01", "s03", "s04"]
    seen: Seen = []
    assert_exact(one_sum(server, silos, NOW, asked=asked, seen=seen), silos, asked, server)
    assert {name for name, _ in seen} == set(asked)
    few = one_sum(server, silos, replace(NOW, attempt=1), asked=asked[:3])
    assert isinstance(few, Aborted)
    assert set(few.missing) == {"s02", "s04"}
    refused = one_sum(server, silos, Stamp(NOW.run, 2, 0), asked=asked[:3], whole=True)
    assert isinstance(refused, Aborted)


# What the server may learn.


def late_upload(silo: Silo) -> Answer:
    """A silo whose upload reaches the server too late, and which then hears no more."""

    def answer(asked: Message) -> Any:
        if isinstance(asked, Train):
            return Late(silo(asked))
        raise Vanished

    return answer


@pytest.fixture
def made_shares(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, set[bytes]]:
    """All shares that silos make, in the clear, by secret: what no server sees."""
    made, share = dict[bytes, set[bytes]](), shamir.share

    def sharing(secret: bytes, *arguments: Any) -> dict[int, bytes]:
        shares = share(secret, *arguments)
        made[secret] = set(shares.values())
        return shares

    monkeypatch.setattr(shamir, "share", sharing)
    return made


@pytest.mark.parametrize("roster", [False, True])
def test_a_late_upload_is_never_unmasked(roster: bool, made_shares: dict[bytes, set[bytes]]) -> None:
    names = names_of(5)
    rules, credentials, run = rostered(names) if roster else (RULES, {}, NOW.run)
    silos, now, seen = cohort_of(5, 64, rules, credentials), Stamp(run, 1, 0), Seen()
    server = agreed(silos, rules=rules, now=now)
    total = one_sum(server, silos, now, replaced={"s02": late_upload(silos["s02"])}, seen=seen)
    assert_exact(total, silos, set(names) - {"s02"}, server)

    known = everything_in(seen)
    given = {secret: len(shares & known) for secret, shares in made_shares.items()}
    assert sorted(given.values()) == [0, 4, 4, 4, 4]  # of five shares each; none of the late silo's secret
    told = {secret for secret, count in given.items() if count} if roster else set()
    assert made_shares.keys() & known == told  # where all have signed who is in it, survivors give their own
    # Nor is one given afterwards, when all pair masks of the late silo are known.
    uploads = {name: message for name, message in seen if isinstance(message, MaskedUpload)}
    assert set(uploads) == set(names)  # the server has the late upload and its seals
    for name in set(names) - {"s02"}:
        for asked in (Survivors(stamp=now, survivors=tuple(names)), unmask_of(name, names, uploads)):
            with pytest.raises(MisuseError, match="were sent before"):
                silos[name](asked)


def test_what_is_revealed_for_a_lost_silo_is_of_that_sum_alone() -> None:
    # One set-up, three rounds; two silos take part in the first and third, and are lost in the second.
    silos, seen = cohort_of(7), Seen()
    server = agreed(silos)
    stamps = [Stamp(NOW.run, number, 0) for number in (1, 2, 3)]
    for now in stamps:
        gone = {"s01": vanishing(silos["s01"], "confirm"), "s04": vanishing(silos["s04"], "upload")}
        played = gone if now.round == 2 else {}
        survivors = set(silos) - played.keys()
        assert_exact(one_sum(server, silos, now, replaced=played, seen=seen), silos, survivors, server)

    known = everything_in(seen)
    shapes = {name: value.shape for name, value in silos["s00"].tensors.items()}
    total_weight = sum(silo.weight for silo in silos.values())
    wanted = server.want(shapes, dict.fromkeys(shapes, 100.0), total_weight)  # as of `one_sum`
    for name, silo in silos.items():
        agreement, _ = silo.contributor._keys.agreed
        for peer, seed in agreement.seeds.items():
            assert seed not in known
            keys = {
                now.round: pair_key(Extracted(seed), label_in(now, agreement.cohort, wanted), name, peer)
                for now in stamps
            }
            across = (name in gone) != (peer in gone)  # a survivor's with a lost silo
            assert {number for number, key in keys.items() if key in known} == ({2} if across else set())


def everything_in(seen: Seen) -> set[bytes]:
    """All byte strings that the server was told."""
    known = set[bytes]()
    for _, message in seen:
        for value in (getattr(message, name) for name in message.KINDS):
            items = value.values() if isinstance(value, Mapping) else [value]
            known |= {item for item in items if type(item) is bytes}
        if isinstance(message, SelfMaskShares):
            known |= set(message.by_maker.values())
    return known


@pytest.mark.parametrize("bits", [32, 64])
def test_weights_in_the_open(bits: int) -> None:
    rules = Rules(public_weights=True)
    silos, seen = cohort_of(5, bits, rules=rules), Seen()
    server = agreed(silos, bits=bits, rules=rules)
    total = one_sum(server, silos, NOW, replaced={"s00": vanishing(silos["s00"], "upload")}, seen=seen)
    assert_exact(total, silos, set(silos) - {"s00"}, server)
    uploads = {name: message for name, message in seen if isinstance(message, MaskedUpload)}
    assert {name: int(upload.weight) for name, upload in uploads.items()} == {
        name: silo.weight for name, silo in silos.items() if name != "s00"
    }


def test_hidden_weights_look_uniform() -> None:
    silos, seen = cohort_of(2, 32, secret_seed=0), Seen()
    server = agreed(silos, bits=32)
    for number in range(2, 202):
        one_sum(server, silos, Stamp(NOW.run, number, 0), seen=seen, codec=False)
    weights = np.array([int(m.weight) for _, m in seen if isinstance(m, MaskedUpload)], dtype="<u4")
    bits = np.unpackbits(weights.view(np.uint8)).reshape(400, 32)
    # Each of 32 bits is the mean of 400 fair coins, with a deviation of 0.025; six of them were too far
    # off with a chance below 10^-7, and keys are fixed.
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 0.15


def test_masking_takes_two_copies_of_a_model() -> None:
    tensors, encoding = {"w": np.ones(5_000_000, dtype=np.float32)}, {"w": 20, "most weight": 2}
    pair = {name: Silo("pairwise", name, 64, {}) for name in "ab"}
    agreed(pair)
    tracemalloc.start()
    try:
        upload = pair["a"].contributor.upload(NOW, tensors, 1, encoding, asked=ASKED)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Beside the input there is one array, the upload's; chunks take the rest.
    assert upload.tensors["w"].nbytes <= peak < upload.tensors["w"].nbytes + (4 << 20)


# Graphs in which not everybody is everybody's neighbour.

SPARSE = Rules(degree=6)


def on_the_ring(server: Aggregator, silos: Mapping[str, Silo], seen: Seen) -> list[str]:
    """Return the silos in the order in which neighbours stand side by side."""
    digest = next(message.cohort for _, message in seen if isinstance(message, KeysAccepted))
    names = sorted(silos)
    return [names[place] for place in Keystream(derive(digest, "graph")).permutation(len(names)).tolist()]


def sparse_cohort(rules: Rules) -> tuple[dict[str, Silo], Aggregator, list[str]]:
    silos, seen = cohort_of(60, rules=rules), Seen()
    server = aggregator("pairwise", 64, rules)
    assert play(server.setup(NOW, list(silos)), silos, seen) is None
    return silos, server, on_the_ring(server, silos, seen)


def test_a_sparse_graph_with_dropouts() -> None:
    silos, server, ring = sparse_cohort(SPARSE)  # 7 hold each secret, 5 give it back
    assert (
        silos["s00"].contributor._keys.agreed[0].seeds.keys()
        == neighbourhoods(silos, 6, silos["s00"].contributor._keys.agreed[0].cohort.digest)["s00"]
    )
    played = {
        name: vanishing(silos[name], before)
        for name, before in ((ring[0], "upload"), (ring[1], "confirm"), (ring[20], "unmask"), (ring[40], "upload"))
    }
    lost = {ring[0], ring[1], ring[40]}
    seen: Seen = []
    total = one_sum(server, silos, NOW, replaced=played, seen=seen)
    assert_exact(total, silos, set(silos) - lost, server)
    # Who has no lost neighbour gives nothing away but that it is there.
    keys = {name: set(message.keys) for name, message in seen if isinstance(message, Confirmed)}
    assert keys[ring[30]] == set()
    assert keys[ring[3]] == {ring[0], ring[1]}


def test_a_neighbourhood_that_is_too_thin_aborts() -> None:
    silos, server, ring = sparse_cohort(SPARSE)
    gone = {name: vanishing(silos[name], "upload") for name in ring[1:4]}  # of the 7 around each, 3
    aborted = one_sum(server, silos, NOW, replaced=gone)
    assert isinstance(aborted, Aborted)
    assert aborted.missing.keys() == gone.keys()


def test_survivors_that_share_no_masks_abort() -> None:
    # Two gaps of three silos part the ring; four of seven, just a majority, are left around those beside a gap.
    silos, server, ring = sparse_cohort(Rules(degree=6, threshold=4))
    one_gap = {name: vanishing(silos[name], "upload") for name in ring[:3]}
    assert_exact(one_sum(server, silos, NOW, replaced=one_gap), silos, set(silos) - one_gap.keys(), server)
    two_gaps = one_gap | {name: vanishing(silos[name], "upload") for name in ring[30:33]}
    aborted = one_sum(server, silos, replace(NOW, attempt=1), replaced=two_gaps)
    assert isinstance(aborted, Aborted)
    assert aborted.missing.keys() == two_gaps.keys()
    left = tuple(sorted(set(silos) - two_gaps.keys()))
    with pytest.raises(PeerError, match="no longer share masks"):  # nor does a silo believe a server that goes on
        silos[left[0]](Survivors(stamp=replace(NOW, attempt=1), survivors=left))


# Anything that silos may do, in any order.

NAMES = names_of(7)
Way = Callable[["Rounds", str, Message], Any]
"""How a silo answers one message: a reply, something `Late`, or `Vanished` is raised."""


def vanishes(*before: type[Message]) -> Way:
    def way(world: Rounds, name: str, asked: Message) -> Any:
        if isinstance(asked, before):
            raise Vanished
        return world.honest(name, asked)

    return way


def changed(kind: type[Message], change: Callable[[Rounds, str, Any], Any]) -> Way:
    """A silo that changes its replies of one kind."""

    def way(world: Rounds, name: str, asked: Message) -> Any:
        reply = world.honest(name, asked)
        return change(world, name, reply) if isinstance(reply, kind) else reply

    return way


def replayed(world: Rounds, name: str, reply: Any) -> Any:
    """The first reply of this kind that the silo ever gave."""
    return world.said[name][type(reply)][0]


def restamped(world: Rounds, name: str, reply: Any) -> Any:
    """The same, but said to be of now."""
    return replace(replayed(world, name, reply), stamp=reply.stamp)


def swapped(world: Rounds, name: str, reply: Any) -> Any:
    """The last reply of this kind by another silo of the cohort, said to be of now."""
    others = [said[type(reply)] for other, said in world.said.items() if other in world.cohort and other != name]
    return replace(next((replies[-1] for replies in others if replies), reply), stamp=reply.stamp)


def signed_by_another(world: Rounds, name: str, reply: Any) -> Any:
    """Another's signature with the own keys; the same where nobody signs."""
    return replace(reply, signature=swapped(world, name, reply).signature)


def flipped(part: str) -> Callable[[Rounds, str, Any], Any]:
    """A bit of a field, or of one entry of it, is another."""

    def change(world: Rounds, name: str, reply: Any) -> Any:
        value = getattr(reply, part)
        if isinstance(value, bytes):
            return replace(reply, **{part: bytes([value[0] ^ 1]) + value[1:]})
        first = min(value)
        return replace(reply, **{part: {**value, first: bytes([value[first][0] ^ 1]) + value[first][1:]}})

    return change


def late(world: Rounds, name: str, reply: Any) -> Any:
    return Late(reply)


HARMLESS: dict[str, Way] = {  # nobody else is hurt by it: a sum can do without such a silo
    **{f"vanishes before it can {step}": vanishes(*kinds) for step, kinds in BEFORE.items()},
    "is late to upload": changed(MaskedUpload, late),
    "is late to confirm": changed(Confirmed, late),
    "is late with its shares": changed(SelfMaskShares, late),
    "uploads another's": changed(MaskedUpload, swapped),
    "signs by another's hand": changed(Confirmed, signed_by_another),
    "gives another's shares": changed(SelfMaskShares, swapped),
    "gives the shares of an earlier sum": changed(SelfMaskShares, restamped),
    "gives a share that is off by a bit": changed(SelfMaskShares, flipped("shares")),
}
HARMFUL: dict[str, Way] = {  # it is found out when its self-mask cannot be removed any more
    "uploads what it did in an earlier sum": changed(MaskedUpload, restamped),
    "commits to another secret": changed(MaskedUpload, flipped("committed")),
    "seals a share badly": changed(MaskedUpload, flipped("sealed")),
    "gives a share's digest wrongly": changed(MaskedUpload, flipped("digests")),
}
AT_CONFIRMATION = {"vanishes before it can confirm", "is late to confirm", "signs by another's hand"}
IN_SET_UP: dict[str, Way] = {
    "vanishes at once": vanishes(AdvertiseKey, PeerKeys),
    "vanishes when it has its keys": vanishes(PeerKeys),
    "is late": changed(KeyAdvert, late),
    "takes another's key": changed(KeyAdvert, swapped),
    "takes an old key": changed(KeyAdvert, restamped),
    "replays its advert": changed(KeyAdvert, replayed),
    "accepts another cohort": changed(KeysAccepted, flipped("cohort")),
}


def some_of(ways: Mapping[str, Way], most: int) -> st.SearchStrategy[dict[str, str]]:
    """Draw which silos misbehave, and how."""
    return st.dictionaries(st.sampled_from(NAMES), st.sampled_from(list(ways)), max_size=most)


class Rounds(RuleBasedStateMachine):
    """A run whose silos come, go and misbehave. Only lies about numbers and mask keys are left out: nobody can tell.

    A silo that sends an earlier upload or advert as it was, before it has any, sends the present one: no mishap then.
    """

    @initialize(bits=st.sampled_from([32, 64]), public=st.booleans(), roster=st.booleans())
    def begin(self, bits: int, public: bool, roster: bool) -> None:
        self.rules, self.bits, self.run = Rules(public_weights=public), bits, NOW.run
        credentials: Mapping[str, Any] = {}
        if roster:
            self.rules, credentials, self.run = rostered(NAMES, public_weights=public)
        self.silos = cohort_of(len(NAMES), bits, self.rules, credentials)
        self.said: dict[str, dict[type[Message], list[Any]]] = {name: defaultdict(list) for name in NAMES}
        self.cohort, self.server, self.number = NAMES, aggregator("pairwise", bits, self.rules), 0
        self.ready = False

    def honest(self, name: str, asked: Message) -> Any:
        reply = self.silos[name](asked)
        self.said[name][type(reply)].append(reply)
        return reply

    def played(self, ways: Mapping[str, Way]) -> dict[str, Answer]:
        return {name: lambda asked, name=name: ways.get(name, Rounds.honest)(self, name, asked) for name in self.cohort}

    def now(self) -> Stamp:
        self.number += 1
        return Stamp(self.run, self.number, 0)

    @rule(cohort=st.lists(st.sampled_from(NAMES), min_size=4, unique=True) | st.just(NAMES), ways=some_of(IN_SET_UP, 1))
    def keys_are_agreed_on(self, cohort: list[str], ways: dict[str, str]) -> None:
        self.cohort = sorted(cohort)
        culprits = {name: IN_SET_UP[way] for name, way in ways.items() if name in cohort}
        aborted = play(self.server.setup(self.now(), self.cohort), self.played(culprits), codec=False)
        if aborted is not None:
            self.assert_blamed(aborted, culprits, twins=True)
        self.ready = aborted is None

    @precondition(lambda self: self.ready)
    @rule(seed=st.integers(0, 2**32 - 1), ways=some_of(HARMLESS, 4))
    def they_sum(self, seed: int, ways: dict[str, str]) -> None:
        self.sum_is_exact_or_aborted(seed, ways)

    @precondition(lambda self: self.ready)
    @rule(seed=st.integers(0, 2**32 - 1), ways=some_of(HARMLESS, 3), worse=some_of(HARMFUL, 1))
    def they_sum_for_better_or_worse(self, seed: int, ways: dict[str, str], worse: dict[str, str]) -> None:
        self.sum_is_exact_or_aborted(seed, ways | worse)

    def sum_is_exact_or_aborted(self, seed: int, ways: dict[str, str]) -> None:
        rng, present = np.random.default_rng(seed), {name: self.silos[name] for name in self.cohort}
        for silo in present.values():
            silo.tensors = {"w": rng.uniform(-9, 9, 3), "b": np.array(rng.uniform(-1, 1))}
        culprits = {name: (HARMLESS | HARMFUL)[way] for name, way in ways.items() if name in present}
        total = one_sum(self.server, present, self.now(), replaced=self.played(culprits), codec=False)
        honest, threshold = present.keys() - culprits.keys(), 2 * len(present) // 3 + 1
        if isinstance(total, Aborted):
            self.assert_blamed(total, culprits)
            # With a roster nobody may vanish any more once the survivors have begun to sign who they are.
            fatal = {*HARMFUL, *(AT_CONFIRMATION if self.rules.roster else ())}
            assert len(honest) < threshold or any(ways[name] in fatal for name in culprits)
        else:
            assert honest <= set(total.silos)
            assert_exact(total, present, total.silos, self.server)

    def assert_blamed(self, aborted: Aborted, culprits: Collection[str], twins: bool = False) -> None:
        assert aborted.missing.keys() & set(culprits)
        # Of two silos with one key it cannot be told who took the other's.
        of_one_key = {name for name, why in aborted.missing.items() if twins and "key of its own" in why.detail}
        assert aborted.missing.keys() <= of_one_key.union(culprits)

    @invariant()
    def nobody_gave_both_kinds_for_one_peer(self) -> None:
        for said in getattr(self, "said", {}).values():
            keys = {(reply.stamp, peer) for reply in said[Confirmed] for peer in reply.keys}
            shares = {(reply.stamp, peer) for reply in said[SelfMaskShares] for peer in reply.makers}
            assert not keys & shares


TestRounds = Rounds.TestCase
TestRounds.settings = settings(stateful_step_count=25)
