"""Rows of partners that are not in one order: refused, unless ids or an alignment put them there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import (
    SEED,
    Fault,
    Seen,
    both,
    bytes_of,
    casting,
    failing,
    grid,
    make,
    network,
    run,
    same_bytes,
    table,
    train,
    watched,
)
from refused_rows import Row, refused
from test_cgd_resume import interrupted

from moretta import CGD, Centralised, Engine, Federation, Silo
from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Replies
from moretta.data.alignment.exchange import Blind, BlindAgain, Blinded, BlindedAgain, Match, Matched, Narrow, relay
from moretta.engines import views
from moretta.engines.checkpoint import last_checkpoint
from moretta.errors import MisuseError, ParameterError, PeerError
from moretta.protocols.cgd.group_keys import at
from moretta.protocols.cgd.messages import AlignmentUsed, DescribeRows, Forward, UseAlignment
from moretta.protocols.common.overlap import AskApart
from moretta.protocols.common.scoring import Score
from moretta.secure_aggregation.one_sum import Answers
from moretta.secure_aggregation.statistics import MAY_LACK, AskHistogram

ALIGN = CGD(delta=(0.1, 0.3), align=True)
UNKNOWN = "nothing confirms the order of its rows"


def shuffled(silos: list[Silo], *, seed: int = 1, lose: int = 2) -> list[Silo]:
    """Silos that each have their rows in an order of their own, write ids their own way, and lack some rows."""
    found, generator = [], np.random.default_rng(seed)
    for number, silo in enumerate(silos):
        assert silo.ids is not None
        order = generator.permutation(len(silo.x))[lose * (number % 2) :]
        ids = np.array([f" {one.upper()}" if number % 2 else one for one in silo.ids[order]])
        y = silo.y[order] if len(silo.y) else silo.y
        found.append(dataclasses.replace(silo, x=silo.x[order], y=y, ids=ids, aligned=False))
    return found


def in_common(silos: list[Silo]) -> list[Silo]:
    """The same silos as somebody who sees all ids would put them: shared rows only, in the order of ids."""
    found = []
    for silo in silos:
        row = [one for one in silos if one.row == silo.row]
        written = {one.name: [str(name).strip().casefold() for name in one.ids] for one in row if one.ids is not None}
        shared = sorted(set.intersection(*map(set, written.values())))
        order = np.array([written[silo.name].index(one) for one in shared])
        y = silo.y[order] if len(silo.y) else silo.y
        found.append(dataclasses.replace(silo, x=silo.x[order], y=y, ids=np.array(shared)))
    return found


SILOS = shuffled(grid([9, 8, 10], [3, 2], holders=[0, 1, 0], ids=True))
TRIPLES = shuffled(grid([12, 11], [2, 2, 1], ids=True))
CASES: dict[str, tuple[list[Silo], dict[str, Any]]] = {
    "pairs": (SILOS, {}),
    "pairs in batches, standardised": (SILOS, {"standardise": True, "batch_size": 3}),
    "triples": (TRIPLES, {}),
    "one row, standardised": (SILOS[:2], {"standardise": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_aligned_rows_train_as_if_they_had_been_in_order(case: str) -> None:
    silos, settings = CASES[case]
    expected = run(in_common(silos), 3, CGD(delta=(0.1, 0.3)), **settings)
    assert same_bytes(run(silos, 3, ALIGN, **settings), expected)


@pytest.mark.parametrize("engine", ["fused", "exact-ring"])
def test_a_simulation_aligns_too(engine: str) -> None:
    found = run(SILOS, 3, ALIGN, engine)
    assert bytes_of(found) == bytes_of(run(in_common(SILOS), 3, CGD(delta=(0.1, 0.3)), engine))


def test_shuffled_rows_without_ids_are_refused_where_they_once_trained_on_nonsense() -> None:
    """Two partners, a table whose target follows exactly from both partners' columns."""
    x, _ = table(300, 4, seed=2)
    y = (x[:, 2] - x[:, 3] + x[:, 0] / 2 > 0).astype(np.int64)
    ids, order = np.array([f"person-{n}" for n in range(300)]), np.random.default_rng(0).permutation(300)
    left, right = Silo("left", x[:, :2], y, "row", (0, 1)), Silo("right", x[order, 2:], y[:0], "row", (2, 3))
    with_ids = [dataclasses.replace(left, ids=ids), dataclasses.replace(right, ids=ids[order])]
    protocol = {"delta": 0.1, "learning_rate": 4.0}

    def accuracy(silos: list[Silo], **more: Any) -> float:
        made = make(silos, CGD.model_validate({**protocol, **more}), network(4, (16,)), test=(x, y))
        return float(made.train(120, SEED).test["accuracy"])

    for partners in ([left, right], [dataclasses.replace(left, aligned=True), right]):
        with pytest.raises(ParameterError, match=UNKNOWN):
            accuracy(partners)
    with pytest.raises(ParameterError, match="are not those of `left` in the same order"):
        accuracy(with_ids)
    right_order = [left, dataclasses.replace(right, x=x[:, 2:])]
    known = accuracy([dataclasses.replace(one, aligned=True) for one in right_order])
    assert known > 0.95
    assert accuracy([dataclasses.replace(one, ids=ids) for one in right_order]) == known
    assert accuracy(with_ids, align=True) > 0.95
    # An owner's word is taken, so a false one trains on what it always did.
    assert accuracy([dataclasses.replace(one, aligned=True) for one in (left, right)]) < 0.85


