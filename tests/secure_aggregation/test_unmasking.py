"""What a silo gives out after its upload, and everything that it refuses to a server that asks for more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESSIV
from sum_driver import (
    CODEC,
    NOW,
    Answer,
    Silo,
    Train,
    Vanished,
    aggregator,
    agreed,
    exact_means,
    label_in,
    one_sum,
    play,
    rostered,
    share_of,
    unmask_of,
)

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Reason
from moretta.errors import MisuseError, PeerError
from moretta.secure_aggregation import agreement, shamir
from moretta.secure_aggregation.agreement import AdvertiseKey, KeyAdvert, PeerKeys
from moretta.secure_aggregation.cohort import Rules
from moretta.secure_aggregation.keyed_sums import Aggregator
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.masks import Label
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.sums import Sum, Wanted
from moretta.secure_aggregation.unmasking import (
    DIGEST_BYTES,
    SEALED_BYTES,
    Confirmed,
    SelfMaskShares,
    Survivors,
    Unmask,
    pieces,
    share_digest,
    shares_of,
)

NAMES = tuple("abcdef")  # of whom 5 are needed
LEFT = tuple("abcde")


@dataclass
class Room:
    """A cohort whose silos have uploaded, and a server that may now ask for whatever it likes."""

    silos: dict[str, Silo]
    server: Aggregator
    uploads: dict[str, MaskedUpload]
    now: Stamp

    def confirm(self, silo: str, survivors: Sequence[str], **changes: Any) -> Confirmed:
        return self.silos[silo](replace(Survivors(stamp=self.now, survivors=tuple(survivors)), **changes))

    def unmask(self, silo: str, survivors: Sequence[str], signed: Mapping[str, Confirmed] = {}, **changes: Any) -> Any:
        return self.silos[silo](replace(unmask_of(silo, survivors, self.uploads, signed), **changes))

    def next_round(self) -> None:
        self.now = replace(self.now, round=self.now.round + 1)
        ask = Train(stamp=self.now, encoding=self.wanted().fraction_bits)
        self.uploads = {name: silo(ask) for name, silo in self.silos.items()}

    def wanted(self) -> Wanted:
        return self.server.want({"w": (2,)}, {"w": 1.0}, len(NAMES))

    def label(self) -> Label:
        return label_in(self.now, self.silos["a"].contributor._keys.agreed[0].cohort, self.wanted())


def room(*, roster: bool = False) -> Room:
    rules, credentials, run = rostered(NAMES) if roster else (Rules(), {}, NOW.run)
    silos = {
        name: Silo("pairwise", name, 64, {"w": np.full(2, 0.1)}, rules=rules, credentials=credentials.get(name))
        for name in NAMES
    }
    now = Stamp(run, 0, 0)
    made = Room(silos, agreed(silos, rules=rules, now=now), {}, now)
    made.next_round()
    return made


def test_what_a_silo_gives_where_nobody_is_lost() -> None:
    stage = room()
    assert stage.unmask("a", NAMES).by_maker.keys() == set(NAMES)
    assert stage.confirm("b", NAMES).keys == {}


def test_what_a_silo_gives_where_one_is_lost() -> None:
    stage = room()
    confirmed = stage.confirm("a", LEFT)
    assert confirmed.signature == b""
    assert confirmed.keys.keys() == {"f"}
    assert stage.confirm("f", tuple("bcdef")).keys["a"] == confirmed.keys["f"]  # the two have it in common
    assert stage.unmask("a", LEFT).by_maker.keys() == set(LEFT)


def test_a_share_is_the_one_that_was_made() -> None:
    stage = room()
    given = {name: stage.unmask(name, NAMES).by_maker for name in NAMES}
    for maker, upload in stage.uploads.items():
        summed = shares_of(stage.label())
        digests = [share_digest(given[holder][maker], summed) for holder in NAMES]
        assert b"".join(digests) == upload.digests
        five = {place: given[holder][maker] for place, holder in enumerate(NAMES, 1) if holder != "c"}
        six = {place: given[holder][maker] for place, holder in enumerate(NAMES, 1)}
        assert shamir.reconstruct(five, 5) == shamir.reconstruct(six, 5)


def test_self_masks_of_a_public_seed_are_the_same_again_and_new_in_each_round() -> None:
    def secrets() -> list[bytes]:
        silos = {
            name: Silo("pairwise", name, 64, {"w": np.ones(2)}, insecure=SecretRoot.insecure(3, name)) for name in NAMES
        }
        stage, found = Room(silos, agreed(silos), {}, NOW), list[bytes]()
        for _ in range(2):
            stage.next_round()
            found += [silo.contributor._open.__self__._own.secret for silo in silos.values()]
        return found

    first = secrets()
    assert first == secrets()
    assert len(set(first)) == 2 * len(NAMES)


# Both kinds for one peer.


def test_who_was_given_up_stays_out() -> None:
    stage = room()
    stage.confirm("a", LEFT)
    stage.confirm("a", LEFT)  # again is no harm
    for back in (NAMES, tuple("abcdf")):
        with pytest.raises(PeerError, match=r"\['f'\] to stay out of this sum"):
            stage.confirm("a", back)
        with pytest.raises(PeerError, match="survivors that were confirmed"):
            stage.unmask("a", back)
    assert stage.unmask("a", LEFT).by_maker.keys() == set(LEFT)


def test_no_key_of_a_pair_is_given_once_its_shares_are() -> None:
    stage = room()
    stage.unmask("a", NAMES)
    for asked in (LEFT, NAMES):
        with pytest.raises(MisuseError, match="were sent before"):
            stage.confirm("a", asked)


def test_shares_are_given_for_one_ask_and_again_only_for_that_very_one() -> None:
    stage = room()
    stage.confirm("a", LEFT)
    first = stage.unmask("a", LEFT)
    assert CODEC.encode(stage.unmask("a", LEFT)) == CODEC.encode(first)
    good = asked = unmask_of("a", LEFT, stage.uploads)
    for change in (
        {"signatures": {"b": bytes(64)}},
        {"survivors": NAMES},
        {"sealed": good.sealed[SEALED_BYTES:] + good.sealed[:SEALED_BYTES]},
        {"digests": good.digests[DIGEST_BYTES:] + good.digests[:DIGEST_BYTES]},
    ):
        with pytest.raises(MisuseError, match="expected one request for them"):
            stage.silos["a"](replace(asked, **change))
    for when in ({"take": 1}, {"attempt": 1}, {"round": 2}):
        with pytest.raises(PeerError, match="expected to unmask the upload of round 1, attempt 0"):
            stage.unmask("a", LEFT, stamp=replace(stage.now, **when))
    assert CODEC.encode(stage.unmask("a", LEFT)) == CODEC.encode(first)


def test_a_refusal_changes_nothing() -> None:
    stage = room()
    for survivors in (tuple("bcdef"), tuple("abcd"), tuple("abcdex")):
        with pytest.raises(PeerError):
            stage.confirm("a", survivors)
    with pytest.raises(PeerError):
        stage.unmask("a", LEFT)
    assert stage.unmask("a", NAMES).by_maker.keys() == set(NAMES)


# Which survivors.


@pytest.mark.parametrize(
    ("survivors", "sentence"),
    [
        ("bcdef", "`a` received its own name among the lost silos"),
        ("abcd", "expected at least 5 of the 6 silos that hold shares of `a`, 4 are left"),
        ("abcdex", r"survivors of the cohort, got \['x'\]"),
    ],
)
def test_survivors_that_are_refused(survivors: str, sentence: str) -> None:
    with pytest.raises(PeerError, match=sentence):
        room().confirm("a", tuple(survivors))


def test_unmasking_other_survivors_than_were_confirmed() -> None:
    stage = room()
    for survivors in (LEFT, tuple("abcd"), tuple("bcdef"), tuple("abcdex")):
        asked = replace(unmask_of("a", LEFT, stage.uploads), survivors=survivors)
        with pytest.raises(PeerError, match="survivors that were confirmed"):
            stage.silos["a"](asked)


def test_there_must_be_an_upload() -> None:
    silos = {name: Silo("pairwise", name, 64, {"w": [1.0]}) for name in NAMES}
    asked = (
        Survivors(stamp=NOW, survivors=NAMES),
        Unmask(stamp=NOW, survivors=NAMES, signatures={}, sealed=b"", digests=b""),
    )
    for _ in range(2):
        for message in asked:
            with pytest.raises(MisuseError, match="before there was an upload in this set-up"):
                silos["a"](message)
        agreed(silos)  # which is none either


def test_a_new_set_up_forgets_the_upload() -> None:
    stage = room()
    agreed(stage.silos, now=stage.now)
    with pytest.raises(MisuseError, match="before there was an upload in this set-up"):
        stage.confirm("a", LEFT)


@pytest.mark.parametrize("change", [{"round": 2}, {"attempt": 1}, {"take": 1}, {"run": "another"}, {"round": 0}])
def test_another_sums_stamp(change: dict[str, Any]) -> None:
    stage = room()
    elsewhere = replace(stage.now, **change)
    for ask in (lambda: stage.confirm("a", LEFT, stamp=elsewhere), lambda: stage.unmask("a", NAMES, stamp=elsewhere)):
        with pytest.raises(PeerError, match="expected to unmask the upload of round 1, attempt 0"):
            ask()


def test_an_earlier_sum_is_closed_by_the_next_upload() -> None:
    stage = room()
    before = replace(stage, uploads=dict(stage.uploads))
    stage.next_round()
    with pytest.raises(PeerError, match="expected to unmask the upload of round 2"):
        before.confirm("a", LEFT)
    with pytest.raises(PeerError, match="expected to unmask the upload of round 2"):
        before.unmask("a", NAMES)


# Which shares.


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[1:],
        lambda parts: [*parts, parts[0]],
        lambda parts: [],
    ],
    ids=["one less", "one more", "none"],
)
def test_not_the_shares_of_the_survivors(change: Callable[[list[bytes]], list[bytes]]) -> None:
    stage = room()
    good = unmask_of("a", NAMES, stage.uploads)
    sealed, digests = change(pieces(good.sealed, SEALED_BYTES)), change(pieces(good.digests, DIGEST_BYTES))
    asked = replace(good, sealed=b"".join(sealed), digests=b"".join(digests))
    with pytest.raises(PeerError, match="one share of each neighbour among the survivors"):
        stage.silos["a"](asked)


def test_a_share_of_the_lost_silo_is_not_opened() -> None:
    stage = room()
    stage.confirm("a", LEFT)
    good, more = unmask_of("a", LEFT, stage.uploads), unmask_of("a", NAMES, stage.uploads)
    with pytest.raises(PeerError, match="and of nobody else"):
        stage.silos["a"](replace(good, sealed=more.sealed, digests=more.digests))


def test_shares_that_do_not_open_are_left_out() -> None:
    stage = room()
    old = share_of(stage.uploads, "b", "a")
    stage.next_round()
    e, f = (share_of(stage.uploads, maker, "a") for maker in "ef")
    shown = [
        old,  # of another round, with what goes with it
        share_of(stage.uploads, "c", "b"),  # sealed for another
        e,  # in the place of d's: made by another
        (e[0], f[1]),  # not what its maker published
        f,
    ]
    sealed, digests = (b"".join(parts) for parts in zip(*shown, strict=True))
    given = stage.silos["a"](replace(unmask_of("a", NAMES, stage.uploads), sealed=sealed, digests=digests))
    assert given.makers == ("a", "f")


def answering(stage: Room, kind: type[Message], change: Callable[[Any], Message], silo: str = "b") -> dict[str, Answer]:
    """The room's silos, of which one changes its replies of one kind."""

    def answer(asked: Message) -> Message:
        reply = stage.silos[silo](asked)
        return change(reply) if isinstance(reply, kind) else reply

    return {silo: answer}


