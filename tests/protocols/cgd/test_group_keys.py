"""What a participant's groups keep among themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refused_rows import Row, refused

from moretta.contract.messages import Stamp
from moretta.contract.roles import Replies
from moretta.data.holders import Grid, Part
from moretta.errors import MisuseError, PeerError
from moretta.protocols.cgd.group_keys import (
    KEY_BYTES,
    NAME,
    NONCE_BYTES,
    GroupKeys,
    Membership,
    _sealed,
    at,
    group_of,
    row_group,
)
from moretta.protocols.cgd.messages import Where
from moretta.secure_aggregation.agreement import AdvertiseKey, SetUp, agree_on_keys
from moretta.secure_aggregation.cohort import Cohort, Origin, Rules, complete
from moretta.secure_aggregation.encoding import Ring, add_up
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.masks import add_masks

NOW = Stamp("run", 3, 1)
AGREED_AT, GROUP = at(NOW, NAME), at(NOW, "columns-1")
RULES = complete(Rules(min_survivors=2))
RING = Ring(64)
VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "cgd.json").read_text(encoding="utf-8"))["keyring"]
Keyrings = Mapping[str, GroupKeys]
GRID = bytes.fromhex(VECTORS["grid"]["digest"])
NAMES = ("all", "columns-1", "columns-2", row_group("r"), row_group("clinic 1"))


def agree(keyrings: Keyrings, now: Stamp = AGREED_AT, *, among: Sequence[str] = ()) -> None:
    """Let participants agree on seeds, in messages as a server relays them."""
    exchange, replies = agree_on_keys(now, list(among or keyrings), RULES), None
    while True:
        try:
            ask = exchange.send(replies)  # type: ignore[arg-type]  # None starts a generator
        except StopIteration as end:
            agreed_on = end.value
            break
        answers = {name: keyrings[name].answer(asked) for name, asked in ask.messages.items()}
        for name, answer in answers.items():
            ask.check(name, answer)
        replies = Replies(answers)
    assert isinstance(agreed_on, Cohort)


def keyrings_of(
    names: Sequence[str],
    roots: Mapping[str, SecretRoot] | None = None,
    session: int = 0,
    members: Sequence[str] | None = None,
) -> dict[str, GroupKeys]:
    """Return keyrings that have agreed on nothing yet; without roots all keys are the operating system's.

    members: of each group, in order; everybody if None.
    """
    membership = Membership(GRID, {NAME: names, **dict.fromkeys(NAMES, members or names)})
    made = {}
    for name in names:
        root = None if roots is None else roots[name]
        made[name] = GroupKeys(name, SetUp(name, RULES, Origin(None, root, session)), membership)
    return made


def agreed(*names: str, members: Sequence[str] | None = None) -> dict[str, GroupKeys]:
    made = keyrings_of(names, members=members)
    agree(made)
    return made


def hand_out(keyrings: Keyrings, stamp: Stamp, members: Sequence[str]) -> None:
    """Have the first member draw a group's key, and the others take it."""
    maker, *others = members
    sealed = keyrings[maker].draw(stamp, members)
    assert set(sealed) == set(others)
    for name in others:
        keyrings[name].take(stamp, maker, sealed[name])


# Names.


@pytest.mark.parametrize("group", ["all", "heads", "columns-12", row_group("clinic 1"), row_group("a/b"), ""])
def test_a_groups_stamp_tells_its_group(group: str) -> None:
    stamp = at(NOW, group)
    assert group_of(stamp) == group
    assert (stamp.round, stamp.attempt) == (NOW.round, NOW.attempt)
    assert stamp.run.endswith(NOW.run)


def test_no_row_has_the_name_of_another_group() -> None:
    rows = {row_group(row) for row in ("all", "heads", "columns-1", NAME, "r", "row=r")}
    assert len(rows) == 6
    assert not rows & {"all", "heads", "columns-1", NAME}


# Keys.


