"""Partners' rows in one order: rules of ids, exchanges, files, and what is refused."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moretta import IdRules, align
from moretta.contract.codec import Codec
from moretta.contract.messages import Stamp
from moretta.contract.roles import Replies
from moretta.data.alignment import curve, steps
from moretta.data.alignment.exchange import MESSAGES, Aligner, Blind, BlindAgain, Match, Narrow, relay
from moretta.data.alignment.partner import Alignment, Listing, Partner
from moretta.data.silo import Silo, aligned
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.secure_aggregation.keystream import SecretRoot

ALL = IdRules(drop_spaces=True, drop_punctuation=True, drop_zeros=True)
NOW = Stamp("run", 0, 0)
IDS = st.lists(st.sampled_from(["ada", "Ada ", "bo", "bo", "cy", "di", "éva", "e\u0301va", "７", "7"]), min_size=1)


def expected(rules: IdRules, a: list[str], b: list[str]) -> list[tuple[str, int]]:
    """Return the shared (id, k) in order, in the clear."""

    def elements(ids: list[str]) -> set[tuple[str, int]]:
        written = rules.normalised(ids, "here")
        return {(one, written[:at].count(one)) for at, one in enumerate(written)}

    return sorted(elements(a) & elements(b))


def rows(rules: IdRules, ids: list[str], found: Alignment) -> list[tuple[str, int]]:
    written = rules.normalised(ids, "here")
    return [(written[row], written[:row].count(written[row])) for row in found.order.tolist()]


# -- rules -------------------------------------------------------------------------------------------------------------


def test_rules_make_ids_alike() -> None:
    assert IdRules().normalised([" Ada\u00a0", "ＡＤＡ", "STRASSE", "straße"], "here") == [
        "ada",
        "ada",
        "strasse",
        "strasse",
    ]
    assert ALL.normalised(["P-0 07/1", "0000", "00-12"], "here") == ["p0071", "0", "12"]
    assert IdRules.of(["none"]).normalised([" Ada "], "here") == [" Ada "]
    assert IdRules().normalised(np.array([7, 12]), "here") == ["7", "12"]


def test_rules_have_a_digest_and_names() -> None:
    assert IdRules().digest == IdRules.of(["strip", "unicode", "fold-case"]).digest != ALL.digest
    with pytest.raises(ParameterError, match="unknown rule for ids 'folding'"):
        IdRules.of(["folding"])
    with pytest.raises(ParameterError, match="none excludes all others"):
        IdRules.of(["none", "drop-zeros"])


@pytest.mark.parametrize("bad", ["a\nb", "a\r", "\x00", "a\u2028b", "\x85", "a\u200bb", "\ud800"])
def test_line_breaks_and_control_characters_are_refused_and_never_quoted(bad: str) -> None:
    with pytest.raises(ParameterError, match="line breaks, control or invisible") as caught:
        IdRules().normalised(["fine", bad], "`north`")
    assert "fine" not in str(caught.value)
    assert bad not in str(caught.value)


@pytest.mark.parametrize("empty", ["", "  ", "\u3000", "--"])
def test_empty_ids_are_refused(empty: str) -> None:
    with pytest.raises(ParameterError, match="`north`: 1 of 2 rows have no id"):
        ALL.normalised(["fine", empty], "`north`")


@pytest.mark.parametrize("ids", [np.array([1.5]), np.array([["a"]]), [], np.array([None, "a"], object)])
def test_other_things_than_ids_are_refused(ids: object) -> None:
    with pytest.raises(ParameterError, match="text or whole numbers"):
        IdRules().normalised(ids, "here")  # type: ignore[arg-type]


def test_an_id_of_a_page_is_refused() -> None:
    with pytest.raises(ParameterError, match="is it the id column"):
        IdRules().normalised(["a" * 2000], "here")


# -- in process --------------------------------------------------------------------------------------------------------


@given(IDS, IDS)
def test_shared_rows_are_those_that_a_comparison_in_the_clear_finds(a: list[str], b: list[str]) -> None:
    wanted = expected(IdRules(), a, b)
    if not wanted:
        with pytest.raises(ParameterError, match="no id in common"):
            align({"a": a, "b": b})
        return
    found = align({"a": a, "b": b}, pad_to=max(len(a), len(b)) + 2)
    assert rows(IdRules(), a, found["a"]) == rows(IdRules(), b, found["b"]) == wanted
    assert found["a"].digest == found["b"].digest


def test_the_order_is_the_same_in_every_exchange_and_the_digest_another() -> None:
    a, b = [f"{n}" for n in range(40)], [f"{n}" for n in range(60, 20, -1)]
    one, two = align({"a": a, "b": b}), align({"a": a, "b": b})
    assert (one["b"].order == two["b"].order).all()
    assert one["a"].digest != two["a"].digest


def test_a_patients_kth_row_goes_with_the_others_kth() -> None:
    found = align({"a": ["x", "x", "y", "x"], "b": ["y", "x", "z", "x"]})
    assert found["a"].order.tolist() == [0, 1, 2]
    assert found["b"].order.tolist() == [1, 3, 0]


def test_a_chain_of_four() -> None:
    generator = random.Random(5)
    ids = {name: [f"{generator.randrange(40)}" for _ in range(60)] for name in "abcd"}
    found = align(ids)
    wanted = rows(IdRules(), ids["a"], found["a"])
    assert wanted
    assert all(rows(IdRules(), own, found[name]) == wanted for name, own in ids.items())
    assert len({one.digest for one in found.values()}) == 1
    assert len(found["a"].steps) == 3
    # What a third one lacks, the first two still learned of each other.
    assert found["b"].steps[0].common >= len(found["b"].order)


def test_padding_hides_how_many_rows_there_are() -> None:
    found = align({"a": ["1", "2"], "b": ["2"]}, pad_to=9)
    assert found["a"].steps == ((9, 9, 1),)
    with pytest.raises(ParameterError, match=r"`a`: pad-to is 1"):
        align({"a": ["1", "2"], "b": ["2"]}, pad_to=1)


def test_one_partner_alone_is_refused() -> None:
    with pytest.raises(ParameterError, match="two partners or more"):
        align({"a": ["1"]})


# -- a partner that is sent what it should not ------------------------------------------------------------------------


def partners() -> tuple[Partner, Partner]:
    return Partner(Listing(["1", "2"], IdRules(), "`a`")), Partner(Listing(["2", "3"], IdRules(), "`b`"))


def test_a_list_is_in_no_order_of_the_file() -> None:
    own = Partner(Listing([str(n) for n in range(50)], IdRules(), "`a`"), root=SecretRoot(bytes(32)))
    listed = own.blind()
    in_file = curve.blind(curve.encode(own._listing.messages), own._scalar)
    assert (np.sort(curve.keys(listed)) == np.sort(curve.keys(in_file))).all()
    assert (curve.keys(listed) != curve.keys(in_file)).mean() > 0.8


def test_lists_of_two_exchanges_have_no_point_in_common() -> None:
    (one, _), (two, _) = partners(), partners()
    assert not np.isin(curve.keys(one.blind()), curve.keys(two.blind())).any()


def test_each_step_is_taken_once_and_in_turn() -> None:
    a, b = partners()
    with pytest.raises(MisuseError, match="before the own one comes back"):
        a.match(b.blind())
    own, theirs = a.blind(), b.blind()
    a.again(theirs)
    with pytest.raises(MisuseError, match="already applied its secret"):
        a.again(theirs)
    with pytest.raises(PeerError, match="list of 2 points back, got 1"):
        a.match(b.again(own)[:1])


def test_a_place_that_only_fills_up_a_list_matches_nothing_and_a_list_is_matched_once() -> None:
    for place in range(6):
        a = Partner(Listing(["1", "2"], IdRules(), "`a`"), 6, SecretRoot(bytes(32)))
        b = Partner(Listing(["1"], IdRules(), "`b`"))
        a.blind()
        forged = curve.random_points(np.random.default_rng(place).integers(0, 256, (6, 32), dtype=np.uint8)).copy()
        forged[place] = a.again(b.blind())[0]
        if a._shuffled[place] < 2:
            assert a.match(forged).order.size == 1
        else:
            with pytest.raises(ParameterError, match="no id in common"):
                a.match(forged)
        with pytest.raises(MisuseError, match="matched its list before"):
            a.match(forged)


def test_an_exchange_is_played_again_with_the_same_lists_alone() -> None:
    def play(a: Aligner, b: Aligner, take: int) -> Alignment | None:
        exchange, asked = relay(Stamp("run", 0, 0, take), ["a", "b"]), {"a": a, "b": b}
        ask = next(exchange)
        while True:
            replies = Replies({name: asked[name].answer(one) for name, one in ask.messages.items()})
            try:
                ask = exchange.send(replies)
            except StopIteration:
                return a.alignment

    a, b = (Aligner(name, ["1", "2"], IdRules(), None, f"`{name}`") for name in "ab")
    first, again = play(a, b, 0), play(a, b, 1)
    assert first is not None
    assert again is not None
    assert first.digest == again.digest
    for other in (
        Aligner("b", ["1", "3"], IdRules(), None, "`b`"),
        Aligner("b", ["9", "2"], IdRules(), None, "`b`", root=b.root),
    ):
        with pytest.raises(PeerError, match="ran before with other lists"):
            play(a, other, 2)


def test_ones_own_list_is_not_taken_for_the_others() -> None:
    a, _ = partners()
    with pytest.raises(PeerError, match="the list that it was sent"):
        a.again(a.blind())


def test_a_partner_is_no_oracle_between_exchanges() -> None:
    aligner = Aligner("a", ["1"], IdRules(), None, "`a`")
    points = np.frombuffer(bytes([9]) + bytes(31), np.uint8)
    again = BlindAgain(stamp=NOW, peer="b", points=points, rules=IdRules().digest)
    with pytest.raises(PeerError, match="whose exchange was begun"):
        aligner.answer(again)
    aligner.answer(Blind(stamp=NOW, peer="b", onward=False))
    with pytest.raises(PeerError, match="whose exchange was begun"):
        aligner.answer(BlindAgain(stamp=NOW, peer="c", points=points, rules=IdRules().digest))
    with pytest.raises(PeerError, match="whose exchange was begun"):
        aligner.answer(Match(stamp=Stamp("run", 0, 1), peer="b", points=points))
    with pytest.raises(ParameterError, match="`b` normalises ids by other rules"):
        aligner.answer(BlindAgain(stamp=NOW, peer="b", points=points, rules=ALL.digest))
    with pytest.raises(MisuseError, match="an earlier alignment to continue from"):
        aligner.answer(Blind(stamp=NOW, peer="b", onward=True))
    with pytest.raises(MisuseError, match="to narrow, got none"):
        aligner.answer(Narrow(stamp=NOW, maker="b", kept=points))


def test_messages_survive_the_wire_and_say_nothing() -> None:
    codec, aligners = Codec(MESSAGES), {name: Aligner(name, ["1", "2"], IdRules(), None, name) for name in "ab"}
    exchange = relay(NOW, ["a", "b"])
    ask = next(exchange)
    sent = {name: aligners[name].answer(codec.decode(codec.encode(one))) for name, one in ask.messages.items()}
    assert all(one is not None and codec.decode(codec.encode(one)).TAG == "alignment/blinded" for one in sent.values())
    assert aligners["a"].answer(codec.decode(codec.encode(sent["a"]))) is None  # type: ignore[arg-type]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_has_no_ids_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    ids = ["secret-name", "other-name"]
    found = align({"a": ids, "b": ["other-name", "foreign-name"]})["a"]
    path = tmp_path / "alignment.json"
    found.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "name" not in path.read_text()
    back = Alignment.load(path)
    assert (back.order == found.order).all()
    assert (back.rules, back.digest, back.steps) == (found.rules, found.digest, found.steps)
    with pytest.raises(FileExistsError):
        found.save(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("moretta alignment", "other"),
        lambda text: text.replace('"order": [0', '"order": [-1'),
        lambda text: text.replace('"order": [0, 1', '"order": [1, 1'),
        lambda text: text.replace('"rows": 2', '"rows": 3'),
        lambda text: text.replace('"digest": "', '"digest": "zz'),
        lambda text: text.replace('"strip": true', '"strip": 1'),
        lambda text: text.replace('"common"', '"comon"'),
    ],
)
def test_another_file_is_refused(tmp_path: Path, change) -> None:
    path = tmp_path / "alignment.json"
    align({"a": ["1", "2"], "b": ["1", "2"]})["a"].save(path)
    path.write_text(change(path.read_text()))
    with pytest.raises(ParameterError, match="alignment"):
        Alignment.load(path)


def test_rows_are_reordered_and_changed_rows_refused() -> None:
    ids, x, y = ["C", "a", "b"], np.arange(6.0).reshape(3, 2), np.array([10, 11, 12])
    found = align({"a": ids, "b": ["b", "c", "x"]})["a"]
    rows = aligned(Silo("a", x, y, ids=np.array(ids), groups=np.array(["g1", "g2", "g3"])), found)
    assert rows.subject_ids is not None
    assert rows.subject_ids.tolist() == ["b", "c"]
    assert rows.x.tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert rows.y.tolist() == [12, 10]
    assert rows.groups is not None
    assert rows.groups.tolist() == ["g3", "g1"]
    assert len(aligned(Silo("a", x, y[:0], ids=np.array(ids)), found).y) == 0
    for changed in (["a", "C", "b"], ["C", "a", "b", "d"], ["C", "a"]):
        with pytest.raises(ParameterError, match="have changed since the alignment"):
            found.normalised(changed, "`a`")
    with pytest.raises(ParameterError, match="name the id column"):
        aligned(Silo("a", x, y), found)


# -- between files -----------------------------------------------------------------------------------------------------

A, B, C = ["1", "2", "2", "3", "4"], ["4", "2", "1", "2", "9"], ["2", "4", "2", "7"]


def test_three_files_align_two_partners() -> None:
    one, own = steps.begin(A, IdRules(), "a.csv", pad_to=8)
    two, theirs = steps.answer(one, B, IdRules(), "b.csv")
    found = steps.finish(two, own, A, "a.csv")
    assert found.step is not None
    last = steps.finish(found.step, theirs, B, "b.csv")
    assert last.step is None
    assert rows(IdRules(), A, found.alignment) == rows(IdRules(), B, last.alignment) == expected(IdRules(), A, B)
    assert found.alignment.digest == last.alignment.digest


def test_files_of_a_chain() -> None:
    one, own = steps.begin(A, IdRules(), "a")
    two, theirs = steps.answer(one, B, IdRules(), "b")
    a = steps.finish(two, own, A, "a")
    b = steps.finish(a.step or b"", theirs, B, "b").alignment
    one, own = steps.begin(A, IdRules(), "a", earlier=a.alignment)
    two, theirs = steps.answer(one, C, IdRules(), "c")
    after = steps.finish(two, own, A, "a", earlier=a.alignment)
    c = steps.finish(after.step or b"", theirs, C, "c").alignment
    assert after.left is not None
    narrower = steps.narrow(b, after.left)
    assert rows(IdRules(), A, after.alignment) == rows(IdRules(), B, narrower) == rows(IdRules(), C, c)
    assert after.alignment.digest == narrower.digest == c.digest
    with pytest.raises(PeerError, match="got those of another"):
        steps.narrow(narrower, after.left)


def test_an_exchange_goes_on_from_the_earlier_alignment_it_was_begun_with() -> None:
    one, two = (align({"a": A, "b": B})["a"] for _ in range(2))
    for begun, ended in ((one, None), (None, one), (one, two)):
        step, own = steps.begin(A, IdRules(), "a", earlier=begun)
        reply, _ = steps.answer(step, C, IdRules(), "c")
        with pytest.raises(ParameterError, match="began with another earlier alignment, or without one"):
            steps.finish(reply, own, A, "a", earlier=ended)


def test_files_of_other_exchanges_rows_and_rules_are_refused() -> None:
    one, own = steps.begin(A, IdRules(), "a")
    two, theirs = steps.answer(one, B, IdRules(), "b")
    with pytest.raises(PeerError, match="another exchange's"):
        steps.finish(two, steps.begin(A, IdRules(), "a")[1], A, "a")
    with pytest.raises(ParameterError, match="ids have changed since"):
        steps.finish(two, own, A[::-1], "a")
    with pytest.raises(ParameterError, match="other rules"):
        steps.answer(one, B, ALL, "b")
    with pytest.raises(PeerError, match="alignment step 3"):
        steps.finish(two, theirs, B, "b")
    with pytest.raises(PeerError, match="alignment step 1"):
        steps.answer(two, B, IdRules(), "b")
    with pytest.raises(PeerError, match="alignment secrets"):
        steps.finish(two, b"junk", A, "a")
    third = steps.finish(two, own, A, "a").step or b""
    codec = steps._CODEC
    lied = codec.decode(third)
    assert isinstance(lied, steps.StepFile)
    object.__setattr__(lied, "digest", bytes(32))
    with pytest.raises(PeerError, match="other shared rows"):
        steps.finish(codec.encode(lied), theirs, B, "b")


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(PeerError, match="as `moretta align` writes it"):
        steps.answer(data, B, IdRules(), "b")
