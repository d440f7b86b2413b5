"""Additive shares: the same ring elements as pairwise masks, uniform shares, and who is named when one is bad."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused_rows import Row, refused
from sum_driver import (
    ASKED,
    CODEC,
    NOW,
    Late,
    Seen,
    Silo,
    Train,
    Vanished,
    agreed,
    exact_means,
    one_sum,
    play,
    rostered,
    whole_sum,
)

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Missing, Reason
from moretta.errors import MisuseError, MorettaError, ParameterError, PeerError, RangeError
from moretta.secure_aggregation import additive
from moretta.secure_aggregation.additive import TAG_BYTES, AddedShares, AddShares, SealedShares
from moretta.secure_aggregation.agreement import AdvertiseKey
from moretta.secure_aggregation.cohort import Rules
from moretta.secure_aggregation.encoding import MOST_WEIGHT
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.schemes import RULES, aggregator
from moretta.secure_aggregation.sums import Sum, Wanted, to_leave_out

SCHEME = "additive-shares"
PUBLIC = Rules(public_weights=True)
ONE = {"w": 20, MOST_WEIGHT: 2}
"""An encoding of one tensor."""


def silos(count: int = 4, bits: int = 64, scheme: str = SCHEME, rules: Rules = RULES, **how: Any) -> dict[str, Silo]:
    rng = np.random.default_rng(count)
    return {
        f"s{k}": Silo(
            scheme, f"s{k}", bits, {"w": rng.normal(size=(2, 3)), "loss": rng.normal()}, 3 * k + 1, rules=rules, **how
        )
        for k in range(count)
    }


def roots(cohort: dict[str, Silo]) -> dict[str, Silo]:
    """Return the same silos with keys and shares that follow from their names."""
    return {
        name: Silo(SCHEME, name, 64, silo.tensors, silo.weight, insecure=SecretRoot.insecure(0, name))
        for name, silo in cohort.items()
    }


def changed(silo: Silo, kind: type[Message], change: Callable[[Any], Any]) -> Callable[[Message], Any]:
    """Answer as the silo, but change its answers of one kind."""

    def answer(asked: Message) -> Any:
        reply = silo(asked)
        return change(reply) if isinstance(reply, kind) else reply

    return answer


def vanish(reply: Message) -> Message:
    raise Vanished


def whole_numbers(silo: Silo, wanted: Wanted) -> list[int]:
    """Return what a silo adds to a sum, as Python's whole numbers: its weight, and its tensors by name."""
    numbers = [silo.weight]
    for name in sorted(silo.tensors):
        products = (silo.tensors[name] * silo.weight).ravel().tolist()
        numbers += [round(Fraction(2) ** wanted.fraction_bits[name] * Fraction(product)) for product in products]
    return numbers


def why(result: Sum | Aborted) -> dict[str, Reason]:
    assert isinstance(result, Aborted)
    return {name: missing.reason for name, missing in result.missing.items()}


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("count", range(2, 8))
def test_a_sum_is_exact_and_that_of_pairwise_masks(count: int, bits: int) -> None:
    cohort, seen = silos(count, bits), Seen()
    limit = 100.0
    total = whole_sum(cohort, SCHEME, bits, limit, seen=seen)
    masked = whole_sum(silos(count, bits, "pairwise"), "pairwise", bits, limit)
    assert isinstance(total, Sum)
    assert isinstance(masked, Sum)
    assert (total.weight, total.silos, total.steps) == (masked.weight, masked.silos, masked.steps)
    server = agreed(cohort, SCHEME, bits)
    wanted = server.want({"w": (2, 3), "loss": ()}, {"w": limit, "loss": limit}, total.weight)
    for name, mean in total.means.items():
        assert mean.tobytes() == masked.means[name].tobytes()
        assert mean.shape == cohort["s0"].tensors[name].shape
        assert np.array_equal(mean.ravel(), exact_means(cohort, list(cohort), name, wanted.fraction_bits[name]))
    added = [reply.words.tolist() for _, reply in seen if isinstance(reply, AddedShares)]
    assert len(added) == count
    parts = [whole_numbers(silo, wanted) for silo in cohort.values()]
    assert [sum(words) % 2**bits for words in zip(*added, strict=True)] == [
        sum(words) % 2**bits for words in zip(*parts, strict=True)
    ]