def sum_with(stage: Room, ways: Mapping[str, Answer]) -> tuple[Any, dict[str, Any]]:
    stage.now, missing = replace(stage.now, round=stage.now.round + 1), dict[str, Any]()
    return one_sum(stage.server, stage.silos, stage.now, 1.0, ways, missing=missing), missing


Sharing = Callable[..., dict[int, bytes]]
GOOD_SHARE: Sharing = shamir.share
BAD_SHARING: dict[str, Sharing] = {
    "all bits set": lambda *given: dict.fromkeys(GOOD_SHARE(*given), b"\xff" * 32),
    "the field's prime": lambda *given: dict.fromkeys(GOOD_SHARE(*given), (2**255 - 19).to_bytes(32, "little")),
    "another secret": lambda secret, *given: GOOD_SHARE(bytes(32), *given),
    "more needed than agreed": lambda secret, threshold, *given: GOOD_SHARE(secret, threshold + 1, *given),
}


@pytest.mark.parametrize("how", BAD_SHARING)
def test_a_maker_of_bad_shares_is_named(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = room()

    def upload(asked: Message) -> Message:
        with monkeypatch.context() as patched:
            if isinstance(asked, Train):
                patched.setattr(shamir, "share", BAD_SHARING[how])
            return stage.silos["b"](asked)

    aborted, missing = sum_with(stage, {"b": upload})
    assert isinstance(aborted, Aborted)
    assert missing == {}  # everybody answered
    assert {name: why.reason for name, why in aborted.missing.items()} == {"b": Reason.MALFORMED}
    assert "do not give the secret it committed to" in aborted.missing["b"].detail


def without(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in entries.items() if other != name}


def with_shares(upload: MaskedUpload, sealed: bytes, digests: bytes) -> MaskedUpload:
    return replace(upload, sealed=sealed, digests=digests)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (MaskedUpload, lambda reply: with_shares(reply, reply.sealed[SEALED_BYTES:], reply.digests[DIGEST_BYTES:])),
        (MaskedUpload, lambda reply: with_shares(reply, reply.sealed + bytes(SEALED_BYTES), reply.digests + bytes(32))),
        (SelfMaskShares, lambda reply: replace(reply, makers=(*reply.makers, "x"), shares=reply.shares + bytes(32))),
        (SelfMaskShares, lambda reply: replace(reply, shares=reply.shares[32:] + reply.shares[:32])),
    ],
    ids=["a seal less", "a seal more", "a stranger's share", "wrong shares"],
)
def test_a_silo_that_breaks_the_form_costs_only_itself(kind: type[Message], change: Callable[[Any], Message]) -> None:
    stage = room()
    total, missing = sum_with(stage, answering(stage, kind, change))
    assert isinstance(total, Sum)
    assert {name: why.reason for name, why in missing.items()} == {"b": Reason.MALFORMED}
    assert ("b" in total.silos) == (kind is SelfMaskShares)  # those have uploaded and stay in
    assert total.means["w"].tolist() == exact_means(stage.silos, total.silos, "w", bits_of(stage)).tolist()


