"""Sums that only their members read: uploads under one more keystream, taken off again by who has the secret."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sum_driver import ASKED, NOW, Answer, Silo, Train, Vanished, agreed, at_upload, exact_means, play

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted
from moretta.errors import MisuseError, PeerError
from moretta.secure_aggregation.cohort import Rules
from moretta.secure_aggregation.encoding import CHUNK, MOST_WEIGHT, Ring
from moretta.secure_aggregation.keyed_sums import Aggregator
from moretta.secure_aggregation.keystream import Keystream, SecretRoot, derive
from moretta.secure_aggregation.masks import PRIME, TAG, blind_key, label_of, read, tag_in, tag_of, tag_shape, tag_words
from moretta.secure_aggregation.schemes import aggregator, contributor
from moretta.secure_aggregation.sums import Query, Relayed, Sum
from moretta.secure_aggregation.unmasking import Unmask

KEY = bytes(range(32))
WAYS = [(scheme, bits) for scheme in ("pairwise", "additive-shares") for bits in (64, 32)]
WEIGHTS = [Rules(), Rules(public_weights=True)]
LATER = replace(NOW, attempt=1)
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "sums.json").read_text(encoding="utf-8"))["blinded"]

each_way = pytest.mark.parametrize(("scheme", "bits"), WAYS)
each_weight = pytest.mark.parametrize("rules", WEIGHTS, ids=["hidden", "public"])


class Member(Silo):
    """A silo that blinds what it uploads."""

    key: bytes | None = KEY
    about: Query = ASKED

    def __call__(self, asked: Message) -> Any:
        if isinstance(asked, Train):
            return self.contributor.upload(
                asked.stamp, self.tensors, self.weight, asked.encoding, self.key, asked=self.about
            )
        return super().__call__(asked)


def members(scheme: str, bits: int, rules: Rules = WEIGHTS[0], count: int = 4) -> dict[str, Member]:
    rng = np.random.default_rng(count)
    return {
        f"s{k}": Member(
            scheme, f"s{k}", bits, {"w": rng.normal(size=(2, 3)), "loss": rng.normal()}, 3 * k + 1, rules=rules
        )
        for k in range(count)
    }


def relayed(
    server: Aggregator,
    cohort: Mapping[str, Silo],
    now: Stamp = NOW,
    replaced: Mapping[str, Answer] | None = None,
    *,
    codec: bool = True,
) -> tuple[Relayed, dict[str, int]]:
    """Have the tensors of a cohort added up unread. Returns also how they were encoded."""
    shapes = {name: value.shape for name, value in next(iter(cohort.values())).tensors.items()}
    weight, blinded = sum(silo.weight for silo in cohort.values()), any(getattr(s, "key", 0) for s in cohort.values())
    wanted = server.want(shapes, dict.fromkeys(shapes, 100.0), weight, blinded=blinded)
    ask = Train(stamp=now, encoding=wanted.fraction_bits)
    total = play(server.relay(ask, wanted), {**cohort, **(replaced or {})}, codec=codec)
    assert isinstance(total, Relayed)
    return total, dict(wanted.fraction_bits)


def same(one: Sum, other: Sum) -> bool:
    means = {name: mean.tobytes() for name, mean in one.means.items()}
    return (
        means == {name: mean.tobytes() for name, mean in other.means.items()}
        and (one.weight, one.steps, list(one.silos)) == (other.weight, other.steps, list(other.silos))
        and all(mean.shape == other.means[name].shape for name, mean in one.means.items())
    )


def read_by(
    silo: Silo, total: Relayed, encoding: Mapping[str, int], now: Stamp = NOW, key: bytes | None = KEY
) -> Sum | None:
    """Return what a member reads; None where it is refused."""
    try:
        return silo.contributor.read(now, total, encoding, key, asked=ASKED)
    except PeerError:
        return None


# What members read.


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.integers(1, 10**5)), min_size=2, max_size=5),
    st.sampled_from(WAYS),
    st.sampled_from(WEIGHTS),
    st.binary(min_size=32, max_size=32),
)
def test_what_members_read_is_the_sum_to_the_last_bit(
    rows: list[tuple[float, int]], way: tuple[str, int], rules: Rules, key: bytes
) -> None:
    cohort = {
        f"s{k}": Member(way[0], f"s{k}", way[1], {"x": x / 3, "y": [x, -x]}, weight, rules=rules)
        for k, (x, weight) in enumerate(rows)
    }
    server = agreed(cohort, *way, rules)
    for silo in cohort.values():
        silo.key = key
    total, encoding = relayed(server, cohort)
    for silo in cohort.values():
        silo.key = None
    shapes = {"x": (), "y": (2,)}
    wanted = server.want(shapes, dict.fromkeys(shapes, 100.0), sum(weight for _, weight in rows))
    in_the_open = play(server.sum(Train(stamp=LATER, encoding=wanted.fraction_bits), wanted), cohort)
    for silo in cohort.values():
        found = silo.contributor.read(NOW, total, encoding, key, asked=ASKED)
        assert same(found, in_the_open)
        assert found.weight == sum(weight for _, weight in rows)
        for name in shapes:
            assert (
                found.means[name].ravel().tolist() == exact_means(cohort, list(cohort), name, encoding[name]).tolist()
            )


@each_way
def test_a_relay_without_a_key_is_the_sum_for_anybody(scheme: str, bits: int) -> None:
    cohort = members(scheme, bits)
    for silo in cohort.values():
        silo.key = None
    total, encoding = relayed(agreed(cohort, scheme, bits), cohort)
    found = read_by(cohort["s1"], total, encoding, key=None)
    assert found is not None
    assert found.means["w"].ravel().tolist() == exact_means(cohort, list(cohort), "w", encoding["w"]).tolist()


@pytest.mark.parametrize("bits", [64, 32])
@each_weight
@pytest.mark.parametrize("lost", [["s0"], ["s1", "s3"]])
def test_with_dropouts_everybody_reads_the_survivors_sum(bits: int, rules: Rules, lost: list[str]) -> None:
    """One silo vanishes in the unmasking, and counts; those in `lost` do before they upload, and read all the same."""
    rules = replace(rules, threshold=4)
    cohort = members("pairwise", bits, rules, 6)
    last = "s5"

    def gone(asked: Message) -> Any:
        raise Vanished

    def gone_at_last(asked: Message) -> Any:
        return gone(asked) if isinstance(asked, Unmask) else cohort[last](asked)

    server = agreed(cohort, "pairwise", bits, rules)
    ways: dict[str, Answer] = {name: at_upload(gone, cohort[name]) for name in lost}
    if len(lost) == 1:  # with one more, the threshold of 4 would be missed
        ways[last] = gone_at_last
    total, encoding = relayed(server, cohort, replaced=ways)
    left = sorted(set(cohort) - set(lost))
    assert list(total.silos) == left
    for silo in cohort.values():
        found = read_by(silo, total, encoding)
        assert found is not None
        assert found.weight == sum(cohort[name].weight for name in left)
        assert list(found.silos) == left
        for name in ("w", "loss"):
            assert found.means[name].ravel().tolist() == exact_means(cohort, left, name, encoding[name]).tolist()


def test_too_few_survivors_or_any_in_additive_shares_end_a_relay() -> None:
    def gone(asked: Message) -> Any:
        raise Vanished

    for scheme, lost in (("pairwise", ["s0", "s1"]), ("additive-shares", ["s2"])):
        cohort = members(scheme, 64)
        server = agreed(cohort, scheme)
        wanted = server.want({"w": (2, 3), "loss": ()}, {"w": 9.0, "loss": 9.0}, 99, blinded=True)
        ways = {name: at_upload(gone, cohort[name]) for name in lost}
        aborted = play(server.relay(Train(stamp=NOW, encoding=wanted.fraction_bits), wanted), {**cohort, **ways})
        assert isinstance(aborted, Aborted)
        assert sorted(aborted.missing) == lost


# What does not read as the sum. A blind hides, and the tag authenticates: other numbers pass with a chance of 2^-64.


def misreadings(total: Relayed, encoding: dict[str, int]) -> Iterator[tuple[str, Relayed, dict[str, int], Stamp, Any]]:
    """Yield what is wrong, the relayed sum, its encoding, its stamp and the key."""
    silos = list(total.silos)
    yield "another key", total, encoding, NOW, bytes(32)
    yield "no key", total, encoding, NOW, None
    yield "a bit of the key", total, encoding, NOW, bytes([KEY[0] ^ 1]) + KEY[1:]
    yield "a silo too few", replace(total, silos=silos[1:]), encoding, NOW, KEY
    yield "a silo too many", replace(total, silos=[*silos, "s9"]), encoding, NOW, KEY
    yield "a silo twice", replace(total, silos=[*silos[1:], silos[-1]]), encoding, NOW, KEY
    yield "another silo", replace(total, silos=[*silos[1:], "s9"]), encoding, NOW, KEY
    yield "the next attempt", total, encoding, LATER, KEY
    yield "the next round", total, encoding, replace(NOW, round=2), KEY
    yield "another run", total, encoding, replace(NOW, run="other"), KEY
    yield "a bit less behind the point", total, encoding | {"w": encoding["w"] - 1}, NOW, KEY
    yield "another bound of the weight", total, encoding | {MOST_WEIGHT: 99}, NOW, KEY
    turned = {name: words.T.copy() if words.ndim else words for name, words in total.tensors.items()}
    yield "another shape", replace(total, tensors=turned), encoding, NOW, KEY


@each_way
@each_weight
def test_what_was_blinded_in_another_way_does_not_read(scheme: str, bits: int, rules: Rules) -> None:
    cohort = members(scheme, bits, rules)
    total, encoding = relayed(agreed(cohort, scheme, bits, rules), cohort)
    good = read_by(cohort["s0"], total, encoding)
    assert good is not None
    for why, wrong, how, now, key in misreadings(total, encoding):
        found = read_by(cohort["s0"], wrong, how, now, key)
        assert found is None, why
    assert same(good, read_by(cohort["s0"], total, encoding) or good), "what was received is never written to"


@given(
    st.sampled_from(WAYS),
    st.sampled_from(WEIGHTS),
    st.sampled_from(["weight", "w", "loss", TAG]),
    st.one_of(st.integers(1, 2**32 - 1), st.integers(0, 31).map(lambda bit: 1 << bit)),
    st.integers(0, 31),
    st.integers(0, 2**89),
)
def test_no_sum_that_a_relay_moved_is_read(
    way: tuple[str, int], rules: Rules, name: str, change: int, up: int, guess: int
) -> None:
    """Any change of one entry, with any change of the tag: by the highest bits too, which a tag in the ring misses."""
    cohort = members(*way, rules)
    total, encoding = relayed(agreed(cohort, *way, rules), cohort)
    ring, wrong = Ring(way[1]), dict(total.tensors) | {"weight": total.weight}
    entry = wrong[name] = wrong[name].copy()
    entry.reshape(-1)[-1] += np.asarray(change << up if way[1] == 64 else change, entry.dtype)
    if name != TAG:
        wrong[TAG] = wrong[TAG] + tag_words(ring, guess % PRIME, guess.to_bytes(32, "little"))
    weight = wrong.pop("weight")
    assert read_by(cohort["s0"], Relayed(wrong, weight, total.silos), encoding) is None
    assert read_by(cohort["s0"], total, encoding) is not None


@pytest.mark.parametrize("bits", [64, 32])
def test_a_tag_is_the_sum_of_products_in_whole_numbers(bits: int) -> None:
    """Of integers at both ends of the ring, over more than one chunk; and tags add up as what they are of does."""
    ring, label = Ring(bits), label_of(NOW, bytes(32), {"x": (1,)}, {}, bytes(32))
    rng = np.random.default_rng(bits)
    half = 2 ** (bits - 2)
    one, other = (
        np.concatenate([rng.integers(-half, half, CHUNK + 3), [-half, half - 1, 0, -1]]).astype(f"int{bits}")
        for _ in range(2)
    )
    stream = Keystream(derive(KEY, "tag", *label)).integers(1 + one.size, 64)
    for weights, integers in (((3,), one), ((3, 2**31), one + other)):
        exact = sum(int(c) * int(x) for c, x in zip(stream, [sum(weights), *integers], strict=True)) % PRIME
        assert tag_of(KEY, label, sum(weights), {"x": integers.view(ring.dtype), TAG: np.zeros(1)}) == exact
    parts = [tag_of(KEY, label, weight, {"x": x.view(ring.dtype)}) for weight, x in ((3, one), (2**31, other))]
    assert sum(parts) % PRIME == exact
    for secret in (bytes(32), bytes([255]) * 32):
        largest = tag_words(ring, PRIME - 1, secret)
        assert largest.shape == tag_shape(ring)
        assert int(largest.max()) < 2 ** (bits // 2)
        assert tag_in(ring, largest, 1) == PRIME - 1
        assert tag_in(ring, largest + largest, 2) == 2 * (PRIME - 1) % PRIME
    with pytest.raises(PeerError):
        tag_in(ring, largest + largest, 1)  # words that one silo's cannot be


def test_a_tag_travels_in_other_words_each_time() -> None:
    """So what a sum of half words carries over does not depend on the silos' tags."""
    ring = Ring(64)
    sent = [tag_words(ring, 5, secret).tolist() for secret in (bytes(32), bytes([1]) * 32, bytes([2]) * 32)]
    assert sent[0] == [5, 0, 0, 0, 0]
    assert all(len(set(words)) == 3 for words in zip(*sent, strict=True))