@given(
    st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 10**6)), min_size=2, max_size=6),
    st.sampled_from([32, 64]),
    st.randoms(use_true_random=False),
)
def test_any_values_weights_names_and_order(rows: list[tuple[float, int]], bits: int, random: Any) -> None:
    names = [f"città/{k}" for k in range(len(rows))]
    random.shuffle(names)
    cohort = {name: Silo(SCHEME, name, bits, {"x": x}, n) for name, (x, n) in zip(names, rows, strict=True)}
    total = whole_sum(cohort, SCHEME, bits, 10.0)
    masked = whole_sum({name: Silo("pairwise", name, bits, silo.tensors, silo.weight) for name, silo in cohort.items()},
                       "pairwise", bits, 10.0)  # fmt: skip
    assert isinstance(total, Sum)
    assert isinstance(masked, Sum)
    assert total.means["x"].tobytes() == masked.means["x"].tobytes()


@pytest.mark.parametrize("bits", [32, 64])
def test_public_weights_are_added_in_the_clear(bits: int) -> None:
    cohort, seen = silos(3, bits, rules=PUBLIC), Seen()
    total = whole_sum(cohort, SCHEME, bits, seen=seen, rules=PUBLIC)
    assert isinstance(total, Sum)
    assert total.weight == 12
    assert {name: reply.weight for name, reply in seen if isinstance(reply, SealedShares)} == {
        name: silo.weight for name, silo in cohort.items()
    }
    hidden = whole_sum(silos(3, bits), SCHEME, bits)
    assert isinstance(hidden, Sum)
    assert all(total.means[name].tobytes() == hidden.means[name].tobytes() for name in total.means)


@pytest.mark.parametrize("rules", [RULES, PUBLIC], ids=["hidden", "public"])
def test_tensors_without_entries(rules: Rules) -> None:
    cohort = {name: Silo(SCHEME, name, 64, {"none": np.empty((0, 3))}, rules=rules) for name in "ab"}
    total = whole_sum(cohort, SCHEME, rules=rules)
    assert isinstance(total, Sum)
    assert total.weight == 2
    assert total.means["none"].shape == (0, 3)


def test_several_sums_and_set_ups_with_rules_that_thin_out_other_schemes() -> None:
    rules = Rules(degree=2, threshold=3, min_survivors=3)
    cohort = silos(6, rules=rules)
    server = agreed(cohort, SCHEME, rules=rules)
    one = one_sum(server, cohort, NOW, whole=True)
    two = one_sum(server, cohort, Stamp(NOW.run, 2, 0), codec=False)
    assert isinstance(one, Sum)
    assert isinstance(two, Sum)
    assert one.means["w"].tobytes() == two.means["w"].tobytes()
    del cohort["s5"]
    again = Stamp(NOW.run, 3, 0)
    assert isinstance(one_sum(agreed(cohort, SCHEME, rules=rules, now=again), cohort, again), Sum)


def test_a_roster_signs_the_keys() -> None:
    names = [f"s{k}" for k in range(3)]
    rules, credentials, run = rostered(names)
    now = Stamp(run, 1, 0)
    cohort = {name: Silo(SCHEME, name, 64, {"w": [1.0]}, rules=rules, credentials=credentials[name]) for name in names}
    assert isinstance(one_sum(agreed(cohort, SCHEME, rules=rules, now=now), cohort, now), Sum)
    unsigned = {**cohort, "s1": Silo(SCHEME, "s1", 64, {"w": [1.0]}, rules=rules)}
    aborted = play(aggregator(SCHEME, 64, rules).setup(now, names), unsigned)
    assert set(why(aborted)) == {"s1"}