def bits_of(stage: Room) -> int:
    return stage.wanted().fraction_bits["w"]


@pytest.mark.parametrize("peers", ["", "a", "ef", "x"])
def test_keys_of_other_masks_than_the_lost_ones(peers: str) -> None:
    stage = room()

    def gone(asked: Message) -> Message:
        raise Vanished

    ways = answering(stage, Confirmed, lambda reply: replace(reply, keys=dict.fromkeys(peers, bytes(32))))
    total, missing = sum_with(stage, {**ways, "f": gone})
    assert isinstance(total, Aborted)  # five are needed, and one is lost already
    assert {name: why.reason for name, why in missing.items()} == {"f": Reason.DISCONNECTED, "b": Reason.MALFORMED}


def test_a_false_mask_key_spoils_the_sum_and_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    # Nothing says whose key it was; that the weights add up to nonsense shows that there was one.
    stage = room()

    def gone(asked: Message) -> Message:
        raise Vanished

    ways = answering(stage, Confirmed, lambda reply: replace(reply, keys={"f": bytes(32)}))
    total, _ = sum_with(stage, {**ways, "f": gone})
    assert isinstance(total, Sum)  # it does not end the run
    assert "some silo did not follow the protocol" in caplog.text


# With a roster: signed survivors, and the same ones for all.