def broken(total: Relayed, encoding: dict[str, int]) -> Iterator[tuple[str, Relayed, dict[str, int]]]:
    other = np.dtype("uint32") if total.weight.dtype == np.uint64 else np.dtype("uint64")
    yield (
        "words of the other ring",
        replace(total, tensors={k: v.astype(other) for k, v in total.tensors.items()}),
        encoding,
    )
    yield "a weight of the other ring", replace(total, weight=total.weight.astype(other)), encoding
    yield "floats", replace(total, tensors={k: v.astype(float) for k, v in total.tensors.items()}), encoding
    yield "two weights", replace(total, weight=total.weight.reshape(1)), encoding
    yield "a tensor too few", replace(total, tensors={"w": total.tensors["w"]}), encoding
    yield "a tensor too many", replace(total, tensors={**total.tensors, "v": total.tensors["w"]}), encoding
    yield "no encoding", total, {}
    yield "no bound of the weight", total, {name: bits for name, bits in encoding.items() if name != MOST_WEIGHT}
    for bits in (2**63 - 1, 5000, 965, -961, -5000, -(2**63)):
        yield f"{bits} bits behind the point", total, encoding | {"w": bits}


@each_way
@each_weight
def test_what_cannot_be_a_sum_is_a_peers_error(scheme: str, bits: int, rules: Rules) -> None:
    cohort = members(scheme, bits, rules)
    total, encoding = relayed(agreed(cohort, scheme, bits, rules), cohort)
    for _, wrong, how in broken(total, encoding):
        with pytest.raises(PeerError):
            cohort["s0"].contributor.read(NOW, wrong, how, KEY, asked=ASKED)


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("limit", [2.0**-900, 2.0**900])
def test_the_widest_and_narrowest_limits_are_read(bits: int, limit: float) -> None:
    ring, label = Ring(bits), label_of(NOW, bytes(32), {"x": ()}, {}, bytes(32))
    f = ring.fraction_bits("x", limit, 1, 2)
    words = {"x": ring.encode("x", np.array(0.75 * limit), 1, f, 1, 2)}
    total = Relayed(words, np.array(1, ring.dtype), ("a",))
    found = read(ring, total, {"x": f, MOST_WEIGHT: 1}, None, label, public_weights=True)
    assert float(found.means["x"]) == pytest.approx(0.75 * limit, rel=2.0 ** -(bits - 3))


