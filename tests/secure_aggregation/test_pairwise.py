from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESSIV, ChaCha20Poly1305
from hypothesis import given
from hypothesis import strategies as st
from refused_rows import Row, refused
from sum_driver import ASKED, CODEC, NOW, Answer, Late, Seen, Silo, Train, Vanished, agreed, play, whole_sum

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Reason
from moretta.errors import MisuseError, ParameterError, PeerError, RangeError
from moretta.secure_aggregation.agreement import AdvertiseKey, KeyAdvert, KeysAccepted, PeerKeys
from moretta.secure_aggregation.cohort import Credentials, Origin, Rules
from moretta.secure_aggregation.encoding import MOST_WEIGHT, Ring
from moretta.secure_aggregation.identity import Identity, Roster
from moretta.secure_aggregation.keystream import Extracted, SecretRoot
from moretta.secure_aggregation.masks import add_masks, label_of, pair_key, self_key
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.schemes import aggregator, contributor
from moretta.secure_aggregation.sums import Sum, Wanted
from moretta.secure_aggregation.unmasking import Confirmed, SelfMaskShares, Unmask

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "sums.json").read_text(encoding="utf-8"))


def fixed(names: list[str], bits: int = 64) -> dict:
    """Contributors with fixed keys after a set-up."""
    silos = {
        name: contributor("pairwise", name, bits, origin=Origin(None, SecretRoot.insecure(0, name))) for name in names
    }
    agreed({name: silo.answer for name, silo in silos.items()}, bits=bits)
    return silos


# Vectors.


def stated(message: Message) -> dict:
    """A message's fields as the vectors write them."""

    def written(value):
        match value:
            case bytes():
                return value.hex()
            case np.ndarray():
                return value.tolist()
            case Mapping():
                return {name: written(item) for name, item in value.items()}
            case tuple():
                return list(value)
        return value

    return {name: written(getattr(message, name)) for name in message.KINDS}


def vector_silos(case: dict, rules: Rules, credentials: Mapping[str, Credentials] | None = None) -> dict[str, Silo]:
    bits, silos = case.get("bits", 64), {}
    for name, root in case["roots"].items():
        data, own = case["silos"][name], (credentials or {}).get(name)
        insecure = SecretRoot(bytes.fromhex(root))
        silos[name] = Silo(
            "pairwise", name, bits, data["values"], data["weight"], rules=rules, credentials=own, insecure=insecure
        )
    return silos


@pytest.mark.parametrize("case", VECTORS["uploads"], ids=lambda case: f"{case['bits']} bits")
def test_upload_vectors(case: dict) -> None:
    rules, stamp = Rules(min_survivors=2), Stamp(*case["stamp"])
    silos = vector_silos(case, rules)
    server = agreed(silos, bits=case["bits"], rules=rules, now=stamp)
    wanted = server.want({"w": (3,), "b": (2,)}, {"w": case["limit"], "b": case["limit"]}, case["most_weight"])
    assert wanted.fraction_bits == dict.fromkeys("wb", case["fraction_bits"]) | {MOST_WEIGHT: case["most_weight"]}
    for name, expected in case["silos"].items():
        upload = silos[name](Train(stamp=stamp, encoding=wanted.fraction_bits))
        assert stated(upload) == expected["upload"]


def test_rfc5297() -> None:
    key, aad, plain, sealed = (bytes.fromhex(VECTORS["rfc5297"][part]) for part in ("key", "aad", "plain", "sealed"))
    assert AESSIV(key).encrypt(plain, [aad]) == sealed


def test_rfc8439() -> None:
    key, nonce, aad, plain, sealed = (bytes.fromhex(VECTORS["rfc8439"][part]) for part in
                                      ("key", "nonce", "aad", "plain", "sealed"))  # fmt: skip
    assert ChaCha20Poly1305(key).encrypt(nonce, plain, aad) == sealed


DROPOUT = VECTORS["dropout"]