def test_signed_survivors_are_unmasked() -> None:
    stage = room(roster=True)
    confirmed = {name: stage.confirm(name, LEFT) for name in LEFT}
    assert len({reply.signature for reply in confirmed.values()}) == len(LEFT)
    assert stage.unmask("a", LEFT, confirmed).by_maker.keys() == set(LEFT)


def test_a_silo_signs_one_set_of_survivors() -> None:
    stage = room(roster=True)
    assert stage.confirm("a", NAMES).signature == stage.confirm("a", NAMES).signature
    with pytest.raises(PeerError, match="a silo signs one set of them in a sum"):
        stage.confirm("a", LEFT)
    stage.next_round()
    stage.confirm("a", LEFT)


def test_signatures_that_do_not_do() -> None:
    stage = room(roster=True)
    good = {name: stage.confirm(name, LEFT) for name in LEFT}
    _, credentials, _ = rostered(NAMES)
    label = stage.label()
    bea = credentials["b"]

    def signed_by_b(*survivors: str) -> dict[str, Confirmed]:
        signature = bea.identity.sign("survivors", bea.roster.digest, *label, *survivors)
        return {**good, "b": replace(good["b"], signature=signature)}

    assert signed_by_b(*LEFT)["b"].signature == good["b"].signature
    each = "a signature of each survivor and of nobody else"
    for signed, sentence in [
        ({}, each),
        (without(good, "e"), each),
        (without(good, "a"), each),
        ({**good, "f": good["b"]}, each),
        ({**good, "x": good["b"]}, each),
        (signed_by_b(*NAMES), "`b` did not sign these survivors"),
        (signed_by_b(*LEFT[1:]), "`b` did not sign these survivors"),
        ({**good, "b": good["c"]}, "`b` did not sign these survivors"),
        ({**good, "b": replace(good["b"], signature=bytes(64))}, "`b` did not sign these survivors"),
        ({**good, "b": replace(good["b"], signature=b"")}, "`b` did not sign these survivors"),
    ]:
        with pytest.raises(PeerError, match=sentence):
            stage.unmask("a", LEFT, signed)
    assert stage.unmask("a", LEFT, good).by_maker.keys() == set(LEFT)


