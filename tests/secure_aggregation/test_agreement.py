from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from moretta.errors import PeerError
from moretta.keystream import SecretRoot
from moretta.protocol import Stamp
from moretta.secure_aggregation.agreement import KeyAdvert, Offer, PeerKeys, cohort_digest, pair_seed

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "agreement.json").read_text(encoding="utf-8"))
SETUP = VECTORS["setup"]
STAMP = Stamp(*SETUP["stamp"])


def offers() -> dict[str, Offer]:
    return {name: Offer(STAMP, name, SecretRoot(bytes.fromhex(root)), 0) for name, root in SETUP["roots"].items()}


def keys() -> dict[str, bytes]:
    return {name: offer.public_key for name, offer in offers().items()}


def test_rfc7748() -> None:
    vector = {name: bytes.fromhex(value) for name, value in VECTORS["rfc7748"].items() if name != "source"}
    for me, other in (("alice", "bob"), ("bob", "alice")):
        private = X25519PrivateKey.from_private_bytes(vector[me])
        assert private.public_key().public_bytes_raw() == vector[f"{me}_public"]
        assert private.exchange(X25519PublicKey.from_public_bytes(vector[f"{other}_public"])) == vector["shared"]


def test_setup_vector() -> None:
    assert {name: key.hex() for name, key in keys().items()} == SETUP["public_keys"]
    assert cohort_digest(keys()).hex() == SETUP["cohort_digest"]
    for name, offer in offers().items():
        agreement = offer.agree(PeerKeys(stamp=STAMP, keys=keys()))
        assert agreement.parties == 3
        for peer, seed in agreement.seeds.items():
            assert seed.hex() == SETUP["pair_seeds"][" ".join(sorted((name, peer)))]


@pytest.mark.parametrize("key", VECTORS["low_order"]["keys"])
def test_points_of_low_order_are_refused(key: str) -> None:
    with pytest.raises(PeerError, match="low order"):
        KeyAdvert(stamp=STAMP, public_key=bytes.fromhex(key))
    with pytest.raises(PeerError, match=r"silo `bea`.*low order"):
        PeerKeys(stamp=STAMP, keys=keys() | {"bea": bytes.fromhex(key)})


def test_keys_that_make_no_cohort_are_refused() -> None:
    good = keys()
    with pytest.raises(PeerError, match=r"silo `bea`: expected a public key of 32 bytes, got 31"):
        PeerKeys(stamp=STAMP, keys=good | {"bea": bytes(31)})
    with pytest.raises(PeerError, match=r"\['anna', 'bea'\] have the same"):
        PeerKeys(stamp=STAMP, keys=good | {"bea": good["anna"]})
    with pytest.raises(PeerError, match="at least 2"):
        PeerKeys(stamp=STAMP, keys={"anna": good["anna"]})


def test_a_silo_looks_for_its_own_key_and_set_up() -> None:
    good, offer = keys(), offers()["anna"]
    stranger = Offer(STAMP, "x", None, 0).public_key
    without = {name: key for name, key in good.items() if name != "anna"}
    for changed in (good | {"anna": stranger}, without):
        with pytest.raises(PeerError, match="own key of `anna`"):
            offer.agree(PeerKeys(stamp=STAMP, keys=changed))
    with pytest.raises(PeerError, match="expected the keys of round 3, attempt 1"):
        offer.agree(PeerKeys(stamp=Stamp(STAMP.run, 3, 2), keys=good))


def test_keys_are_fresh_and_never_follow_from_a_root() -> None:
    assert len({Offer(STAMP, "anna", None, 0).public_key for _ in range(4)}) == 4
    root = SecretRoot(bytes(32))
    fixed = [
        Offer(stamp, name, root, session).public_key
        for stamp in (STAMP, Stamp("other", 3, 1), Stamp(STAMP.run, 4, 1), Stamp(STAMP.run, 3, 2))
        for name in ("anna", "bea")
        for session in (0, 1)
    ]
    assert len(set(fixed)) == len(fixed)


def test_cohort_digest_has_no_ambiguity() -> None:
    a, b = bytes(31) + b"a", bytes(31) + b"b"
    digests = [cohort_digest(keys) for keys in ({"x": a, "y": b}, {"x": b, "y": a}, {"x": a}, {"xy": a, "z": b})]
    assert len(set(digests)) == len(digests)
    assert cohort_digest({"x": a, "y": b}) == cohort_digest({"y": b, "x": a})


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
    agreement = offer.agree(PeerKeys(stamp=STAMP, keys=keys()))
    for shown in (repr(offer), repr(agreement), str(agreement), f"{agreement!r}"):
        assert "redacted" in shown
        assert not any(seed.hex() in shown or repr(seed) in shown for seed in agreement.seeds.values())