@refused("cgd_alignment.txt")
def test_what_cannot_be_is_refused(row: Row) -> None:
    row.play(globals())


def test_columns_are_put_together_in_no_unknown_order() -> None:
    silos = [dataclasses.replace(one, aligned=False) for one in grid([6, 4], [3, 2])]
    with pytest.raises(ParameterError, match=UNKNOWN):
        Federation(network(5), silos, Centralised(), dtype="float64").train(1)
    wrong = grid([6, 4], [3, 2], ids=True)
    wrong[1] = dataclasses.replace(wrong[1], ids=np.array(wrong[1].ids)[::-1])
    for protocol, engine in ((Centralised(), "in-process"), (CGD(delta=0.1), "fused")):
        with pytest.raises(ParameterError, match="row `row-0`: the ids of `silo-0-1` are not those of `silo-0-0`"):
            Federation(network(5), wrong, protocol, dtype="float64", engine=Engine(name=engine)).train(1)  # type: ignore[arg-type]


def test_rows_by_themselves_and_independent_models_need_no_order() -> None:
    silos = [dataclasses.replace(one, aligned=False) for one in grid([6, 4], [3, 2], joint=False)]
    assert run(silos, 1, CGD(delta=0.1, vertical="independent")).result.record["silos"] == 4
    assert run(grid([6, 4], [5]), 1, CGD(delta=0.1)).result.record["silos"] == 2


# -- what cannot be aligned --------------------------------------------------------------------------------------------


def changed(silos: list[Silo], name: str, **changes: Any) -> list[Silo]:
    return [dataclasses.replace(silo, **changes) if silo.name == name else silo for silo in silos]


ids_of_second = SILOS[1].ids
assert ids_of_second is not None
WRONG = {
    "no id in common": np.array([f"stranger-{n}" for n in range(len(ids_of_second))]),
    "some ids have line breaks": np.array([*ids_of_second[:-1], "per\nson"]),
    "1 of .* rows have no id": np.array([*ids_of_second[:-1], "  "]),
}


@pytest.mark.parametrize("said", WRONG)
@pytest.mark.parametrize("engine", ["in-process", "fused"])
def test_ids_that_cannot_be_aligned_end_the_run_before_its_first_round(said: str, engine: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ParameterError, match=said) as caught:
        run(changed(SILOS, "silo-0-1", ids=WRONG[said]), 1, ALIGN, engine, out=out)
    assert not any(word in str(caught.value).lower() for word in ("stranger", "person"))
    assert not out.exists()


# -- what whoever relays sees ------------------------------------------------------------------------------------------


def test_the_relay_sees_lengths_of_filled_lists_and_neither_ids_nor_points(tmp_path: Path) -> None:
    seen, out = Seen(), tmp_path / "run"
    protocol = ALIGN.model_copy(update={"align_pad_to": 40})
    run(SILOS, 1, protocol, wrap=watched(seen), out=out, record_views=True, insecure_secret_seed=None)
    for kind in (Blinded, BlindedAgain):
        lengths = {one.points.size for _, one in seen.answered(kind)}
        assert lengths == {40 * 32 + 28}  # points, a nonce and a tag, whatever rows there are
    everything = b"".join(one.data for path in sorted((out / "views" / "server").iterdir()) for one in views.read(path))
    assert b"person" not in everything.lower()
    assert not any(one.kept.size for _, one in seen.answered(Matched))
    marks = [one.digest for _, one in seen.answered(AlignmentUsed) if one.digest]
    assert len(set(marks)) == 3  # one a row, under its key