def played_dropout(vanish_before: type[Message] | None = None) -> tuple[dict[str, Silo], list[Any], Any]:
    """Play the vector's sum. Returns the silos, who was asked what and answered what, and the result.

    vanish_before: what nobody gets any more.
    """
    roster = Roster({name: bytes.fromhex(key) for name, key in DROPOUT["roster"].items()})
    identities = {name: Identity(bytes.fromhex(key)) for name, key in DROPOUT["identities"].items()}
    rules = Rules(min_survivors=2, roster=roster)
    silos = vector_silos(DROPOUT, rules, {name: Credentials(own, roster) for name, own in identities.items()})
    said: list[tuple[str, Message, Message]] = []

    def heard(name: str) -> Answer:
        def answer(asked: Message) -> Message:
            if vanish_before is not None and isinstance(asked, vanish_before):
                raise Vanished
            reply = silos[name](asked)
            said.append((name, asked, reply))
            return Late(reply) if name == DROPOUT["lost"] and isinstance(asked, Train) else reply

        return answer

    played, stamp = {name: heard(name) for name in silos}, Stamp(*DROPOUT["stamp"])
    server = agreed(played, rules=rules, now=stamp)
    limit = DROPOUT["limit"]
    wanted = server.want({"w": (3,), "b": (2,)}, {"w": limit, "b": limit}, DROPOUT["most_weight"])
    return silos, said, play(server.sum(Train(stamp=stamp, encoding=wanted.fraction_bits), wanted), played)


def test_dropout_vector() -> None:
    _, said, total = played_dropout()

    def answers(kind: type[Message]) -> dict[str, dict]:
        return {name: stated(reply) for name, _, reply in said if isinstance(reply, kind)}

    assert answers(KeyAdvert) == DROPOUT["adverts"]
    assert {reply["cohort"] for reply in answers(KeysAccepted).values()} == {DROPOUT["cohort_digest"]}
    assert answers(MaskedUpload) == DROPOUT["uploads"]
    assert answers(Confirmed) == DROPOUT["confirmed"]
    assert {name: stated(asked) for name, asked, _ in said if isinstance(asked, Unmask)} == DROPOUT["unmask"]
    assert {name: reply["shares"] for name, reply in answers(SelfMaskShares).items()} == DROPOUT["shares"]
    assert {name: reply["secret"] for name, reply in answers(SelfMaskShares).items()} == DROPOUT["secrets"]
    assert isinstance(total, Sum)
    expected = DROPOUT["sum"]
    assert (list(total.silos), total.weight) == (DROPOUT["survivors"], expected["weight"])
    exact = np.ldexp(np.array(expected["entries"], dtype=np.float64), -expected["fraction_bits"]) / total.weight
    assert [*total.means["b"], *total.means["w"]] == exact.tolist()


@pytest.mark.parametrize("tampered", DROPOUT["tampered"], ids=lambda tampered: tampered["why"])
def test_tampered_unmasking_vectors(tampered: dict) -> None:
    silos, _, _ = played_dropout(vanish_before=Unmask)
    told = tampered["unmask"]
    asked = Unmask(
        stamp=Stamp(*DROPOUT["stamp"]),
        survivors=tuple(told["survivors"]),
        signatures={name: bytes.fromhex(item) for name, item in told["signatures"].items()},
        sealed=bytes.fromhex(told["sealed"]),
        digests=bytes.fromhex(told["digests"]),
    )
    if tampered["shares"] is None:
        with pytest.raises(PeerError):
            silos[tampered["to"]](asked)
    else:
        assert sorted(silos[tampered["to"]](asked).makers) == sorted(tampered["shares"])


