"""A server that asks one silo for something else than the rest, and what it still can do with a late answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from sum_driver import (
    NOW,
    Answer,
    Late,
    Seen,
    Silo,
    Train,
    about_of,
    agreed,
    exact_means,
    label_in,
    one_sum,
    rostered,
    unmask_of,
)

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Reason
from moretta.errors import PeerError
from moretta.secure_aggregation import pairwise
from moretta.secure_aggregation.additive import AddedShares
from moretta.secure_aggregation.cohort import Rules
from moretta.secure_aggregation.encoding import MOST_WEIGHT, Ring, add_up, decode
from moretta.secure_aggregation.keyed_sums import Aggregator
from moretta.secure_aggregation.pairwise import MaskedUpload, summed
from moretta.secure_aggregation.sums import Sum
from moretta.secure_aggregation.unmasking import SelfMaskShares, Survivors, put_together, recovered_masks

NAMES = tuple("abcdef")
VICTIM = "c"
FINE, COARSE = {"w": 32, MOST_WEIGHT: len(NAMES)}, {"w": -900, MOST_WEIGHT: len(NAMES)}
"""What the victim is asked for, and what the rest are: theirs rounds to nothing."""


@dataclass
class Stage:
    silos: dict[str, Silo]
    server: Aggregator
    now: Stamp

    def uploads(self, encoding: Mapping[str, int], own: Mapping[str, int]) -> dict[str, Any]:
        """Return what the silos upload where the victim is asked for another encoding, its own."""
        return {
            name: silo(Train(stamp=self.now, encoding=own if name == VICTIM else encoding))
            for name, silo in self.silos.items()
        }


def stage_of(scheme: str = "pairwise", *, roster: bool = False, shape: tuple[int, ...] = (4,), **rules: Any) -> Stage:
    """Return a cohort after its set-up. shape: of the victim's tensor."""
    made, credentials, run = rostered(NAMES, **rules) if roster else (Rules(**rules), {}, NOW.run)
    silos = {
        name: Silo(
            scheme, name, 64, {"w": np.linspace(-0.7, 0.9, 4).reshape(shape if name == VICTIM else (4,)) + place},
            rules=made, credentials=credentials.get(name),
        )
        for place, name in enumerate(NAMES)
    }  # fmt: skip
    now = Stamp(run, 1, 0)
    return Stage(silos, agreed(silos, scheme, rules=made, now=now), now)


def asked_for(silo: Silo, encoding: Mapping[str, int], *, lied: bool = False) -> dict[str, Answer]:
    """The victim behind a server that asks it for another encoding. lied: and says that it was asked as the rest."""

    def answer(asked: Message) -> Any:
        if not isinstance(asked, Train):
            return silo(asked)
        reply = silo(replace(asked, encoding=encoding))
        return replace(reply, asked=about_of(asked).digest) if lied else reply

    return {VICTIM: answer}


ANOTHER = [({"w": 31}, (4,)), ({MOST_WEIGHT: 7}, (4,)), ({}, (2, 2)), ({}, (1, 4))]
"""What the victim is asked for in the place of 32 bits, a weight of up to 6 and four numbers."""