def test_lists_are_of_one_exchange(tmp_path: Path) -> None:
    """What was sealed for one step is no answer to another."""
    seen = Seen()
    made = make(SILOS[:2], ALIGN, insecure_secret_seed=None)
    with casting(watched(seen)) as (players, _):
        made.train(1, SEED)
    client = players[-1].clients["silo-0-1"]
    match = next(ask for name, ask in seen.asked(Match) if name == "silo-0-1")
    with pytest.raises(PeerError, match="whose exchange was begun"):
        client.answer(match)


def test_nothing_is_answered_about_rows_before_they_are_aligned() -> None:
    """A histogram of all rows, less that of the shared rows, was of persons whom no partner has."""
    made = make(SILOS, ALIGN)
    client = made.players(1, SEED).clients["silo-0-1"]
    now, ends = at(Stamp("run", 1, 0), "row=row-0"), np.zeros(1)
    no_digests = np.empty((0, 16), np.uint8)
    asks = [
        Forward(stamp=now, fraction_bits=20),
        DescribeRows(stamp=now),
        AskHistogram(stamp=now, what=MAY_LACK, columns=np.array([0]), low=ends, high=ends + 1.0, encoding={}),
        AskApart(stamp=now, key=bytes(32), ids=no_digests, groups=no_digests),
        Score(stamp=now, parameters={}, encoding={}),
    ]
    for ask in asks:
        with pytest.raises(MisuseError, match="not aligned with the other holders' yet"):
            client.answer(ask)


def test_rows_are_aligned_with_holders_of_the_same_row_alone() -> None:
    """Under the key of its columns a relay would have another row's holder test ids against this one's."""
    with casting() as (players, _):
        make(SILOS, ALIGN).train(1, SEED)
    client, now = players[-1].clients["silo-0-1"], Stamp("run", 1, 0)
    for group, peer in (("columns-2", "silo-1-1"), ("columns-2", "silo-0-0"), ("row=row-1", "silo-1-0")):
        with pytest.raises(PeerError, match="expected to work in group `row=row-0`"):
            client.answer(Blind(stamp=at(now, group), peer=peer, onward=False))
    with pytest.raises(PeerError, match="expected members of group `row=row-0`"):
        client.answer(Blind(stamp=at(now, "row=row-0"), peer="silo-1-0", onward=False))


def test_who_aligns_with_whom_follows_from_the_row_and_not_from_who_relays() -> None:
    with casting() as (players, _):
        make(TRIPLES, ALIGN).train(1, SEED)
    now = at(Stamp("run", 1, 0), "row=row-0")
    head, second, third = names = ("silo-0-0", "silo-0-1", "silo-0-2")
    wrong = [(one, one, False) for one in names] + [(second, third, False), (third, second, False)]
    wrong += [(second, head, True), (head, second, True), (head, third, False)]
    for me, peer, onward in wrong:
        with pytest.raises(PeerError, match="the head of the row, to align with each of the others in turn"):
            players[-1].clients[me].answer(Blind(stamp=now, peer=peer, onward=onward))
    with pytest.raises(PeerError, match="the head of the row, to name the rows that are left"):
        players[-1].clients[second].answer(Narrow(stamp=now, maker=third, kept=np.zeros(40, np.uint8)))


def test_a_third_holder_cannot_play_the_head_with_the_relays_help() -> None:
    """Lists are sealed for the two that align, not under the row's key, which the third has."""
    with casting() as (players, _):
        make(TRIPLES, ALIGN, insecure_secret_seed=None).train(1, SEED)
    clients: Mapping[str, Any] = players[-1].clients
    victim, third = clients["silo-0-1"], clients["silo-0-2"]
    now = at(third._group_keys._set_up.agreed[0].setup, "row=row-0")
    now = dataclasses.replace(now, run="row=row-0/" + now.run.rpartition("/")[2])
    listed = victim.answer(Blind(stamp=now, peer="silo-0-0", onward=False))
    for keys, what in ((third._group_keys.open, "ids for silo-0-0"), (third._group_keys.open_from, "ids")):
        with pytest.raises(PeerError, match="is not as `silo-0-1` sealed it"):
            keys(now, what, "silo-0-1", listed.points)
    own = np.arange(64, dtype=np.uint8)
    for sealed in (
        third._group_keys.seal(now, "ids for silo-0-1", "silo-0-0", own.tobytes()),
        third._group_keys.seal_for(now, "ids", "silo-0-1", own.tobytes()),
    ):
        with pytest.raises(PeerError, match="is not as `silo-0-0` sealed it"):
            victim.answer(BlindAgain(stamp=now, peer="silo-0-0", points=sealed, rules=ALIGN.id_rules.digest))


