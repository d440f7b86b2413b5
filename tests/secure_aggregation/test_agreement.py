from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from refused_rows import Row, refused
from sum_driver import rostered

from moretta.contract.messages import Stamp
from moretta.errors import ParameterError, PeerError
from moretta.secure_aggregation.agreement import KeyAdvert, Offer, PeerKeys, pair_seed
from moretta.secure_aggregation.cohort import Cohort, Credentials, Origin, Rules
from moretta.secure_aggregation.keystream import SecretRoot

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "agreement.json").read_text(encoding="utf-8"))
SETUP = VECTORS["setup"]
STAMP = Stamp(*SETUP["stamp"])


RULES = Rules(threshold=SETUP["threshold"], min_survivors=SETUP["min_survivors"])


def offers() -> dict[str, Offer]:
    return {
        name: Offer(STAMP, name, Origin(None, SecretRoot(bytes.fromhex(root)))) for name, root in SETUP["roots"].items()
    }


def keys() -> dict[str, bytes]:
    return {name: offer.public_key for name, offer in offers().items()}


def peers(keys: dict[str, bytes], stamp: Stamp = STAMP) -> PeerKeys:
    return PeerKeys(stamp=stamp, keys=keys, signatures=dict.fromkeys(keys, b""))


def test_rfc7748() -> None:
    vector = {name: bytes.fromhex(value) for name, value in VECTORS["rfc7748"].items() if name != "source"}
    for me, other in (("alice", "bob"), ("bob", "alice")):
        private = X25519PrivateKey.from_private_bytes(vector[me])
        assert private.public_key().public_bytes_raw() == vector[f"{me}_public"]
        assert private.exchange(X25519PublicKey.from_public_bytes(vector[f"{other}_public"])) == vector["shared"]


def test_setup_vector() -> None:
    assert {name: key.hex() for name, key in keys().items()} == SETUP["public_keys"]
    cohort = Cohort.of(keys(), RULES)
    assert cohort.digest.hex() == SETUP["cohort_digest"]
    for name, offer in offers().items():
        agreement = offer.agree(peers(keys()), RULES)
        assert agreement.cohort == cohort
        assert len(agreement.seeds) == len(cohort.names) - 1
        for peer, seed in agreement.seeds.items():
            assert seed.hex() == SETUP["pair_seeds"][" ".join(sorted((name, peer)))]


@pytest.mark.parametrize("key", VECTORS["low_order"]["keys"])
def test_points_of_low_order_are_refused(key: str) -> None:
    with pytest.raises(PeerError, match="low order"):
        KeyAdvert(stamp=STAMP, public_key=bytes.fromhex(key), signature=b"")
    with pytest.raises(PeerError, match=r"silo `bea`.*low order"):
        peers(keys() | {"bea": bytes.fromhex(key)})


def test_keys_that_make_no_cohort_are_refused() -> None:
    good = keys()
    with pytest.raises(PeerError, match=r"silo `bea`: expected a public key of 32 bytes, got 31"):
        peers(good | {"bea": bytes(31)})
    with pytest.raises(PeerError, match=r"\['anna', 'bea'\] have the same"):
        peers(good | {"bea": good["anna"]})
    with pytest.raises(PeerError, match="at least 2"):
        peers({"anna": good["anna"]})