def test_a_groups_members_have_one_key_and_nobody_else_has() -> None:
    keyrings = agreed("anna", "bea", "città", "dora", members=["bea", "anna", "città"])
    hand_out(keyrings, GROUP, ["bea", "anna", "città"])
    keys = {keyrings[name].key("columns-1") for name in ("anna", "bea", "città")}
    assert len(keys) == 1
    assert len(next(iter(keys))) == KEY_BYTES
    with pytest.raises(MisuseError, match="group `columns-1` has no key yet"):
        keyrings["dora"].key("columns-1")
    with pytest.raises(MisuseError, match="group `columns-2` has no key yet"):
        keyrings["anna"].key("columns-2")


def test_each_key_is_fresh() -> None:
    keyrings, keys = keyrings_of(["a", "b"]), set()
    for attempt in (0, 1, 2):
        now = replace(NOW, attempt=attempt)
        agree(keyrings, at(now, NAME))
        for group in ("all", "columns-1", row_group("r")):
            hand_out(keyrings, at(now, group), ["a", "b"])
            keys.add(keyrings["b"].key(group))
    hand_out(keyrings, at(now, "all"), ["a", "b"])  # once more in the same set-up
    keys.add(keyrings["a"].key("all"))
    assert len(keys) == 9


def test_one_member_alone_has_a_key_of_its_own() -> None:
    keyrings = agreed("a", "b", members=["a"])
    assert keyrings["a"].draw(GROUP, ["a"]) == {}
    assert len(keyrings["a"].key("columns-1")) == KEY_BYTES