def test_signatures_of_another_round_do_not_do() -> None:
    stage = room(roster=True)
    old = {name: stage.confirm(name, LEFT) for name in LEFT}
    stage.next_round()
    new = {name: stage.confirm(name, LEFT) for name in LEFT}
    with pytest.raises(PeerError, match="did not sign these survivors of this sum"):
        stage.unmask("a", LEFT, old)
    with pytest.raises(PeerError, match="`c` did not sign these survivors of this sum"):
        stage.unmask("a", LEFT, {**new, "c": old["c"]})


@pytest.mark.parametrize("signature", [b"", bytes(64)], ids=["none", "forged"])
def test_a_silo_that_does_not_sign_is_named(signature: bytes) -> None:
    stage = room(roster=True)
    aborted, _ = sum_with(stage, answering(stage, Confirmed, lambda reply: replace(reply, signature=signature)))
    assert isinstance(aborted, Aborted)  # as the others have signed that it is there, and sign nothing else
    assert {name: why.reason for name, why in aborted.missing.items()} == {"b": Reason.MALFORMED}
    assert "`b` did not sign these survivors" in aborted.missing["b"].detail


def test_without_anybody_lost_signatures_are_needed_too() -> None:
    stage = room(roster=True)
    with pytest.raises(PeerError, match="a signature of each survivor"):
        stage.unmask("a", NAMES)