@given(
    names=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=5), min_size=2, max_size=8,
                   unique=True),
    bits=st.sampled_from([32, 64]),
)  # fmt: skip
def test_masks_cancel_for_any_cohort(names: list[str], bits: int) -> None:
    silos = fixed(names, bits)
    total = np.zeros((2, 3), dtype=f"uint{bits}")
    for name, silo in silos.items():
        agreement, _ = silo._keys.agreed
        label = label_of(NOW, agreement.cohort.digest, {"w": (2, 3)}, {"w": 20, MOST_WEIGHT: 9}, bytes(32))
        masks = [(name < peer, pair_key(Extracted(seed), label, name, peer)) for peer, seed in agreement.seeds.items()]
        before = total.copy()
        add_masks(total, masks)
        assert (total != before).any()
    assert not total.any()


@given(st.permutations(range(5)), st.sampled_from([32, 64]), st.randoms(use_true_random=False))
def test_order_of_replies_does_not_matter_exactly(order: list[int], bits: int, random) -> None:
    data = {f"s{k}": Silo("pairwise", f"s{k}", bits, {"w": [random.uniform(-9, 9), 1.0]}, k + 1) for k in range(5)}
    straight = whole_sum(data, "pairwise", bits)
    shuffled = whole_sum({f"s{k}": data[f"s{k}"] for k in order}, "pairwise", bits)
    assert straight.weight == shuffled.weight == 15
    assert straight.means["w"].tobytes() == shuffled.means["w"].tobytes()


@pytest.mark.parametrize("of_a_pair", [True, False])
def test_changing_anything_in_its_label_changes_the_mask(of_a_pair: bool) -> None:
    def mask(
        seed: bytes = b"s" * 32, run: str = "r", number: int = 1, attempt: int = 0, cohort: bytes = b"c",
        tensors: str = "vw", shape: tuple[int, ...] = (2, 3), bits: int = 20, most: int = 9,
        me: str = "a", peer: str = "b", take: int = 0, asked: bytes = bytes(32),
    ) -> bytes:  # fmt: skip
        shapes, encoding = dict.fromkeys(tensors, (6,)), dict.fromkeys(tensors, 5)
        shapes["w"], encoding["w"], encoding[MOST_WEIGHT] = shape, bits, most
        label = label_of(Stamp(run, number, attempt, take), cohort, shapes, encoding, asked)
        words = np.zeros(4, dtype=np.uint64)
        add_masks(
            words, [(True, pair_key(Extracted(seed), label, me, peer) if of_a_pair else self_key(seed, label, me))]
        )
        return words.tobytes()

    changes: list[dict[str, Any]] = [
        {"seed": b"t" * 32}, {"run": "q"}, {"number": 2}, {"attempt": 1}, {"take": 1}, {"asked": b"q" * 32},
        {"cohort": b"d"}, {"tensors": "uw"},
        {"tensors": "uvw"}, {"tensors": "w"}, {"shape": (3, 2)}, {"shape": (6,)}, {"shape": (1, 2, 3)}, {"shape": ()},
        {"bits": 21}, {"bits": -20}, {"most": 10}, {"me": "c"}, *([{"peer": "c"}] if of_a_pair else []),
    ]  # fmt: skip
    masks = {mask(), *(mask(**change) for change in changes)}
    assert len(masks) == len(changes) + 1
    assert mask() == mask(tensors="wv")


def test_a_pairs_mask_is_nobodys_own_mask() -> None:
    label = label_of(NOW, b"c", {"w": ()}, {"w": 20, MOST_WEIGHT: 9}, bytes(32))
    assert pair_key(Extracted(b"s" * 32), label, "a", "b") == pair_key(Extracted(b"s" * 32), label, "b", "a")
    assert pair_key(Extracted(b"s" * 32), label, "a", "a") != self_key(b"s" * 32, label, "a")