# -- once a run --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_with_the_same_rows_and_does_not_align_again(tmp_path: Path) -> None:
    def of(out: Path | None) -> Federation:
        return make(SILOS, ALIGN, out=out, checkpoint_every=1, batch_size=3)

    whole = train(of(None), 4)
    interrupted(of(tmp_path / "run"), 2, 4, SEED)
    seen = Seen()
    resumed = train(of(tmp_path / "run"), 4, wrap=watched(seen), resume=True)
    assert same_bytes(resumed, whole)
    assert list(seen.asked(UseAlignment))
    assert not list(seen.asked(Match))


def test_a_partner_whose_rows_changed_is_refused_on_resume(tmp_path: Path) -> None:
    interrupted(make(SILOS, ALIGN, out=tmp_path, checkpoint_every=1), 2, 4, SEED)
    found = last_checkpoint(tmp_path / "checkpoint")
    assert found is not None
    first = SILOS[0]
    assert first.ids is not None
    other = changed(SILOS, first.name, ids=first.ids[::-1].copy())
    with pytest.raises(ParameterError, match=f"silo `{first.name}`: the ids have changed since the alignment"):
        make(other, ALIGN, out=tmp_path, checkpoint_every=1).train(4, SEED, resume=True)


def test_what_was_shown_never_goes_back_and_a_restored_participant_aligns_again() -> None:
    """A site killed in round one goes back to its state before, but keeps the bytes of the later one."""
    with casting() as (players, _):
        make(SILOS[:2], ALIGN, insecure_secret_seed=None).train(1, SEED)
    clients: Mapping[str, Any] = players[-1].clients
    head, other = clients["silo-0-0"], clients["silo-0-1"]
    lasting = {name: value for name, value in other.state().items() if isinstance(value, bytes)}
    assert "alignment/root" in lasting
    recorded = other._setup.answers.names("")
    assert {f"alignment, {one}, silo-0-0" for one in ("own", "theirs", "again")} <= set(recorded), recorded
    used = other._order._used
    early = {name: value for name, value in other.state().items() if not name.startswith("alignment/")}
    now = at(head._group_keys._set_up.agreed[0].setup, "row=row-0")
    now = dataclasses.replace(now, run="row=row-0/" + now.run.rpartition("/")[2])

    def again() -> None:
        exchange = relay(now, ["silo-0-0", "silo-0-1"])
        ask = next(exchange)
        for step in range(3):
            replies = Replies({name: clients[name].answer(one) for name, one in ask.messages.items()})
            if step < 2:
                ask = exchange.send(replies)
        for client in (head, other):
            client.answer(UseAlignment(stamp=now, found=True))

    other.restore({**early, **lasting})
    assert not other._order._used
    again()
    assert other._order._used.digest == used.digest
    other.restore({**early, **lasting, "alignment/root": bytes(32)})  # a partner that draws other secrets, or lists
    other._order._aligner._answers = Answers()
    with pytest.raises(PeerError, match="ran before with other lists"):
        again()


@pytest.mark.parametrize("message", [Match, Blind, BlindAgain, UseAlignment])
def test_an_exchange_that_broke_off_is_played_again(message: type[Message]) -> None:
    """An answer is lost once, on the way: the next attempt is without its row, which aligns when it comes back."""
    silos = shuffled(grid([9, 8, 10, 7], [3, 2], ids=True))
    lost = Fault("silo-2-1", 1, message, "after")
    seen = Seen()
    found = run(silos, 3, ALIGN, wrap=both(failing(lost), watched(seen)), batch_size=3)
    assert lost.happened == 1
    assert found.dropped == [(1, "silo-2-1")]
    assert [name for name, ask in seen.asked(UseAlignment) if name == "silo-2-1" and ask.found][-1:] == ["silo-2-1"]
    assert [ask.stamp.round for name, ask in seen.asked(Forward) if name == "silo-2-1"] == [2, 3]