@refused("group_keys.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_nothing_is_drawn_or_taken_before_an_agreement() -> None:
    (keyring,) = keyrings_of("a").values()
    for call in (
        lambda: keyring.draw(GROUP, ["a"]),
        lambda: keyring.take(GROUP, "b", bytes(48)),
        lambda: keyring.row_masks(GROUP, ["b"], (1, 1), 0),
        lambda: keyring.seal(GROUP, "delta", "a", b""),
        lambda: keyring.open(GROUP, "delta", "a", np.zeros(16, np.uint8)),
        lambda: keyring.digest(GROUP, []),
    ):
        with pytest.raises(MisuseError):
            call()


def test_a_sealed_key_is_good_for_its_group_time_maker_and_holder_alone() -> None:
    keyrings = agreed("a", "b", "c")
    sealed = keyrings["a"].draw(GROUP, ["a", "b", "c"])
    wrong = [
        ("b", GROUP, "a", sealed["c"]),
        ("b", at(NOW, "columns-2"), "a", sealed["b"]),
        ("b", GROUP, "a", b""),
        ("b", GROUP, "a", sealed["b"][:15]),
        ("b", GROUP, "a", sealed["b"] + b"\0"),
        *(("b", GROUP, "a", _flipped(sealed["b"], bit)) for bit in (0, 100, 255, 256, 383)),
    ]
    for me, stamp, maker, content in wrong:
        assert not keyrings[me].take(stamp, maker, content)
    refused = [
        (GROUP, "c"),
        (replace(GROUP, attempt=0), "a"),
        (replace(GROUP, round=4), "a"),
        (at(replace(NOW, run="other"), "columns-1"), "a"),
    ]
    for stamp, maker in refused:
        with pytest.raises(PeerError):
            keyrings["b"].take(stamp, maker, sealed["b"])
    with pytest.raises(MisuseError):
        keyrings["b"].key("columns-1")
    assert keyrings["b"].take(GROUP, "a", sealed["b"])
    assert not keyrings["b"].take(GROUP, "a", _flipped(sealed["b"], 7))  # which does not take the good one's place
    assert keyrings["b"].key("columns-1") == keyrings["a"].key("columns-1")


def test_a_key_of_another_length_is_refused() -> None:
    keyrings = agreed("a", "b")
    for length in (0, 16, 31, 33, 64):
        purpose = "group key", GROUP.run, GROUP.round, GROUP.attempt, "a", "b"
        sealed = _sealed(keyrings["a"]._seed("b"), bytes(length), *purpose)
        assert not keyrings["b"].take(GROUP, "a", sealed)


def _flipped(data: bytes, bit: int) -> bytes:
    return (int.from_bytes(data, "little") ^ 1 << bit).to_bytes(len(data), "little")


def test_keys_are_forgotten_at_the_next_agreement() -> None:
    keyrings = agreed("a", "b")
    hand_out(keyrings, GROUP, ["a", "b"])
    sealed = keyrings["a"].seal(GROUP, "delta", "a", b"moved")
    old = keyrings["a"].draw(at(NOW, "columns-2"), ["a", "b"])["b"]
    assert keyrings["b"].answer(Where(stamp=NOW)) is None  # another's message forgets nothing
    assert keyrings["b"].key("columns-1")
    keyrings["b"].answer(AdvertiseKey(stamp=at(replace(NOW, attempt=2), NAME)))
    with pytest.raises(MisuseError):
        keyrings["b"].key("columns-1")
    agree(keyrings, at(replace(NOW, attempt=3), NAME))
    for keyring in keyrings.values():
        with pytest.raises(MisuseError):
            keyring.key("columns-1")
    later = at(replace(NOW, attempt=3), "columns-2")
    assert not keyrings["b"].take(later, "a", old)  # sealed under the seeds of before
    hand_out(keyrings, replace(GROUP, attempt=3), ["a", "b"])
    with pytest.raises(PeerError):
        keyrings["b"].open(GROUP, "delta", "a", sealed)


def test_whoever_is_left_agrees_anew_and_the_others_cannot_read() -> None:
    keyrings = agreed("a", "b", "c")
    hand_out(keyrings, GROUP, ["a", "b", "c"])
    agree(keyrings, at(replace(NOW, attempt=2), NAME), among=["a", "b"])
    hand_out(keyrings, replace(GROUP, attempt=2), ["a", "b"])
    sealed = keyrings["a"].seal(GROUP, "displacement", "a", b"moved")
    assert keyrings["b"].open(GROUP, "displacement", "a", sealed) == b"moved"
    with pytest.raises(PeerError):
        keyrings["c"].open(GROUP, "displacement", "a", sealed)
    with pytest.raises(PeerError):
        keyrings["a"].draw(replace(GROUP, attempt=2), ["a", "b", "c"])


# Things sealed.


@given(st.binary(max_size=200), st.sampled_from(["delta", "displacement"]))
def test_what_is_sealed_is_opened(content: bytes, what: str) -> None:
    keyrings = pair()
    sealed = keyrings["a"].seal(GROUP, what, "a", content)
    assert (sealed.dtype, sealed.shape) == (np.uint8, (len(content) + 28,))
    assert keyrings["b"].open(GROUP, what, "a", sealed) == content
    spaced = np.repeat(sealed, 2)[::2]  # as an array may come
    assert keyrings["b"].open(GROUP, what, "a", spaced) == content


def pair() -> Keyrings:
    """Return two with the keys of two groups."""
    keyrings = agreed("a", "b")
    hand_out(keyrings, GROUP, ["a", "b"])
    hand_out(keyrings, at(NOW, "all"), ["a", "b"])
    return keyrings


def test_other_content_has_another_nonce() -> None:
    keyrings = pair()
    first, other = (keyrings["a"].seal(GROUP, "delta", "a", content) for content in (b"moved", b"Moved"))
    assert (keyrings["a"].seal(GROUP, "delta", "a", b"moved") == first).all()  # a question repeated tells nothing new
    assert (first[:NONCE_BYTES] != other[:NONCE_BYTES]).any()
    assert (
        first[NONCE_BYTES + 1 : NONCE_BYTES + 5] != other[NONCE_BYTES + 1 : NONCE_BYTES + 5]
    ).any()  # "oved" in both
    assert keyrings["b"].open(GROUP, "delta", "a", first) == b"moved"
    assert keyrings["b"].open(GROUP, "delta", "a", other) == b"Moved"


@pytest.mark.parametrize("what", ["delta", "displacement"])
def test_what_was_tampered_with_is_not_opened(what: str) -> None:
    keyrings = pair()
    sealed = keyrings["a"].seal(GROUP, what, "a", bytes(range(64)))
    for bit in range(0, 8 * sealed.size, 37):
        wrong = np.frombuffer(_flipped(sealed.tobytes(), bit), np.uint8)
        with pytest.raises(PeerError, match=f"`{what}` of group `columns-1` is not as `a` sealed it"):
            keyrings["b"].open(GROUP, what, "a", wrong)
    other = "displacement" if what == "delta" else "delta"
    wrong_ways = [
        (GROUP, what, "a", sealed[:-1]),
        (GROUP, what, "a", sealed[:15]),
        (GROUP, what, "a", sealed[:0]),
        (GROUP, what, "a", np.concatenate([sealed, sealed[:1]])),
        (GROUP, other, "a", sealed),
        (GROUP, what, "b", sealed),
        (at(NOW, "all"), what, "a", sealed),
        (replace(GROUP, attempt=0), what, "a", sealed),
        (replace(GROUP, round=2), what, "a", sealed),
    ]
    for stamp, kind, maker, content in wrong_ways:
        with pytest.raises(PeerError):
            keyrings["b"].open(stamp, kind, maker, content)


# Digests of ids.

IDS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), max_size=5)