def shares_of(maker: str, cohort: dict[str, Silo], upload: SealedShares) -> dict[str, np.ndarray]:
    """Return all shares of a silo as its holders see them, its own included."""
    kept = cohort[maker].contributor._open.__self__
    shares = {maker: kept._of.hidden.copy()}
    for holder, sealed in upload.shares.items():
        of = dataclasses.replace(kept._of, agreement=cohort[holder].contributor._keys.agreed[0])
        shares[holder] = additive._opened(of, maker, sealed)
    return shares


@pytest.mark.parametrize("bits", [32, 64])
def test_each_share_alone_is_uniform(bits: int) -> None:
    # Pearson's statistic of n bytes over 256 values is chi-square of 255 degrees of freedom. It leaves
    # [255 - 2 sqrt(255 t), 255 + 2 sqrt(255 t) + 2 t] with a chance of at most 2 exp(-t) (Laurent and Massart 2000,
    # lemma 1); t = 20 makes that 4e-9, and keys are fixed here. The data is 0 throughout: nothing in it is random.
    cohort = {
        name: Silo(SCHEME, name, bits, {"w": np.zeros(8000)}, insecure=SecretRoot.insecure(0, name)) for name in "abcd"
    }
    agreed(cohort, SCHEME, bits)
    upload = cohort["a"].contributor.upload(NOW, cohort["a"].tensors, 1, ONE, asked=ASKED)
    shares = shares_of("a", cohort, upload)
    assert set(shares) == set("abcd")
    low, high = 255 - 2 * np.sqrt(255 * 20), 255 + 2 * np.sqrt(255 * 20) + 40
    for seen in [*shares.values(), shares["a"] + shares["b"] + shares["c"]]:  # and any of n - 1 together
        counts = np.bincount(seen.astype(f"<u{bits // 8}").view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        assert low < ((counts - expected) ** 2 / expected).sum() < high
    total = np.add.reduce(list(shares.values()), dtype=f"uint{bits}")
    assert total[0] == 1  # the weight
    assert not total[1:].any()


def test_the_shares_of_others_do_not_depend_on_the_data() -> None:
    def shares(value: float) -> dict[str, np.ndarray]:
        cohort = roots({name: Silo(SCHEME, name, 64, {"w": np.full(3, value)}) for name in "abc"})
        agreed(cohort, SCHEME)
        upload = cohort["a"].contributor.upload(NOW, cohort["a"].tensors, 1, ONE, asked=ASKED)
        return shares_of("a", cohort, upload)

    one, other = shares(1.0), shares(-2.5)
    assert all(np.array_equal(one[holder], other[holder]) for holder in "bc")
    assert not np.array_equal(one["a"], other["a"])


def test_shares_are_fresh_each_time() -> None:
    cohort = {name: Silo(SCHEME, name, 64, {"w": np.zeros(4)}) for name in "abc"}
    agreed(cohort, SCHEME)
    seen = set[bytes]()
    for number in (1, 2):
        upload = cohort["a"].contributor.upload(Stamp(NOW.run, number, 0), cohort["a"].tensors, 1, ONE, asked=ASKED)
        seen.update(share.tobytes() for share in shares_of("a", cohort, upload).values())
    assert len(seen) == 6


@pytest.mark.parametrize("kind", [SealedShares, AddedShares], ids=["sharing", "adding"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [(vanish, Reason.DISCONNECTED), (Late, Reason.LATE), (lambda reply: b"\x00junk", Reason.MALFORMED)],
    ids=["vanished", "late", "junk"],
)
@pytest.mark.parametrize("whole", [False, True])
def test_a_dropout_in_either_step_aborts_by_name(
    kind: type[Message], change: Callable[[Any], Any], reason: Reason, whole: bool
) -> None:
    cohort = silos(4)
    server = agreed(cohort, SCHEME)
    broken = {name: changed(cohort[name], kind, change) for name in ("s1", "s3")}
    assert why(one_sum(server, cohort, NOW, replaced=broken, whole=whole)) == {"s1": reason, "s3": reason}
    rest = {name: cohort[name] for name in ("s0", "s2")}
    again = Stamp("test", 1, 1)
    second = one_sum(agreed(rest, SCHEME, now=again), rest, again)
    if kind is SealedShares:
        assert isinstance(second, Sum)
    else:  # shares were added: of the same rows there is no sum over fewer
        assert why(second) == dict.fromkeys(rest, Reason.SPENT)
        assert isinstance(one_sum(agreed(rest, SCHEME, now=again), rest, Stamp("test", 1, 1, 1)), Sum)


def test_a_silo_that_is_not_asked_is_missing() -> None:
    cohort = silos(3)
    aborted = one_sum(agreed(cohort, SCHEME), cohort, NOW, asked=["s0", "s1"])
    assert why(aborted) == {"s2": Reason.DISCONNECTED}


def tampered(holder: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[SealedShares], SealedShares]:
    def tamper(reply: SealedShares) -> SealedShares:
        return dataclasses.replace(reply, shares={**reply.shares, holder: change(reply.shares[holder].copy())})

    return tamper


@pytest.mark.parametrize("place", [0, 17, -1])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_tampered_share_names_its_maker(place: int, count: int) -> None:
    def flip(sealed: np.ndarray) -> np.ndarray:
        sealed[place] ^= 1
        return sealed

    cohort = silos(count)
    bad = {"s1": changed(cohort["s1"], SealedShares, tampered("s0", flip))}
    aborted = whole_sum(cohort, SCHEME, replaced=bad)
    assert why(aborted) == {"s1": Reason.MALFORMED}
    assert "['s0'] did not open" in aborted.missing["s1"].detail


def test_shares_for_somebody_else_or_of_another_time_do_not_open() -> None:
    cohort = silos(3)
    server = agreed(cohort, SCHEME)
    kept = {}

    def swap(reply: SealedShares) -> SealedShares:
        kept.update(reply.shares)
        return dataclasses.replace(reply, shares={"s1": reply.shares["s2"], "s2": reply.shares["s1"]})

    assert why(one_sum(server, cohort, NOW, replaced={"s0": changed(cohort["s0"], SealedShares, swap)})) == {
        "s0": Reason.MALFORMED
    }
    replay = changed(cohort["s0"], SealedShares, lambda reply: dataclasses.replace(reply, shares=dict(kept)))
    assert why(one_sum(server, cohort, Stamp("test", 2, 0), replaced={"s0": replay})) == {"s0": Reason.MALFORMED}


def test_other_shapes_of_the_same_length_do_not_open() -> None:
    cohort = silos(3)
    cohort["s1"].tensors["w"] = cohort["s1"].tensors["w"].T.copy()
    assert why(whole_sum(cohort, SCHEME)) == {"s1": Reason.MALFORMED}  # and not those whom it accuses in turn


def test_who_is_left_out() -> None:
    def left(**unopened: str) -> list[str]:
        return list(to_leave_out(unopened))

    assert left() == left(a="", b="") == []
    assert left(a="b") == ["b"]  # even: the maker
    assert left(a="bcd") == ["a"]  # who accuses all, of whom nobody else complains
    assert left(a="b", c="b", d="b") == ["b"]
    assert left(a="b", b="acd", c="b", d="b") == ["b"]  # of other shapes than everybody else
    assert left(a="b", c="d") == ["b", "d"]
    assert left(a="b", b="a") == ["a"]
    for missing in to_leave_out({"a": ["b"]}).values():
        assert missing == Missing(
            Reason.MALFORMED,
            "a share sealed between it and ['a'] did not open; it is left out, though nobody can tell who of them is "
            "at fault",
        )


def with_shares(**changes: Callable[[np.ndarray], np.ndarray] | None) -> Callable[[SealedShares], SealedShares]:
    """Change the shares of some holders, from that of s0, or take them away."""

    def change(reply: SealedShares) -> SealedShares:
        shares = {holder: share for holder, share in reply.shares.items() if holder not in changes}
        made = {holder: how(reply.shares["s0"].copy()) for holder, how in changes.items() if how is not None}
        return dataclasses.replace(reply, shares={**shares, **made})

    return change


@pytest.mark.parametrize(
    "change",
    [
        with_shares(s0=None),
        with_shares(s1=np.copy),
        with_shares(s9=np.copy),
        with_shares(s0=lambda sealed: sealed[:-8], s2=lambda sealed: sealed[:-8]),
        lambda reply: dataclasses.replace(reply, weight=1),
    ],
    ids=["too few", "for itself", "for a stranger", "too short", "a weight that is hidden elsewhere"],
)
def test_shares_that_were_not_asked_for(change: Callable[[SealedShares], SealedShares]) -> None:
    cohort = silos(3)
    aborted = whole_sum(cohort, SCHEME, replaced={"s1": changed(cohort["s1"], SealedShares, change)})
    assert why(aborted) == {"s1": Reason.MALFORMED}


@pytest.mark.parametrize("weight", [0, 13])
def test_a_public_weight_is_checked_by_silo(weight: int) -> None:
    cohort = silos(3, rules=PUBLIC)
    lie = changed(cohort["s1"], SealedShares, lambda reply: dataclasses.replace(reply, weight=weight))
    aborted = whole_sum(cohort, SCHEME, replaced={"s1": lie}, rules=PUBLIC)
    assert why(aborted) == {"s1": Reason.MALFORMED}
    assert "expected a weight from 1 to 12" in aborted.missing["s1"].detail


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: dataclasses.replace(reply, words=reply.words[:-1]),
        lambda reply: dataclasses.replace(reply, words=reply.words[:0]),
        lambda reply: dataclasses.replace(reply, words=reply.words.astype(np.uint32)),
        lambda reply: dataclasses.replace(reply, words=reply.words[:0], unopened=("s1",)),
        lambda reply: dataclasses.replace(reply, words=reply.words[:0], unopened=("s0", "s9")),
    ],
    ids=["too short", "nothing", "another ring", "accuses itself", "accuses a stranger"],
)
def test_sums_of_shares_that_were_not_asked_for(change: Callable[[AddedShares], AddedShares]) -> None:
    cohort = silos(3)
    bad = {"s1": changed(cohort["s1"], AddedShares, change)}
    aborted = one_sum(agreed(cohort, SCHEME), cohort, NOW, replaced=bad)
    assert why(aborted) == {"s1": Reason.MALFORMED}