def test_a_repeated_round_shares_no_mask_with_any_attempt() -> None:
    # With the same data in all, uploads differ by their masks alone; and no word of one mask returns in another.
    silos = {name: Silo("pairwise", name, 64, {"w": np.zeros(500)}) for name in "ab"}
    server = agreed(silos)
    stamps = [Stamp(NOW.run, number, attempt) for number in (1, 2) for attempt in range(3)]
    words = []
    for stamp in stamps:
        wanted = server.want({"w": (500,)}, {"w": 1.0}, 2)
        words += silos["a"](Train(stamp=stamp, encoding=wanted.fraction_bits)).tensors["w"].tolist()
        if stamp.attempt == 1:  # keys are agreed on anew in the middle of a round
            server = agreed(silos, now=stamp)
            words += silos["a"](Train(stamp=stamp, encoding=wanted.fraction_bits)).tensors["w"].tolist()
    # 4,000 uniform words of 64 bits are all different but with a chance below 4000^2 / 2^65 < 10^-12.
    assert len(set(words)) == len(words) == 4000


def test_a_mask_is_used_once() -> None:
    silo = fixed(["a", "b"])["a"]
    one, encoding = {"w": np.ones(2)}, {"w": 20, MOST_WEIGHT: 2}
    silo.upload(NOW, one, 1, encoding, asked=ASKED)
    with pytest.raises(MisuseError, match=r"'w'.*uploaded before"):
        silo.upload(NOW, one, 1, encoding, asked=ASKED)
    with pytest.raises(MisuseError, match="uploaded before"):  # one fresh name does not help
        silo.upload(NOW, {"v": np.ones(1), **one}, 1, {"v": 20, **encoding}, asked=ASKED)
    other = silo.upload(
        NOW, {"v": np.ones(2)}, 1, {"v": 20, MOST_WEIGHT: 2}, asked=ASKED
    )  # other tensors of the same stamp
    later = Stamp(NOW.run, 2, 0)
    assert (
        silo.upload(later, one, 1, encoding, asked=ASKED).weight != other.weight
    )  # the weight's mask is another each time
    for stamp in (NOW, Stamp(NOW.run, 1, 5), Stamp("another run", 9, 0)):
        with pytest.raises(MisuseError):
            silo.upload(stamp, {"u": np.ones(2)}, 1, {"u": 20, MOST_WEIGHT: 2}, asked=ASKED)


def test_a_refused_upload_uses_no_label() -> None:
    silo = fixed(["a", "b"])["a"]
    encoding = {"w": 20, MOST_WEIGHT: 2}
    with pytest.raises(RangeError, match=r"`w`: a value is outside the range .*nothing was sent"):
        silo.upload(NOW, {"w": np.array([1e30])}, 1, encoding, asked=ASKED)
    silo.upload(NOW, {"w": np.array([1.0])}, 1, encoding, asked=ASKED)