READERS = pair()


@given(IDS, IDS)
def test_digests_are_equal_if_and_only_if_ids_are_in_order(one: list[str], other: list[str]) -> None:
    keyrings = READERS
    mine, theirs = keyrings["a"].digest(GROUP, one), keyrings["b"].digest(GROUP, other)
    assert len(mine) == 32
    assert (mine == theirs) == (one == other)
    assert mine == keyrings["b"].digest(GROUP, one)


@pytest.mark.parametrize(
    "other",
    [["p1", "p3", "p2"], ["p1", "p2"], ["p1", "p2", "p3", "p3"], ["p1p2", "p3"], ["p1", "p2p3"], ["P1", "p2", "p3"]],
)
def test_near_misses_have_another_digest(other: list[str]) -> None:
    keyrings = READERS
    assert keyrings["a"].digest(GROUP, ["p1", "p2", "p3"]) != keyrings["b"].digest(GROUP, other)


def test_digests_differ_between_times_runs_groups_and_keys() -> None:
    keyrings, ids, found = agreed("a", "b"), ["p1", "p2"], set()
    times = [NOW, replace(NOW, attempt=2), replace(NOW, round=4), replace(NOW, run="other")]
    for group in (row_group("r"), "all"):
        hand_out(keyrings, at(NOW, group), ["a", "b"])
        found |= {keyrings["a"].digest(at(now, group), ids) for now in times}
    agree(keyrings, at(replace(NOW, attempt=2), NAME))
    hand_out(keyrings, at(replace(NOW, attempt=2), "all"), ["a", "b"])  # the same ids and time under another key
    found.add(keyrings["a"].digest(at(NOW, "all"), ids))
    assert len(found) == 9


# Masks of a row.


def parts(draw: st.DrawFn, count: int, shape: tuple[int, int]) -> list[np.ndarray]:
    numbers = st.floats(-(2.0**20), 2.0**20, exclude_min=True, exclude_max=True)
    size = shape[0] * shape[1]
    return [np.array(draw(st.lists(numbers, min_size=size, max_size=size))).reshape(shape) for _ in range(count)]


ROWS = {count: agreed(*"abcdef"[:count], "z") for count in range(2, 7)}  # z is of another row