def revealed(shares: Mapping[str, set[str]], keys: set[frozenset[str]]) -> list[tuple[str, ...]]:
    """Return whose uploads together have no mask left: self-masks are known, and all pair masks to the outside."""
    known = [name for name in NAMES if len(shares[name]) >= 5]
    return [
        group
        for size in range(1, len(NAMES) + 1)
        for group in combinations(known, size)
        if all(frozenset((one, other)) in keys for one in group for other in NAMES if other not in group)
    ]


@pytest.mark.parametrize("roster", [False, True])
def test_no_secret_falls_where_the_server_tells_two_stories(roster: bool) -> None:
    # Whoever belongs to both sets is told of either at random; then the server asks all, with all signatures it has.
    rng = np.random.default_rng(7)
    views = [NAMES, *(tuple(name for name in NAMES if name != lost) for lost in NAMES)]
    for pair in combinations(views, 2):
        stage, told = room(roster=roster), dict[str, tuple[str, ...]]()
        for name in NAMES:
            mine = [view for view in pair if name in view]
            told[name] = mine[rng.integers(len(mine))]
        confirmed = {name: stage.confirm(name, view) for name, view in told.items()}
        keys = {frozenset((name, peer)) for name, reply in confirmed.items() for peer in reply.keys}
        shares: dict[str, set[str]] = {name: set() for name in NAMES}
        for name, view in told.items():
            alike = {signer: reply for signer, reply in confirmed.items() if told[signer] == view}
            try:
                given = stage.unmask(name, view, alike if roster else {})
            except PeerError:
                assert roster
                assert len(alike) < len(view)  # for lack of signatures
                continue
            for maker in given.makers:
                shares[maker].add(name)
        groups = revealed(shares, keys)
        assert len(groups) <= 1  # of two sums the difference would be somebody's own
        assert all(len(group) >= 5 for group in groups)


# A server that relays what it should not.


def relaying(
    silos: Mapping[str, Silo], now: Stamp, change: Callable[[PeerKeys], PeerKeys], to: Collection[str]
) -> dict:
    """A server that changes the keys it relays to some silos. Returns why each of those that refused did so."""
    adverts = {name: silo(AdvertiseKey(stamp=now)) for name, silo in silos.items()}
    keys = {name: advert.public_key for name, advert in adverts.items()}
    signatures = {name: advert.signature for name, advert in adverts.items()}
    honest, refusals = PeerKeys(stamp=now, keys=keys, signatures=signatures), {}
    for name, silo in silos.items():
        try:
            silo(change(honest) if name in to else honest)
        except PeerError as error:
            refusals[name] = str(error)
    return refusals


def test_a_server_that_puts_its_own_key_in_a_silos_place() -> None:
    rules, credentials, run = rostered(NAMES)
    silos = {
        name: Silo("pairwise", name, 64, {"w": [1.0]}, rules=rules, credentials=credentials[name]) for name in NAMES
    }
    own = Silo("pairwise", "c", 64, {})(AdvertiseKey(stamp=Stamp(run, 5, 0)))
    old = silos["c"](AdvertiseKey(stamp=Stamp(run, 4, 0)))
    for advert in (own, old, replace(own, signature=old.signature)):

        def change(relayed: PeerKeys, advert: KeyAdvert = advert) -> PeerKeys:
            keys, signatures = ({**relayed.keys, "c": advert.public_key}, {**relayed.signatures, "c": advert.signature})
            return replace(relayed, keys=keys, signatures=signatures)

        refusals = relaying(silos, Stamp(run, 5, 0), change, NAMES)
        assert "own key of `c`" in refusals.pop("c")
        assert refusals.keys() == set(NAMES) - {"c"}
        assert all("the key of silo `c` is not signed for round 5, attempt 0" in why for why in refusals.values())