@refused("agreement.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_keys_are_fresh_and_never_follow_from_a_root() -> None:
    assert len({Offer(STAMP, "anna", Origin()).public_key for _ in range(4)}) == 4
    root = SecretRoot(bytes(32))
    fixed = [
        Offer(stamp, name, Origin(None, root, session)).public_key
        for stamp in (STAMP, Stamp("other", 3, 1), Stamp(STAMP.run, 4, 1), Stamp(STAMP.run, 3, 2))
        for name in ("anna", "bea")
        for session in (0, 1)
    ]
    assert len(set(fixed)) == len(fixed)


def test_cohort_digest_has_no_ambiguity() -> None:
    a, b = bytes(31) + b"a", bytes(31) + b"b"
    cohorts = [
        {"x": a, "y": b},
        {"x": b, "y": a},
        {"xy": a, "z": b},
        {name: bytes([ord(name)]) * 32 for name in "wxyz"},
    ]
    digests = [Cohort.of(keys, RULES).digest for keys in cohorts]
    digests += [
        Cohort.of(cohorts[3], rules).digest for rules in (
            Rules(threshold=4), Rules(min_survivors=3), Rules(public_weights=True), ROSTERED,
            rostered(NAMES[:2])[0],
        )
    ]  # fmt: skip
    parts = dict.fromkeys("wxyz", bytes(32))
    for changed in (parts, {**parts, "w": bytes(31) + b"1"}, {**parts, "x": bytes(31) + b"1"}):
        digests.append(Cohort.of(cohorts[3], Rules(degree=2), changed).digest)
    assert len(set(digests)) == len(digests)
    assert Cohort.of({"x": a, "y": b}, RULES).digest == Cohort.of({"y": b, "x": a}, RULES).digest


def test_a_seed_is_bound_to_its_set_up_and_pair() -> None:
    base = ("s" * 32).encode(), STAMP, b"digest", "a", "b"
    changed = [
        (b"t" * 32, *base[1:]),
        (base[0], Stamp("other", 3, 1), *base[2:]),
        (base[0], Stamp(STAMP.run, 4, 1), *base[2:]),
        (base[0], Stamp(STAMP.run, 3, 2), *base[2:]),
        (*base[:2], b"other digest", "a", "b"),
        (*base[:3], "a", "c"),
    ]
    assert len({pair_seed(*arguments) for arguments in (base, *changed)}) == len(changed) + 1
    assert pair_seed(*base) == pair_seed(*base[:3], "b", "a")


def test_secrets_are_not_in_representations() -> None:
    offer = offers()["anna"]
    agreement = offer.agree(peers(keys()), RULES)
    for shown in (repr(offer), repr(agreement), str(agreement), f"{agreement!r}"):
        assert "redacted" in shown
        assert not any(seed.hex() in shown or repr(seed) in shown for seed in agreement.seeds.values())


# With a roster.

NAMES = ["anna", "bea", "carla"]
ROSTERED, CREDENTIALS, RUN = rostered(NAMES)
SIGNED = Stamp(RUN, 3, 1)


def signed_offers(stamp: Stamp = SIGNED) -> dict[str, Offer]:
    return {name: Offer(stamp, name, Origin(CREDENTIALS[name])) for name in NAMES}


def signed(offers: dict[str, Offer], **changed: tuple[bytes, bytes]) -> PeerKeys:
    """What a server relays. changed: key and signature of some silos."""
    pairs = {name: (offer.public_key, offer.signature) for name, offer in offers.items()} | changed
    keys, signatures = ({name: pair[part] for name, pair in pairs.items()} for part in (0, 1))
    return PeerKeys(stamp=SIGNED, keys=keys, signatures=signatures)


def test_signed_keys_are_agreed_on() -> None:
    offers = signed_offers()
    seeds = {name: offer.agree(signed(offers), ROSTERED).seeds for name, offer in offers.items()}
    assert all(seeds[one][other] == seeds[other][one] for one in NAMES for other in NAMES if one != other)


def substituted(how: str) -> tuple[bytes, bytes]:
    """What a server can try for the advert of `bea`, by what it does."""
    others = rostered(NAMES[:2])[1]["bea"].roster
    stranger, forged = (Offer(SIGNED, "bea", Origin(by)) for by in (None, CREDENTIALS["carla"]))
    bea = CREDENTIALS["bea"].identity
    elsewhere = Offer(Stamp(f"test.{others.digest[:16]}", 3, 1), "bea", Origin(Credentials(bea, others)))
    made = {
        "a key of its own": (stranger.public_key, b""),
        "a key of its own with the old signature": (stranger.public_key, signed_offers()["bea"].signature),
        "a key that another signed": (forged.public_key, forged.signature),
        "no signature": (signed_offers()["bea"].public_key, b""),
        "an advert for another roster": (elsewhere.public_key, elsewhere.signature),
    }
    for why, stamp in (
        ("of another round", Stamp(RUN, 2, 1)),
        ("of another attempt", Stamp(RUN, 3, 0)),
        ("of another run", Stamp(f"other.{RUN.split('.')[1]}", 3, 1)),
    ):
        old = signed_offers(stamp)["bea"]
        made[f"an advert {why}"] = old.public_key, old.signature
    return made[how]


def test_who_is_not_in_the_roster_is_named() -> None:
    offers = signed_offers()
    stranger = Offer(SIGNED, "dora", Origin(CREDENTIALS["bea"]))
    with pytest.raises(PeerError, match="silo `dora` is not in the roster"):
        offers["anna"].agree(signed(offers, dora=(stranger.public_key, stranger.signature)), ROSTERED)


def test_signed_keys_where_no_roster_is_set() -> None:
    offer = Offer(SIGNED, "anna", Origin())
    others = {name: signed_offers()[name] for name in ("bea", "carla")}
    with pytest.raises(PeerError, match="the key of `bea` is signed, but no roster is set here"):
        offer.agree(signed({"anna": offer, **others}), RULES)


@pytest.mark.parametrize("silos", [2, 3, 4, 9, 12, 51, 60])
def test_rules_that_fit_all_silos_fit_any_of_them(silos: int) -> None:
    """Silos may be missing from the start: what was checked for all of them must do for as few as two."""
    fit = 0
    for degree in (None, 2, 4, 6, 10, 24, 50):
        for threshold in (None, *range(1, silos + 1)):
            rules = Rules(degree=degree, threshold=threshold)
            try:
                rules.check(silos)
            except ParameterError:
                continue
            fit += 1
            for left in range(2, silos + 1):
                plan = rules.plan(left)
                members = left if plan.degree is None else plan.degree + 1
                assert members <= left
                assert members < 2 * plan.threshold <= 2 * members
                if threshold is not None:
                    assert plan.threshold == threshold or not members < 2 * threshold <= 2 * members
    assert fit > 1 or silos == 2


@pytest.mark.parametrize(
    "how",
    ["a key of its own", "a key of its own with the old signature", "a key that another signed", "no signature",
     "an advert for another roster", "an advert of another round", "an advert of another attempt",
     "an advert of another run"],
)  # fmt: skip
def test_a_substituted_advert_names_its_silo(how: str) -> None:
    offers = signed_offers()
    relayed = signed(offers, bea=substituted(how))
    for name in ("anna", "carla"):
        with pytest.raises(PeerError, match="the key of silo `bea` is not signed for round 3, attempt 1"):
            offers[name].agree(relayed, ROSTERED)