@given(st.data())
def test_a_heads_row_comes_to_the_exact_sum(data: st.DataObject) -> None:
    """Masks cancel for whoever joins the others' parts, and for nobody that lacks one of them or the head's masks."""
    count, shape = data.draw(st.integers(2, 6)), (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)))
    keyrings, row = ROWS[count], list("abcdef"[:count])
    head = data.draw(st.sampled_from(row))
    others = [name for name in row if name != head]
    z = dict(zip(others, data.draw(st.composite(parts)(count - 1, shape)), strict=True))
    bits = RING.fraction_bits("z", 2.0**20, count, count)
    stamp = at(replace(NOW, round=data.draw(st.integers(0, 99))), row_group("r"))
    plain = {name: RING.encode("z", part, 1, bits, count, count) for name, part in z.items()}
    masked = {name: words.copy() for name, words in plain.items()}
    for name, words in masked.items():
        add_masks(words, keyrings[name].row_masks(stamp, [peer for peer in row if peer != name], shape, bits))
        assert (words != plain[name]).all()  # a word of 64 bits is masked by 0 with a chance of 2^-64
    relayed = add_up(list(masked.values()))
    assert (relayed != add_up(list(plain.values()))).all(), "the head's masks are still on it"
    joined = relayed.copy()
    add_masks(joined, keyrings[head].row_masks(stamp, others, shape, bits))
    expected = sum(np.rint(np.ldexp(part, bits)).astype(np.int64) for part in z.values())
    assert joined.view(np.int64).tolist() == np.asarray(expected).tolist()
    np.testing.assert_array_equal(RING.decode(joined.copy(), bits), np.ldexp(np.asarray(expected).astype(float), -bits))
    for wrong in (
        keyrings[head].row_masks(replace(stamp, attempt=2), others, shape, bits),
        keyrings[head].row_masks(at(stamp, "row=s"), others, shape, bits),
        keyrings[head].row_masks(stamp, others, shape, bits - 1),
        keyrings[head].row_masks(stamp, others, (*shape, 1), bits),
        keyrings["z"].row_masks(stamp, others, shape, bits),
        keyrings[head].row_masks(stamp, others[1:], shape, bits),
    ):
        words = relayed.copy()
        add_masks(words, wrong)
        assert (words != joined).all()


def test_two_sums_of_a_row_share_no_mask() -> None:
    keyrings = ROWS[3]
    keys = [
        key
        for now in (NOW, replace(NOW, attempt=0), replace(NOW, round=9))
        for group in ("row=r", "row=s")
        for _, key in keyrings["a"].row_masks(at(now, group), ["b", "c"], (2, 2), 40)
    ]
    assert len(set(keys)) == len(keys) == 12


# Secrets.


def test_no_secret_is_in_a_representation() -> None:
    root = SecretRoot.insecure(1, "a")
    keyrings = keyrings_of("ab", {"a": root, "b": SecretRoot.insecure(1, "b")})
    agree(keyrings)
    hand_out(keyrings, GROUP, ["a", "b"])
    agreement, _ = keyrings["a"]._set_up.agreed
    for secret in (keyrings["a"].key("columns-1"), agreement.seeds["b"], root.reveal()):
        for shown in (repr(keyrings["a"]), str(keyrings["a"]), repr(keyrings["a"]._set_up), f"{keyrings}"):
            assert secret.hex() not in shown
            assert repr(secret)[2:-1] not in shown
    assert repr(keyrings["a"]) == "GroupKeys('a', <redacted>)"


def test_messages_of_errors_hold_no_secret() -> None:
    keyrings = pair()
    sealed = keyrings["a"].seal(GROUP, "delta", "a", b"secret content")
    for call in (
        lambda: keyrings["b"].open(GROUP, "delta", "b", sealed),
        lambda: keyrings["b"].take(GROUP, "x", sealed.tobytes()),
    ):
        with pytest.raises(PeerError) as caught:
            call()
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        assert sealed.tobytes().hex()[:16] not in str(caught.value)


# Vectors.


def vector_keyrings(session: int = 0) -> dict[str, GroupKeys]:
    roots = {name: SecretRoot(bytes.fromhex(root)) for name, root in VECTORS["roots"].items()}
    made = keyrings_of(list(roots), roots, session=session)
    agree(made, Stamp(*VECTORS["stamp"]))
    return made


def vector_stamp(run: str) -> Stamp:
    return Stamp(run, *VECTORS["stamp"][1:])