@pytest.mark.parametrize(("own", "shape", "encoding"), [
    *((FINE | change, shape, FINE) for change, shape in ANOTHER), (FINE, (4,), COARSE), (FINE, (4,), FINE),
])  # fmt: skip
def test_masks_of_different_asks_do_not_cancel(
    own: dict[str, int], shape: tuple[int, ...], encoding: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Even if all self-masks were known, which this leaves out.
    stage, add_masks = stage_of(shape=shape), pairwise.add_masks
    monkeypatch.setattr(pairwise, "add_masks", lambda words, masks: add_masks(words, masks[1:]))
    uploads = stage.uploads(encoding, own)
    found = add_up([upload.tensors["w"].reshape(-1) for upload in uploads.values()])
    plain = [
        Ring(64).encode("w", silo.tensors["w"].reshape(-1), 1, bits["w"], bits[MOST_WEIGHT], len(NAMES))
        for name, silo in stage.silos.items()
        for bits in [own if name == VICTIM else encoding]
    ]
    alike = own == encoding and shape == (4,)
    assert np.array_equal(found, add_up(plain)) == alike
    if encoding == COARSE:
        assert np.array_equal(add_up(plain), plain[NAMES.index(VICTIM)])  # it would be the victim's alone
    weight = int(add_up([upload.weight for upload in uploads.values()]))
    assert (weight == len(NAMES)) == alike


@pytest.mark.parametrize(("own", "shape", "encoding"), [
    *((FINE | change, shape, FINE) for change, shape in ANOTHER), (FINE, (4,), COARSE),
])  # fmt: skip
def test_self_masks_of_different_asks_stay_hidden(
    own: dict[str, int], shape: tuple[int, ...], encoding: dict[str, int]
) -> None:
    stage = stage_of(shape=shape)
    uploads = stage.uploads(encoding, own)
    shares = {name: stage.silos[name](unmask_of(name, NAMES, uploads)).by_maker for name in NAMES}
    assert shares.pop(VICTIM).keys() == {VICTIM}
    assert all(given.keys() == set(NAMES) - {VICTIM} for given in shares.values())


@pytest.mark.parametrize(("own", "shape", "encoding"), [
    *((FINE | change, shape, FINE) for change, shape in ANOTHER), (FINE, (4,), COARSE),
])  # fmt: skip
def test_with_a_roster_nobody_unmasks_different_asks(
    own: dict[str, int], shape: tuple[int, ...], encoding: dict[str, int]
) -> None:
    stage = stage_of(roster=True, shape=shape)
    uploads = stage.uploads(encoding, own)
    signed = {name: silo(Survivors(stamp=stage.now, survivors=NAMES)) for name, silo in stage.silos.items()}
    for name, silo in stage.silos.items():
        with pytest.raises(PeerError, match="did not sign these survivors of this sum"):
            silo(unmask_of(name, NAMES, uploads, signed))


@pytest.mark.parametrize("roster", [False, True])
@pytest.mark.parametrize("change", [{"w": 31}, {"w": -900}, {MOST_WEIGHT: 7}])
def test_a_silo_that_was_asked_for_another_encoding_is_named_and_left_out(change: dict[str, int], roster: bool) -> None:
    stage, seen = stage_of(roster=roster), Seen()
    own = stage.server.want({"w": (4,)}, {"w": 100.0}, len(NAMES)).fraction_bits
    ways = asked_for(stage.silos[VICTIM], {**own, **change})
    total = one_sum(stage.server, stage.silos, stage.now, replaced=ways, seen=seen)
    assert isinstance(total, Sum)
    assert total.silos == tuple("abdef")
    assert not [name for name, reply in seen if name == VICTIM and not isinstance(reply, MaskedUpload)]


@pytest.mark.parametrize("roster", [False, True])
@pytest.mark.parametrize("change", [{"w": 31}, {"w": -900}, {MOST_WEIGHT: 7}])
def test_where_the_server_lies_about_what_it_asked_nothing_opens(change: dict[str, int], roster: bool) -> None:
    stage = stage_of(roster=roster)
    own = stage.server.want({"w": (4,)}, {"w": 100.0}, len(NAMES)).fraction_bits
    ways = asked_for(stage.silos[VICTIM], {**own, **change}, lied=True)
    aborted = one_sum(stage.server, stage.silos, stage.now, replaced=ways)
    assert isinstance(aborted, Aborted)
    assert aborted.because
    assert {name: why.reason for name, why in aborted.missing.items()} == {VICTIM: Reason.MALFORMED}


@pytest.mark.parametrize("change", [{"w": 31}, {"w": -900}, {MOST_WEIGHT: 7}])
def test_shares_of_different_asks_are_not_even_added(change: dict[str, int]) -> None:
    stage, seen = stage_of("additive-shares"), Seen()
    own = stage.server.want({"w": (4,)}, {"w": 100.0}, len(NAMES)).fraction_bits
    ways = asked_for(stage.silos[VICTIM], {**own, **change})
    aborted = one_sum(stage.server, stage.silos, stage.now, replaced=ways, seen=seen)
    assert isinstance(aborted, Aborted)
    assert not aborted.opened
    assert {name: why.reason for name, why in aborted.missing.items()} == {VICTIM: Reason.MALFORMED}
    assert "is not what the others were" in aborted.missing[VICTIM].detail
    assert not [reply for _, reply in seen if isinstance(reply, AddedShares)]


@pytest.mark.parametrize("change", [{"w": 31}, {"w": -900}, {MOST_WEIGHT: 7}])
def test_shares_of_different_asks_do_not_open(change: dict[str, int]) -> None:
    stage, seen = stage_of("additive-shares"), Seen()
    own = stage.server.want({"w": (4,)}, {"w": 100.0}, len(NAMES)).fraction_bits
    ways = asked_for(stage.silos[VICTIM], {**own, **change}, lied=True)
    aborted = one_sum(stage.server, stage.silos, stage.now, replaced=ways, seen=seen)
    assert isinstance(aborted, Aborted)
    assert aborted.missing.keys() == {VICTIM}
    added = {name: reply for name, reply in seen if isinstance(reply, AddedShares)}
    assert added.keys() == set(NAMES)
    assert not any(reply.words.size for reply in added.values())  # nobody tells any sum
    assert set(added.pop(VICTIM).unopened) == set(NAMES) - {VICTIM}
    assert {reply.unopened for reply in added.values()} == {(VICTIM,)}


@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
def test_shares_of_different_shapes_do_not_open(shape: tuple[int, ...]) -> None:
    stage, seen = stage_of("additive-shares", shape=shape), Seen()
    aborted = one_sum(stage.server, stage.silos, stage.now, seen=seen)
    assert isinstance(aborted, Aborted)
    assert aborted.missing.keys() == {VICTIM}
    assert not any(reply.words.size for _, reply in seen if isinstance(reply, AddedShares))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("weight", [0, len(NAMES) + 1, 2**32 - 1])
def test_a_public_weight_out_of_range_costs_only_its_silo(weight: int, bits: int) -> None:
    rules, missing = Rules(public_weights=True), dict[str, Any]()
    silos = {name: Silo("pairwise", name, bits, {"w": [0.5, k]}, rules=rules) for k, name in enumerate(NAMES)}
    server = agreed(silos, bits=bits, rules=rules)

    def lie(asked: Message) -> Any:
        reply = silos["b"](asked)
        changed = np.array(weight, dtype=f"uint{bits}")
        return replace(reply, weight=changed) if isinstance(reply, MaskedUpload) else reply

    total = one_sum(server, silos, NOW, replaced={"b": lie}, missing=missing)
    assert {name: why.reason for name, why in missing.items()} == {"b": Reason.MALFORMED}
    assert missing["b"].detail == f"expected a weight of 1 to {len(NAMES)}, got {weight}"
    assert isinstance(total, Sum)
    assert (total.silos, total.weight) == (tuple("acdef"), 5)
    fraction_bits = server.want({"w": (2,)}, {"w": 100.0}, len(NAMES)).fraction_bits["w"]
    assert total.means["w"].tolist() == exact_means(silos, total.silos, "w", fraction_bits).tolist()


@pytest.mark.parametrize("roster", [False, True])
def test_withheld_shares_and_a_retry_give_nobodys_own_upload(roster: bool) -> None:
    """Late shares still complete the sum that was given up; the retry is a sum of other rows, or none.

    A server that keeps late answers, or only says that one was late, once learned the late silo's own data from the
    two, as silos cannot tell late from lost. Now they help to open one sum of the same uploads.
    """
    late, seen = "f", Seen()
    stage = stage_of(roster=roster, threshold=len(NAMES))
    silos, server, names = stage.silos, stage.server, NAMES
    wanted = server.want({"w": (4,)}, {"w": 100.0}, len(names))
    cohort = silos["a"].contributor._keys.agreed[0].cohort

    def too_late(asked: Message) -> Any:
        reply = silos[late](asked)
        return Late(replace(reply, secret=b"")) if isinstance(reply, SelfMaskShares) else reply

    aborted = one_sum(server, silos, stage.now, replaced={late: too_late}, seen=seen)
    assert isinstance(aborted, Aborted)
    assert aborted.opened
    assert aborted.missing.keys() == {late}
    assert "shares of at least 6 silos" in aborted.because

    rest = {name: silo for name, silo in silos.items() if name != late}
    again = replace(stage.now, attempt=1)
    setup = agreed(rest, rules=server._rules, now=again)
    refused = one_sum(setup, rest, again)  # the attack: a second sum of the same rows, without the victim
    assert isinstance(refused, Aborted)
    assert {why.spent and (why.spent.next_take, why.spent.survivors) for why in refused.missing.values()} == {
        (1, names)
    }
    assert refused.missing.keys() == set(rest)
    for silo in rest.values():  # a take has rows of its own
        silo.tensors = {"w": silo.tensors["w"] * -0.5 + 1 / 3}
    second = one_sum(setup, rest, replace(again, take=1))
    assert isinstance(second, Sum)
    assert second.silos == tuple(rest)

    uploads = {name: reply for name, reply in seen if isinstance(reply, MaskedUpload)}
    given = {name: reply for name, reply in seen if isinstance(reply, SelfMaskShares)}
    label = label_in(stage.now, cohort, wanted)

    def secret_of(maker: str, holders: Mapping[str, Any]) -> bytes | None:
        shares = {name: given[name].by_maker[maker] for name in holders}
        points = {cohort.point(holder): share for holder, share in shares.items()}
        return put_together(points, cohort.plan.threshold, label, maker, uploads[maker].committed)

    assert all(secret_of(maker, rest) is None for maker in names)  # without the late shares there is nothing
    assert {bool(reply.secret) for name, reply in given.items() if name != late} == {roster}
    secrets = {maker: secret_of(maker, silos) for maker in names}
    masks = recovered_masks(label, names, {}, secrets)
    relayed = summed(server._ring, uploads, masks, wanted.shapes, public=server._rules.public_weights)
    first = decode(server._ring, relayed.tensors, int(relayed.weight), relayed.silos, wanted)
    difference = first.means["w"] * first.weight - second.means["w"] * second.weight
    assert np.abs(difference - silos[late].tensors["w"]).min() > 1