def test_a_silo_with_another_ring_is_named() -> None:
    cohort = {**silos(3), "s1": Silo(SCHEME, "s1", 32, silos(3)["s1"].tensors)}
    assert set(why(whole_sum(cohort, SCHEME))) == {"s1"}


SEALED = np.zeros(TAG_BYTES + 8, dtype=np.uint8)


@refused("additive.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_messages_of_added_shares_that_cannot_be() -> None:
    words = np.zeros(3, dtype=np.uint64)
    for wrong in (words.astype(np.int64), words.astype(np.float64), words.reshape(3, 1), words[0:1].reshape(())):
        with pytest.raises(PeerError, match=r"field `words`: expected uint32 or uint64\[\*\], got"):
            AddedShares(stamp=NOW, words=wrong, unopened=())
    for names in (("b", "a"), ("a", "a")):
        with pytest.raises(PeerError, match="each once"):
            AddedShares(stamp=NOW, words=words[:0], unopened=names)
    with pytest.raises(PeerError, match="got both"):
        AddedShares(stamp=NOW, words=words, unopened=("a",))
    with pytest.raises(PeerError, match="field `weight`: expected at least 0, got -1"):
        SealedShares(stamp=NOW, shares={"a": SEALED}, weight=-1, asked=bytes(32))


def test_a_silo_adds_once_for_each_upload_and_only_the_whole_cohort() -> None:
    cohort = {name: Silo(SCHEME, name, 64, {"w": np.ones(2)}) for name in "abc"}
    agreed(cohort, SCHEME)
    silo = cohort["a"].contributor
    sealed = dict.fromkeys("bc", SEALED)
    with pytest.raises(MisuseError, match="without an upload"):
        silo.answer(AddShares(stamp=NOW, shares=sealed))
    uploads = {
        name: other.contributor.upload(NOW, other.tensors, 1, ONE, asked=ASKED) for name, other in cohort.items()
    }
    for makers in ("b", "ab", "abc", "bcd", "bd"):
        with pytest.raises(PeerError, match="one share of each other silo"):
            silo.answer(AddShares(stamp=NOW, shares=dict.fromkeys(makers, SEALED)))
    for stamp in (Stamp(NOW.run, 1, 1), Stamp(NOW.run, 2, 0), Stamp("other", 1, 0)):
        with pytest.raises(PeerError, match="expected the shares of round 1, attempt 0"):
            silo.answer(AddShares(stamp=stamp, shares=sealed))
    good = AddShares(stamp=NOW, shares={name: uploads[name].shares["a"] for name in "bc"})
    assert silo.answer(good).unopened == ()  # what was refused used nothing up
    assert CODEC.encode(silo.answer(good)) == CODEC.encode(silo.answer(good))  # asked again, it says the same again
    for change in ({"c": good.shares["b"]}, {"b": good.shares["b"] ^ 1}):
        with pytest.raises(MisuseError, match="or twice"):
            silo.answer(AddShares(stamp=NOW, shares={**good.shares, **change}))
    with pytest.raises(MisuseError, match="or twice"):
        silo.answer(AddShares(stamp=Stamp(NOW.run, 1, 0, 1), shares=good.shares))
    assert cohort["b"].contributor.answer(AddShares(stamp=NOW, shares=dict.fromkeys("ac", SEALED))).unopened == (
        "a",
        "c",
    )
    with pytest.raises(MisuseError, match="or twice"):
        cohort["b"].contributor.answer(AddShares(stamp=NOW, shares={name: uploads[name].shares["b"] for name in "ac"}))


def test_a_label_is_used_once() -> None:
    cohort = {name: Silo(SCHEME, name, 64, {"w": np.ones(2)}) for name in "ab"}
    agreed(cohort, SCHEME)
    silo, one = cohort["a"].contributor, {"w": np.ones(2)}
    with pytest.raises(RangeError, match="nothing was sent"):
        silo.upload(NOW, {"w": np.array([1e30])}, 1, ONE, asked=ASKED)
    silo.upload(NOW, one, 1, ONE, asked=ASKED)  # what was refused used no label
    with pytest.raises(MisuseError, match=r"'w'.*uploaded before"):
        silo.upload(NOW, one, 1, ONE, asked=ASKED)
    silo.upload(NOW, {"v": np.ones(2)}, 1, {"v": 20, MOST_WEIGHT: 2}, asked=ASKED)
    silo.upload(Stamp(NOW.run, 2, 0), one, 1, ONE, asked=ASKED)
    with pytest.raises(MisuseError, match="not before"):
        silo.upload(Stamp(NOW.run, 1, 5), {"u": np.ones(2)}, 1, {"u": 20, MOST_WEIGHT: 2}, asked=ASKED)


@pytest.mark.parametrize(
    ("tensors", "weight", "encoding"),
    [
        ({"w": np.ones(1)}, 0, ONE),
        ({"w": np.ones(1)}, 3, ONE),
        ({"w": np.ones(1)}, 1, {"w": 20}),
        ({"w": np.ones(1)}, 1, {"v": 20, MOST_WEIGHT: 2}),
        ({"w": np.ones(1)}, 1, {"w": 20, MOST_WEIGHT: 2**63}),
        ({}, 1, {MOST_WEIGHT: 2}),
        ({"w": np.array([1j])}, 1, ONE),
    ],
)
def test_uploads_that_are_refused(tensors: dict[str, np.ndarray], weight: int, encoding: dict[str, int]) -> None:
    cohort = silos(2)
    agreed(cohort, SCHEME)
    with pytest.raises(MorettaError):
        cohort["s0"].contributor.upload(NOW, tensors, weight, encoding, asked=ASKED)


def test_calls_in_the_wrong_order() -> None:
    cohort = silos(2)
    silo = cohort["s0"].contributor
    with pytest.raises(MisuseError, match="without a set-up"):
        silo.upload(NOW, {"w": np.ones(1)}, 1, ONE, asked=ASKED)
    server = agreed(cohort, SCHEME)
    silo.upload(NOW, {"w": np.ones(1)}, 1, ONE, asked=ASKED)
    assert silo.answer(Train(stamp=NOW, encoding={})) is None
    silo.answer(AdvertiseKey(stamp=NOW))  # a new set-up forgets seeds and shares
    with pytest.raises(MisuseError, match="without a set-up"):
        silo.upload(NOW, {"v": np.ones(1)}, 1, ONE, asked=ASKED)
    with pytest.raises(MisuseError, match="without an upload"):
        silo.answer(AddShares(stamp=NOW, shares={"s1": SEALED}))
    assert server.cohort == ("s0", "s1")
    with pytest.raises(ParameterError, match='scheme = "none"'):
        play(server.setup(NOW, ["s0"]), cohort)
    assert server.cohort == ()
    with pytest.raises(MisuseError, match="without a set-up"):
        play(server.sum(Train(stamp=NOW, encoding=ONE), Wanted({"w": ()}, ONE, 2)), cohort)


def test_shares_too_long_to_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    cohort = {name: Silo(SCHEME, name, 64, {"w": np.ones(2)}) for name in "ab"}
    server = agreed(cohort, SCHEME)
    monkeypatch.setattr(additive, "MOST_BYTES", TAG_BYTES + 23)
    with pytest.raises(ParameterError, match="a model that takes 24; use scheme"):
        server.want({"w": (2,)}, {"w": 1.0}, 2)
    with pytest.raises(ParameterError, match="a model that takes 24"):
        cohort["a"].contributor.upload(NOW, cohort["a"].tensors, 1, ONE, asked=ASKED)
    monkeypatch.setattr(additive, "MOST_BYTES", TAG_BYTES + 24)
    cohort["a"].contributor.upload(NOW, cohort["a"].tensors, 1, ONE, asked=ASKED)


def test_an_impossible_weight_is_taken_as_the_nearest_that_can_be() -> None:
    cohort = silos(2)

    def lie(reply: AddedShares) -> AddedShares:
        words = reply.words.copy()
        words[0] += np.uint64(7)
        return dataclasses.replace(reply, words=words)

    server = agreed(cohort, SCHEME)
    total = one_sum(server, cohort, NOW, replaced={"s1": changed(cohort["s1"], AddedShares, lie)})
    assert isinstance(total, Sum)
    assert total.weight == 5


def test_secrets_are_not_in_representations() -> None:
    cohort = {name: Silo(SCHEME, name, 64, {"w": np.ones(1)}) for name in "ab"}
    agreed(cohort, SCHEME)
    silo = cohort["a"].contributor
    silo.upload(NOW, {"w": np.ones(1)}, 1, ONE, asked=ASKED)
    seed, share = silo._keys.agreed[0].seeds["b"], silo._open.__self__._of.hidden
    for shown in (repr(silo), repr(silo._open), repr(silo._keys), repr(silo._keys.agreed)):
        assert repr(seed) not in shown
        assert seed.hex() not in shown
        assert str(share[1]) not in shown
    assert "redacted" in repr(silo)