def vector_groups() -> dict[str, GroupKeys]:
    keyrings = vector_keyrings()
    for run in VECTORS["groups"]:
        hand_out(keyrings, vector_stamp(run), [VECTORS["maker"], *sorted(set(keyrings) - {VECTORS["maker"]})])
    return keyrings


def test_grid_vector() -> None:
    case = VECTORS["grid"]
    parts = {name: Part(name, case["row"], tuple(columns)) for name, columns in case["columns"].items()}
    assert Grid(parts, {case["row"]: case["head"]}).digest(joint=True).hex() == case["digest"]


@pytest.mark.parametrize("run", VECTORS["groups"])
def test_key_vectors(run: str) -> None:
    case, maker, stamp = VECTORS["groups"][run], VECTORS["maker"], vector_stamp(run)
    keyrings = vector_keyrings()
    sealed = keyrings[maker].draw(stamp, sorted(keyrings))
    assert {name: content.hex() for name, content in sealed.items()} == case["sealed"]
    for name, content in case["sealed"].items():
        keyrings[name].take(stamp, maker, bytes.fromhex(content))
    assert {keyring.key(group_of(stamp)).hex() for keyring in keyrings.values()} == {case["key"]}
    resumed = vector_keyrings(session=1)
    resumed[maker].draw(stamp, sorted(keyrings))
    assert resumed[maker].key(group_of(stamp)).hex() == case["resumed"]


@pytest.mark.parametrize("case", VECTORS["tampered_keys"], ids=lambda case: case["why"])
def test_tampered_key_vectors(case: Mapping[str, str]) -> None:
    keyrings, maker = vector_keyrings(), VECTORS["maker"]
    holder = min(set(keyrings) - {maker})
    assert not keyrings[holder].take(vector_stamp(next(iter(VECTORS["groups"]))), maker, bytes.fromhex(case["sealed"]))


def test_content_vectors() -> None:
    keyrings = vector_groups()
    for case in VECTORS["contents"]:
        stamp, content = vector_stamp(case["run"]), bytes.fromhex(case["content"])
        sealed = keyrings[case["maker"]].seal(stamp, case["what"], case["maker"], content)
        assert sealed.tobytes().hex() == case["sealed"]
        for keyring in keyrings.values():
            assert keyring.open(stamp, case["what"], case["maker"], sealed) == content


@pytest.mark.parametrize("case", VECTORS["tampered_contents"], ids=lambda case: case["why"])
def test_tampered_content_vectors(case: Mapping[str, str]) -> None:
    sealed = np.frombuffer(bytes.fromhex(case["sealed"]), np.uint8)
    with pytest.raises(PeerError):
        vector_groups()["bea"].open(vector_stamp(case["run"]), case["what"], case["maker"], sealed)


def test_digest_vectors() -> None:
    keyrings = vector_groups()
    row = next(run for run in VECTORS["groups"] if run.startswith("row="))
    stamp = vector_stamp(row)
    for case in VECTORS["digests"]:
        assert keyrings["dora"].digest(stamp, case["ids"]).hex() == case["digest"]
    elsewhere = VECTORS["elsewhere"]
    assert (
        keyrings["dora"].digest(replace(stamp, round=stamp.round + 1), elsewhere["ids"]).hex()
        == elsewhere["next round"]
    )
    assert keyrings["dora"].digest(replace(stamp, run=f"{row} b"), elsewhere["ids"]).hex() == elsewhere["other run"]


def test_no_key_seals_the_contents_of_two_takes() -> None:
    """One attempt at two takes, as only a server that looks for one nonce with two contents would ask for."""
    keyrings = agreed("a", "b")
    hand_out(keyrings, GROUP, ["a", "b"])
    one, other = bytes(range(32)), bytes(32)
    first = keyrings["a"].seal(GROUP, "delta", "a", one)
    second = keyrings["a"].seal(replace(GROUP, take=1), "delta", "a", other)
    assert (first[:32] ^ second[:32]).tobytes() != one