def test_a_cohort_of_fewer_than_may_be_revealed() -> None:
    # Nobody needs to drop out for that: the server could have asked so few to begin with.
    rules = Rules(min_survivors=4)
    silos = {name: Silo("pairwise", name, 64, {"w": [1.0]}, rules=rules) for name in NAMES}
    assert relaying({name: silos[name] for name in "abcd"}, NOW, lambda relayed: relayed, ()) == {}
    refusals = relaying({name: silos[name] for name in "abc"}, NOW, lambda relayed: relayed, ())
    assert refusals == dict.fromkeys("abc", "expected a cohort of at least 4 silos, got 3")


def test_silos_of_another_roster_are_named() -> None:
    rules, credentials, run = rostered(NAMES)
    _, others, _ = rostered(NAMES[1:])  # in which the same names have other keys
    mixed = credentials | {"c": others["c"]}
    silos = {name: Silo("pairwise", name, 64, {"w": [1.0]}, rules=rules, credentials=mixed[name]) for name in NAMES}
    aborted = play(aggregator("pairwise", 64, rules).setup(Stamp(run, 1, 0), NAMES), silos)
    assert isinstance(aborted, Aborted)
    assert aborted.missing.keys() == {"c"}
    assert "the run's id is of another roster" in aborted.missing["c"].detail


def test_a_silo_with_other_settings_is_named() -> None:
    for rules in (Rules(threshold=6), Rules(min_survivors=4), Rules(degree=4)):
        silos = {
            name: Silo("pairwise", name, 64, {"w": [1.0]}, rules=rules if name == "d" else Rules()) for name in NAMES
        }
        aborted = play(aggregator("pairwise").setup(NOW, NAMES), silos)
        assert isinstance(aborted, Aborted)
        assert aborted.missing.keys() == {"d"}
        drawn = "expected commitments with the keys of 6 silos" in aborted.missing["d"].detail
        other = "other settings than the server" in aborted.missing["d"].detail
        assert drawn if rules.degree else other  # whether the graph is drawn shows before the digest does


def test_secrets_are_not_in_representations() -> None:
    stage = room()
    contributor = stage.silos["a"].contributor
    assert repr(contributor._open.__self__) == "OpenSum(round 1, attempt 0, <redacted>)"
    assert repr(contributor._open.__self__._own) == "SelfMask(<redacted>)"
    share = stage.unmask("a", NAMES)
    assert "shares: bytes" in repr(share)
    assert not any(item.hex() in repr(share) or repr(item) in repr(share) for item in share.by_maker.values())


def test_ciphers_of_seals_are_made_once_in_a_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def counted(key: bytes) -> AESSIV:
        made.append(key)
        return AESSIV(key)

    monkeypatch.setattr(agreement, "AESSIV", counted)
    stage = room()
    for _ in range(3):
        for name in NAMES:
            stage.unmask(name, NAMES)
        stage.next_round()
    pairs = len(NAMES) * (len(NAMES) - 1)
    assert len(made) == 2 * pairs  # at both ends of each way
    assert len(set(made)) == pairs  # and each way has a key of its own


def test_no_two_seals_are_alike() -> None:
    stage, seen = room(), list[bytes]()
    for _ in range(3):
        seen += [seal for upload in stage.uploads.values() for seal in pieces(upload.sealed, SEALED_BYTES)]
        stage.next_round()
    assert len(set(seen)) == len(seen) == 3 * len(NAMES) * (len(NAMES) - 1)