# What whoever adds up holds.

CELLS = 256
# Chi-square of 255 degrees of freedom exceeds 255 + 2 sqrt(255 x) + 2 x with a chance below e^-x (Laurent and Massart,
# 2000, lemma 1); x = 20 makes it 2e-9 a test.
LARGEST_CHI = CELLS - 1 + 2 * np.sqrt((CELLS - 1) * 20) + 40


def chi_square(words: Sequence[np.ndarray]) -> float:
    """Return chi-square of the bytes of ring elements, against all bytes alike."""
    octets = np.concatenate([array.ravel().view(np.uint8) for array in words])
    counts = np.bincount(octets, minlength=CELLS)
    expected = len(octets) / CELLS
    assert expected >= 5, "chi-square needs some in every cell"
    return float(((counts - expected) ** 2).sum() / expected)


@each_way
def test_what_is_relayed_is_uniform(scheme: str, bits: int) -> None:
    """The same sum, of zeros and the weight 2, under many stamps and some keys: its weights are as uniform as words."""
    cohort = {name: Member(scheme, name, bits, {"w": np.zeros(40)}) for name in "ab"}
    server, weights, words = agreed(cohort, scheme, bits), [], []
    for number in range(1, 1 + 11_000 // bits):
        for silo in cohort.values():
            silo.key = derive(KEY, number % 7)
        total, _ = relayed(server, cohort, Stamp("test", number, 0), codec=False)
        weights.append(total.weight)
        words.append(total.tensors["w"])
    assert chi_square(weights) < LARGEST_CHI
    assert chi_square(words) < LARGEST_CHI
    assert chi_square([array[:1] for array in words]) < LARGEST_CHI  # one entry over the rounds
    assert len({int(weight) for weight in weights}) == len(weights)  # 343 of 2^32 words: a pair has a chance of 1e-5


@each_way
def test_equal_sums_under_two_stamps_have_nothing_in_common(scheme: str, bits: int) -> None:
    cohort = {name: Member(scheme, name, bits, {"w": np.full(4000, 0.5)}) for name in "abc"}
    server = agreed(cohort, scheme, bits)
    one, two = (relayed(server, cohort, now)[0] for now in (NOW, LATER))
    # Of 4000 pairs of uniform words of 32 bits one is equal with a chance of 1e-6, of 64 bits never.
    assert not (one.tensors["w"] == two.tensors["w"]).any()
    assert int(one.weight) != int(two.weight)
    assert not np.isin(one.tensors["w"][:50], two.tensors["w"]).any()  # nor shifted: 50 * 4000 pairs, 5e-5
    assert chi_square([one.tensors["w"] - two.tensors["w"]]) < LARGEST_CHI
    assert chi_square([one.tensors["w"], two.tensors["w"]]) < LARGEST_CHI


@each_way
def test_a_public_weight_stays_public_and_the_rest_does_not(scheme: str, bits: int) -> None:
    rules = Rules(public_weights=True)
    cohort = {
        name: Member(scheme, name, bits, {"w": np.zeros(4000)}, weight, rules=rules)
        for name, weight in (("a", 5), ("b", 12))
    }
    total, _ = relayed(agreed(cohort, scheme, bits, rules), cohort)
    assert int(total.weight) == 17
    assert chi_square([total.tensors["w"]]) < LARGEST_CHI


# The rules of an upload are those of any other.


@each_way
@pytest.mark.parametrize(("first", "second"), [(KEY, KEY), (KEY, bytes(32)), (KEY, None), (None, KEY)])
def test_a_second_upload_under_one_stamp_is_refused(
    scheme: str, bits: int, first: bytes | None, second: bytes | None
) -> None:
    cohort = members(scheme, bits)
    server = agreed(cohort, scheme, bits)
    before, after = (
        server.want({"w": (2, 3), "loss": ()}, {"w": 9.0, "loss": 9.0}, 99, blinded=key is not None).fraction_bits
        for key in (first, second)
    )
    one = cohort["s1"]
    one.contributor.upload(NOW, one.tensors, 4, before, first, asked=ASKED)
    with pytest.raises(MisuseError, match="a second upload would reveal the first"):
        one.contributor.upload(NOW, one.tensors, 4, after, second, asked=ASKED)
    one.contributor.upload(LATER, one.tensors, 4, after, second, asked=ASKED)


@each_way
def test_no_tensor_has_the_name_of_the_tag(scheme: str, bits: int) -> None:
    server = agreed(members(scheme, bits), scheme, bits)
    for blinded in (True, False):
        with pytest.raises(MisuseError, match="`blind tag` is reserved"):
            server.want({"w": (1,), TAG: (1,)}, {"w": 1.0, TAG: 1.0}, 9, blinded=blinded)


@each_way
@pytest.mark.parametrize(("key", "blinded"), [(KEY, False), (None, True)])
def test_a_relay_cannot_drop_the_tag_or_have_one_in_the_open(
    scheme: str, bits: int, key: bytes | None, blinded: bool
) -> None:
    cohort = members(scheme, bits)
    server = agreed(cohort, scheme, bits)
    shapes = {"w": (2, 3), "loss": ()}
    encoding = server.want(shapes, dict.fromkeys(shapes, 9.0), 99, blinded=blinded).fraction_bits
    with pytest.raises(PeerError, match="expected an encoding of the tensors"):
        cohort["s1"].contributor.upload(NOW, cohort["s1"].tensors, 4, encoding, key, asked=ASKED)


def test_in_the_clear_there_is_nothing_to_hide_in() -> None:
    silo, server = contributor("none", "a"), aggregator("none")
    play(server.setup(NOW, ["a", "b"]), {})
    wanted = server.want({"w": (1,)}, {"w": 1.0}, 2)
    with pytest.raises(MisuseError, match='scheme = "none" sums in the clear'):
        server.want({"w": (1,)}, {"w": 1.0}, 2, blinded=True)
    with pytest.raises(MisuseError, match='scheme = "none" sums in the clear'):
        silo.upload(NOW, {"w": np.ones(1)}, 1, {}, KEY, asked=ASKED)
    with pytest.raises(MisuseError, match='scheme = "none" sums in the clear'):
        play(server.relay(Train(stamp=NOW, encoding={}), wanted), {})
    total = Relayed({"w": np.ones(1)}, np.array(1), ("a",))
    for key in (KEY, None):
        with pytest.raises(MisuseError, match='scheme = "none" sums in the clear'):
            silo.read(NOW, total, {}, key, asked=ASKED)
    silo.upload(NOW, {"w": np.ones(1)}, 1, {}, asked=ASKED)


@each_way
def test_nothing_is_read_or_relayed_before_a_set_up(scheme: str, bits: int) -> None:
    cohort, fresh = members(scheme, bits), contributor(scheme, "s0", bits)
    server = agreed(cohort, scheme, bits)
    total, encoding = relayed(server, cohort)
    with pytest.raises(MisuseError, match="set-up"):
        fresh.read(NOW, total, encoding, KEY, asked=ASKED)
    wanted = server.want({"w": (2, 3)}, {"w": 9.0}, 99)
    with pytest.raises(MisuseError, match="without a set-up"):
        play(aggregator(scheme, bits).relay(Train(stamp=NOW, encoding=wanted.fraction_bits), wanted), cohort)


# Vectors.


def vector_members(case: Mapping[str, Any], scheme: str) -> tuple[dict[str, Member], Aggregator, Any]:
    rules, stamp = Rules(min_survivors=2), Stamp(*case["stamp"])
    made = {
        name: Member(
            scheme, name, case["bits"], own["values"], own["weight"], rules=rules,
            insecure=SecretRoot(bytes.fromhex(case["roots"][name])),
        )
        for name, own in case["silos"].items()
    }  # fmt: skip
    for member in made.values():
        member.key, member.about = bytes.fromhex(case["key"]), Query(bytes.fromhex(case["asked"]))
    server = agreed(made, scheme, case["bits"], rules, stamp)
    shapes = {name: (len(entries),) for name, entries in case["words"].items() if name != TAG}
    wanted = server.want(shapes, dict.fromkeys(shapes, case["limit"]), case["most_weight"], blinded=True)
    return made, server, wanted


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"{case['bits']} bits")
def test_vectors(case: Mapping[str, Any], scheme: str) -> None:
    label = tuple(bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in case["label"])
    for name, key in case["blind_keys"].items():
        assert blind_key(bytes.fromhex(case["key"]), label, name).hex() == key
    made, server, wanted = vector_members(case, scheme)
    stamp = Stamp(*case["stamp"])
    total = play(server.relay(Train(stamp=stamp, encoding=wanted.fraction_bits), wanted), made)
    assert isinstance(total, Relayed)
    assert int(total.weight) == case["weight"]
    assert {name: words.tolist() for name, words in total.tensors.items()} == case["words"]
    about = made["anna"].about
    found = made["anna"].contributor.read(stamp, total, wanted.fraction_bits, bytes.fromhex(case["key"]), asked=about)
    expected = case["sum"]
    assert (found.weight, list(found.silos)) == (expected["weight"], sorted(case["silos"]))
    exact = np.ldexp(np.array(expected["entries"], dtype=np.float64), -expected["fraction_bits"]) / found.weight
    assert [*found.means["b"], *found.means["w"]] == exact.tolist()


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"{case['bits']} bits")
def test_tampered_vectors(case: Mapping[str, Any], scheme: str) -> None:
    made, _, wanted = vector_members(case, scheme)
    dtype = f"uint{case['bits']}"
    for tampered in case["tampered"]:
        given = case | tampered["changes"]
        words = {name: np.array(entries, dtype) for name, entries in given["words"].items()}
        total = Relayed(words, np.array(given["weight"], dtype), given.get("members", sorted(case["silos"])))
        encoding = {**wanted.fraction_bits, **given.get("encoding", {})}
        about = Query(bytes.fromhex(given["asked"]))
        with pytest.raises(PeerError):
            made["anna"].contributor.read(
                Stamp(*given["stamp"]), total, encoding, bytes.fromhex(given["key"]), asked=about
            )