@refused("pairwise.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_calls_in_the_wrong_order() -> None:
    silo = contributor("pairwise", "a")
    with pytest.raises(MisuseError, match="set-up"):
        silo.upload(NOW, {"w": np.ones(1)}, 1, {"w": 1, MOST_WEIGHT: 2}, asked=ASKED)
    advert = silo.answer(AdvertiseKey(stamp=NOW))
    assert isinstance(advert, KeyAdvert)
    other = contributor("pairwise", "b").answer(AdvertiseKey(stamp=NOW))
    keys = PeerKeys(stamp=NOW, keys={"a": advert.public_key, "b": other.public_key}, signatures={"a": b"", "b": b""})
    silo.answer(keys)
    with pytest.raises(MisuseError, match="before the own key"):
        silo.answer(keys)
    assert silo.answer(Train(stamp=NOW, encoding={})) is None
    silo.answer(AdvertiseKey(stamp=NOW))  # a new set-up forgets the old seeds
    with pytest.raises(MisuseError, match="set-up"):
        silo.upload(NOW, {"w": np.ones(1)}, 1, {"w": 1, MOST_WEIGHT: 2}, asked=ASKED)


def test_the_server_needs_a_cohort() -> None:
    server = aggregator("pairwise")
    with pytest.raises(ParameterError, match='one silo needs scheme = "none"'):
        play(server.setup(NOW, ["a"]), {})
    for cohort in ([], ["a", "a"]):
        with pytest.raises(MisuseError):
            play(server.setup(NOW, cohort), {})
    wanted = Wanted({"w": ()}, {"w": 1, MOST_WEIGHT: 2}, 2)
    with pytest.raises(MisuseError, match="without a set-up"):
        play(server.sum(Train(stamp=NOW, encoding=wanted.fraction_bits), wanted), {})


def test_a_bad_key_costs_only_its_silo() -> None:
    silos = {name: contributor("pairwise", name).answer for name in "abc"}
    low = CODEC.encode(KeyAdvert(stamp=NOW, public_key=bytes([9]) + bytes(31), signature=b"")).replace(b"09", b"00", 1)
    server = aggregator("pairwise")
    aborted = play(server.setup(NOW, list("abc")), {**silos, "b": lambda asked: low})
    assert isinstance(aborted, Aborted)
    assert {name: why.reason for name, why in aborted.missing.items()} == {"b": Reason.MALFORMED}
    same = contributor("pairwise", "a", origin=Origin(None, SecretRoot(bytes(32)))).answer
    aborted = play(server.setup(NOW, list("abc")), {**silos, "a": same, "b": same})
    assert isinstance(aborted, Aborted)
    assert set(aborted.missing) == {"a", "b"}
    assert server.cohort == ()


def test_an_impossible_weight_is_taken_as_the_nearest_that_can_be(caplog: pytest.LogCaptureFixture) -> None:
    """It ended the run: masks hide who told it, so there was nobody to go on without."""
    silos = {name: Silo("pairwise", name, 64, {"w": [1.0]}, 5) for name in "ab"}

    def lie(asked: Train) -> MaskedUpload:
        told = silos["b"](asked)
        return replace(told, weight=np.add(told.weight, 7, out=told.weight.copy()))

    total = whole_sum(silos, "pairwise", replaced={"b": lie})
    assert isinstance(total, Sum)
    assert total.weight == 10
    np.testing.assert_allclose(total.means["w"], [1.0])
    assert "weights sum to 17, expected 2 to 10" in caplog.text


def test_a_small_weight_does_not_make_means_larger_than_an_upload_may_be(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody's part of a mean of two silos' rows is beyond the range that each is held to, with whatever weights."""
    silos = {name: Silo("pairwise", name, 64, {"w": [1.0, 0.0]}, 5) for name in "ab"}

    def lie(asked: Train) -> MaskedUpload:
        told = silos["b"](asked)
        words = told.tensors["w"].copy()
        words[:1] += np.uint64(2**61)
        return replace(told, weight=np.subtract(told.weight, 8, out=told.weight.copy()), tensors={"w": words})

    total = whole_sum(silos, "pairwise", replaced={"b": lie})
    assert isinstance(total, Sum)
    bits = Ring(64).fraction_bits("w", 100.0, 10, 2)  # as `one_sum` has it
    assert total.weight == 2
    assert 100.0 < total.means["w"][0] <= float(Ring(64).largest(bits, 10, 2)) + total.steps["w"] <= 200.0
    assert abs(total.means["w"][1]) < 1e-15
    assert "`w`: a mean of the secure sum is" in caplog.text


def test_what_the_server_sees_of_one_silo_is_not_its_data() -> None:
    seen: Seen = []
    silos = {name: Silo("pairwise", name, 64, {"w": np.zeros(4000)}) for name in "ab"}
    whole_sum(silos, "pairwise", seen=seen)
    uploads = [message for _, message in seen if isinstance(message, MaskedUpload)]
    assert len(uploads) == 2
    for upload in uploads:
        bits = np.unpackbits(upload.tensors["w"].view(np.uint8))
        # 256,000 fair bits: six standard deviations of their mean are 0.006; a true failure is certain.
        assert abs(bits.mean() - 0.5) < 0.006


def test_secrets_are_not_in_representations() -> None:
    silo = fixed(["a", "b"])["a"]
    agreement, _ = silo._keys.agreed
    seed = agreement.seeds["b"]
    for shown in (repr(silo), repr(agreement)):
        assert "redacted" in shown
        assert seed.hex() not in shown
        assert repr(seed) not in shown
