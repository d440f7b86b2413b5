"""The secure sum by itself: what it comes to, who may be missing, and what a client gives once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from moretta import SecureAggregation, SumClient, secure_sum
from moretta.contract.messages import Stamp
from moretta.errors import CodecError, PeerError, RunFailed
from moretta.secure_aggregation.identity import Identity
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.secure_sum import CODEC, AskSum
from moretta.secure_aggregation.statistics import AskHistogram

NAMES = ("north", "south", "east", "west")
SHAPES = {"x": (3,), "n": ()}
Deliver = Callable[[bytes], bytes]


def clients(settings: SecureAggregation | None = None, weight: int = 1, scale: float = 1.0) -> dict[str, SumClient]:
    rows = {name: {"x": scale * (np.arange(3.0) + k), "n": np.array(10.0 * k)} for k, name in enumerate(NAMES)}
    return {name: SumClient(name, NAMES, tensors, weight, settings) for name, tensors in rows.items()}


def ways(made: Mapping[str, SumClient], **others: Deliver) -> dict[str, Deliver]:
    return {name: one.answer for name, one in made.items()} | others


def gone_after(times: int, deliver: Deliver) -> Deliver:
    """A way to a silo that is lost after so many answers."""
    left = [times]

    def delivered(data: bytes) -> bytes:
        left[0] -= 1
        if left[0] < 0:
            raise TimeoutError("no answer in 5 s")
        return deliver(data)

    return delivered


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares", "none"])
def test_it_is_the_weighted_mean_of_what_clients_hold(scheme: str) -> None:
    settings = SecureAggregation.model_validate({"scheme": scheme})
    total = secure_sum(ways(clients(settings, weight=2)), SHAPES, settings, most_weight=8)
    assert (total.weight, list(total.silos)) == (8, sorted(NAMES))
    np.testing.assert_allclose(total.means["x"], [1.5, 2.5, 3.5], rtol=0, atol=max(total.steps.values()))
    np.testing.assert_allclose(total.means["n"] * total.weight, 120.0, rtol=0, atol=1e-9)


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares", "none"])
@pytest.mark.parametrize(("weight", "most"), [(2, None), (2, 7), (300, 300)])
def test_no_mean_comes_of_more_weight_than_was_planned(scheme: str, weight: int, most: int | None) -> None:
    settings = SecureAggregation.model_validate({"scheme": scheme})
    with pytest.raises(RunFailed, match=f"together are {(most or 4) + 1} or more, expected fewer; raise most_weight"):
        secure_sum(ways(clients(settings, weight)), SHAPES, settings, most_weight=most)


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_it_goes_on_without_a_silo_that_is_lost_at_any_step(times: int) -> None:
    made = clients()
    total = secure_sum(ways(made, west=gone_after(times, made["west"].answer)), SHAPES)
    everybody = times == 3  # it had uploaded, and the others open the sum
    assert list(total.silos) == (sorted(NAMES) if everybody else ["east", "north", "south"])
    np.testing.assert_allclose(total.means["n"], 15.0 if everybody else 10.0, rtol=0, atol=1e-9)


def test_too_few_silos_are_named_with_what_became_of_them() -> None:
    made = clients()
    others = {name: gone_after(0, made[name].answer) for name in ("north", "south", "east")}
    with pytest.raises(
        RunFailed, match="at least 3 silos must agree on keys: east: disconnected, TimeoutError: no answer"
    ):
        secure_sum(ways(made, **others), SHAPES)
    made = clients(scale=1e9)
    with pytest.raises(RunFailed, match=r"could not be opened: .*west: refused, `x`: a value is outside the range"):
        secure_sum(ways(made), SHAPES)
    with pytest.raises(RunFailed, match="north: malformed, "):
        secure_sum(ways(clients(), north=lambda data: data[:9], south=lambda data: data), SHAPES)


def test_no_upload_shows_its_clients_numbers() -> None:
    seen: dict[str, MaskedUpload] = {}

    def noted(name: str, deliver: Deliver) -> Deliver:
        def delivered(data: bytes) -> bytes:
            answer = deliver(data)
            if isinstance(message := CODEC.decode(answer), MaskedUpload):
                seen[name] = message
            return answer

        return delivered

    made = clients(scale=0.0)
    secure_sum({name: noted(name, one.answer) for name, one in made.items()}, SHAPES)
    words = np.concatenate([one.tensors["x"] for one in seen.values()])
    assert len(seen) == len(NAMES)
    assert len(np.unique(words)) == words.size  # all hold zeros, which no word shows
    assert words.min() > 2**32  # each is this small in one of 2^32 cases


def test_a_client_helps_to_open_one_sum() -> None:
    made = clients()
    secure_sum(ways(made), SHAPES)
    with pytest.raises(RunFailed, match="west: refused, this silo takes part in one sum"):
        secure_sum(ways(made), SHAPES)


def test_a_client_answers_a_server_of_a_sum_and_nothing_else() -> None:
    one = clients()["north"]
    with pytest.raises(CodecError):
        one.answer(b"no message")
    for stamp in (Stamp("run", 2, 0), Stamp("run", 1, 0, 1)):
        with pytest.raises(PeerError, match="takes part in one sum"):
            one.answer(CODEC.encode(AskSum(stamp=stamp, encoding={})))
    with pytest.raises(PeerError, match="expected a message of a secure sum"):
        one.answer(CODEC.encode(AskHistogram(
            stamp=Stamp("run", 1, 0), what="x", columns=np.array([0]), low=np.zeros(1), high=np.ones(1), encoding={}
        )))  # fmt: skip


def test_a_roster_says_who_the_silos_are(tmp_path: Path) -> None:
    for name in NAMES:
        Identity.fresh().save(tmp_path / name)
    lines = [
        f'[[silo]]\nname = "{name}"\nkey = "{(tmp_path / name / "identity.pub").read_text().strip()}"\n'
        for name in NAMES
    ]
    (tmp_path / "roster.toml").write_text("".join(lines))
    settings = SecureAggregation(roster=tmp_path / "roster.toml", identity=str(tmp_path / "{silo}"))
    assert secure_sum(ways(clients(settings)), SHAPES, settings).weight == 4
    (tmp_path / "west" / "identity.key").unlink()
    (tmp_path / "west" / "identity.pub").unlink()
    Identity.fresh().save(tmp_path / "west")
    assert secure_sum(ways(clients(settings)), SHAPES, settings).silos == ("east", "north", "south")  # not another west


def test_tensors_that_answer_another_question_do_not_add_up() -> None:
    about = dict.fromkeys(NAMES, b"model") | {NAMES[0]: b"another"}
    numbers = {name: {"x": np.array([float(place)])} for place, name in enumerate(NAMES)}
    clients = {name: SumClient(name, NAMES, numbers[name], about=about[name]) for name in NAMES}
    total = secure_sum({name: client.answer for name, client in clients.items()}, {"x": (1,)})
    assert list(total.silos) == sorted(NAMES[1:])
