"""The secure sum inside Flower: what a strategy gets, what a site sends, who may be missing, and what is refused."""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("flwr", reason="pip install 'moretta[flower]'")

from beside_pages import blocks_of
from flower_nodes import WEIGHTS, Nodes, app, folders, reply, start, steps
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result

from moretta import SecureAggregation, flower
from moretta.contract.messages import Stamp
from moretta.deployment.flower import server, site
from moretta.deployment.flower.messages import AskName, SiloName, SumTerms
from moretta.deployment.flower.records import RECORD, packed, unpacked
from moretta.deployment.flower.site import Memory
from moretta.engines.folder_lock import held
from moretta.errors import ParameterError, RunFailed
from moretta.secure_aggregation import agreement
from moretta.secure_aggregation.agreement import AdvertiseKey, Agreement, PeerKeys
from moretta.secure_aggregation.pairwise import MaskedUpload
from moretta.secure_aggregation.secure_sum import AskSum
from moretta.secure_aggregation.unmasking import Survivors, Unmask

NAMES = ("north", "south", "east", "west")
Say = pytest.LogCaptureFixture


@pytest.fixture(autouse=True)
def heard(caplog: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Flower's log be read, and let nobody wait for silos that stay away."""
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("moretta"), "parent", logging.getLogger("flwr"))
    monkeypatch.setattr(server, "WAIT", 0.0)
    caplog.set_level(logging.INFO, "flwr")


def strategy(path: Path | None = None, evaluate: float = 0.0, **settings: Any) -> flower.SecureFedAvg:
    secure = SecureAggregation(roster=None if path is None else path / "roster.toml", **settings)
    return flower.SecureFedAvg(fraction_evaluate=evaluate, secure=secure, most_examples=4096)


def play(nodes: Nodes, strategy: FedAvg, rounds: int = 1) -> Result:
    return strategy.start(nodes, start(), num_rounds=rounds, timeout=60)  # type: ignore[arg-type]


def mean(*who: int) -> Any:
    """Return the mean of what `steps` makes of the first weights."""
    return WEIGHTS * 0.5 + sum(k * (10 + k) for k in who) / sum(10 + k for k in who)


@pytest.mark.parametrize("roster", [True, False])
@pytest.mark.parametrize(("bits", "step"), [(64, 1e-12), (32, 1e-3)])
def test_a_strategy_gets_what_flowers_own_computes(tmp_path: Path, roster: bool, bits: int, step: float) -> None:
    made = folders(tmp_path, *NAMES, roster=roster)
    ours = play(Nodes(made.values(), app(steps)), strategy(tmp_path if roster else None, 1.0, ring_bits=bits), 2)
    plain = play(Nodes([None] * 4, app(steps, secure=False)), FedAvg(), 2)
    np.testing.assert_allclose(ours.arrays["w"].numpy(), plain.arrays["w"].numpy(), rtol=1e-6, atol=step)
    assert (ours.arrays["w"].dtype, ours.arrays["seen"].numpy()) == ("float32", plain.arrays["seen"].numpy())
    for found, expected in (
        (ours.train_metrics_clientapp, plain.train_metrics_clientapp),
        (ours.evaluate_metrics_clientapp, plain.evaluate_metrics_clientapp),
    ):
        assert found.keys() == expected.keys() == {1, 2}
        for number in found:
            assert found[number].keys() == expected[number].keys()
            for name in found[number]:
                np.testing.assert_allclose(found[number][name], expected[number][name], rtol=1e-6, atol=20 * step)


def test_no_reply_shows_a_clients_numbers(tmp_path: Path) -> None:
    made = folders(tmp_path, *NAMES)

    def zeros(message: Message, context: Context) -> Message:
        arrays = {"w": np.zeros((3, 4), "f4"), "seen": np.asarray(0)} if "arrays" in message.content else None
        extra = reply(message, arrays, loss=0.0, num_examples=1)
        extra.content["clear"] = ConfigRecord({"rows": "31 patients"})
        return extra

    nodes = Nodes(made.values(), app(zeros))
    play(nodes, strategy(tmp_path, 1.0))
    replies = nodes.replies
    assert {tuple(one.content) for one in replies} == {(RECORD,)}
    uploads = [one for reply in replies for one in unpacked(reply.content) if isinstance(one, MaskedUpload)]
    assert len(uploads) == 2 * len(NAMES)  # of training and of evaluation
    words = np.concatenate([one.tensors["metrics"] for one in uploads] + [one.weight.reshape(1) for one in uploads])
    assert len(np.unique(words)) == words.size  # all hold zeros or ones, which no word shows
    assert words.min() > 2**32  # each is this small in one of 2^32 cases


def test_the_pages_two_lines_are_a_secure_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for_app, for_server = (one.text for one in blocks_of("docs/flower.md") if one.word == "python")

    def client() -> Any:
        given: dict[str, Any] = {}
        exec(for_app, given)  # noqa: S102
        given["app"].train()(steps)
        given["app"].evaluate()(steps)
        return given["app"]

    monkeypatch.chdir(tmp_path)  # where roster.toml is
    nodes = Nodes(folders(tmp_path, *NAMES).values(), client)
    played: dict[str, Any] = {"grid": nodes, "arrays": start()}
    exec(for_server.replace("num_rounds=3", "num_rounds=1"), played)  # noqa: S102
    np.testing.assert_allclose(played["result"].arrays["w"].numpy(), mean(0, 1, 2, 3), rtol=1e-6)
    assert {tuple(one.content) for one in nodes.replies} == {(RECORD,)}


def gone_at(kind: type, *, times: int = 1) -> Callable[[Nodes, int, Message], bool]:
    """Return a watch that kills the last node as it is about to get a message of a kind."""
    left = [times]

    def watch(nodes: Nodes, node: int, message: Message) -> bool:
        if node == nodes.nodes[-1] and left[0] and any(isinstance(one, kind) for one in unpacked(message.content)):
            left[0] -= 1
            nodes.gone.add(node)
        return node not in nodes.gone

    return watch


@pytest.mark.parametrize("kind", [AskSum, Survivors, Unmask])
@pytest.mark.parametrize("roster", [True, False])
def test_a_node_killed_at_any_step_is_survived_and_is_back_after_a_restart(
    tmp_path: Path, kind: type, roster: bool
) -> None:
    made = folders(tmp_path, *NAMES, roster=roster)
    nodes = Nodes(made.values(), app(steps), gone_at(kind))
    restarted = list[int]()

    def evaluated(number: int, arrays: Any) -> None:
        if number == 1:  # between two rounds: a new process, at a new node id and with nothing in memory
            restarted.append(nodes.add(made["west"], app(steps), 3))

    if kind is Survivors and not roster:
        nodes.watch = gone_at(Unmask)  # without a roster nobody is asked who is left while all are there
    found = strategy(tmp_path if roster else None).start(nodes, start(), num_rounds=2, evaluate_fn=evaluated)  # type: ignore[arg-type]
    assert 2 in found.train_metrics_clientapp  # the second round was summed
    first = found.train_metrics_clientapp.get(1)
    expected = 4 if kind is Unmask or (kind is Survivors and not roster) else 3
    if first is not None:  # with a roster a silo that is lost while others sign costs the round
        np.testing.assert_allclose(first["loss"], _loss(*range(expected)), rtol=1e-9)
    else:
        assert (kind, roster) == (Survivors, True)
    np.testing.assert_allclose(found.train_metrics_clientapp[2]["loss"], _loss(0, 1, 2, 3), rtol=1e-9)
    assert any(node == restarted[0] for node, _ in nodes.sent)


def _loss(*who: int) -> float:
    return sum((10 + k) / (k + 1) for k in who) / sum(10 + k for k in who)


def spoilt(**changes: Any) -> Callable[[Message, Context], Message]:
    """Return the steps of an app whose third node returns something else."""

    def train(message: Message, context: Context) -> Message:
        good = steps(message, context)
        if context.node_config["k"] != 2 or "arrays" not in good.content:
            return good
        arrays = {name: one.numpy() for name, one in good.content["arrays"].items()}
        arrays |= {name: value for name, value in changes.items() if name in ("w", "seen", "more")}
        metrics = {"loss": 1 / 3, "by-class": [0.5, 2.0], "num-examples": 12} | changes.get("metrics", {})
        left = {name: one for name, one in arrays.items() if one is not None}
        return reply(message, left, **{name: one for name, one in metrics.items() if one is not None})

    return train


BAD = {
    "an array is missing": (spoilt(w=None), r"expected the arrays that were sent .*\['w'\] differ"),
    "an array more": (spoilt(more=np.zeros(3)), r"\['more'\] differ"),
    "another shape": (spoilt(w=np.zeros((4, 3), "f4")), r"`w`: expected the shape that was sent, \(3, 4\).*\(4, 3\)"),
    "whole numbers": (spoilt(w=np.zeros((3, 4), "i8")), "`w`: expected the kind of numbers that was sent, 'f'.*'i'"),
    "NaN": (spoilt(w=np.full((3, 4), np.nan, "f4")), "`array/w`: expected finite numbers, got NaN or infinity"),
    "too large": (spoilt(w=np.full((3, 4), 1e9, "f4")), "`array/w`: a value is outside the range"),
    "a metric is NaN": (spoilt(metrics={"loss": float("nan")}), "`metrics`: expected finite numbers"),
    "no examples": (spoilt(metrics={"num-examples": 0}), "`num-examples` is 0; expected a whole number"),
    "NaN examples": (spoilt(metrics={"num-examples": float("nan")}), "`num-examples` is nan; expected a whole number"),
    "endless examples": (spoilt(metrics={"num-examples": float("inf")}), "`num-examples` is inf; expected a whole"),
    "a metric that is an empty list": (spoilt(metrics={"by-class": []}), "`by-class` is an empty list"),
    "half an example": (spoilt(metrics={"num-examples": 1.5}), "`num-examples` is 1.5; expected a whole number"),
    "examples are not counted": (spoilt(metrics={"num-examples": None}), "with the key `num-examples`"),
    "too many metrics": (spoilt(metrics={"all": [0.0] * 65}), "expected metrics of up to 64 numbers"),
    "another metric": (spoilt(metrics={"recall": 1.0}), "`east` returns the metrics .*recall.* and most others'"),
}


@pytest.mark.parametrize("what", BAD)
def test_the_round_goes_on_without_a_client_that_returns(what: str, tmp_path: Path, caplog: Say) -> None:
    train, sentence = BAD[what]
    nodes = Nodes(folders(tmp_path, *NAMES).values(), app(train))
    found = play(nodes, strategy(tmp_path))
    np.testing.assert_allclose(found.arrays["w"].numpy(), mean(0, 1, 3), rtol=1e-6)
    lines = [record.message for record in caplog.records if "east" in record.message or "Moretta" in record.message]
    assert any(re.search(sentence, line) for line in lines), lines
    own = what in ("NaN", "too large", "a metric is NaN", "no examples", "half an example")
    assert not own or set(nodes.told) == {"this site cannot take part in this sum; its own log says why"}


def test_what_an_app_raises_stays_at_its_site(tmp_path: Path, caplog: Say) -> None:
    def train(message: Message, context: Context) -> Message:
        if context.node_config["k"] == 1:
            raise ValueError("patient 4711 is 207 years old")
        return steps(message, context)

    nodes = Nodes(folders(tmp_path, *NAMES).values(), app(train))
    np.testing.assert_allclose(play(nodes, strategy(tmp_path)).arrays["w"].numpy(), mean(0, 2, 3), rtol=1e-6)
    assert set(nodes.told) == {"this site cannot take part in this sum; its own log says why"}
    assert any(record.exc_info and "4711" in str(record.exc_info[1]) for record in caplog.records)


def test_a_client_that_is_there_twice_takes_no_part(tmp_path: Path, caplog: Say) -> None:
    made = folders(tmp_path, *NAMES)
    nodes = Nodes([*made.values(), made["west"]], app(steps))
    np.testing.assert_allclose(play(nodes, strategy(tmp_path)).arrays["w"].numpy(), mean(0, 1, 2), rtol=1e-6)
    assert "nodes 1004, 1005 all call themselves `west`" in caplog.text.replace("[", "").replace("]", "")


def test_a_client_without_an_entry_in_the_roster_takes_no_part(tmp_path: Path, caplog: Say) -> None:
    made = folders(tmp_path, *NAMES)
    stranger = folders(tmp_path / "else", "centre", "south")
    nodes = Nodes([*list(made.values())[:3], stranger["centre"]], app(steps))
    np.testing.assert_allclose(play(nodes, strategy(tmp_path)).arrays["w"].numpy(), mean(0, 1, 2), rtol=1e-6)
    assert "its name `centre` is not in the roster" in caplog.text
    # one that uses another's name has no key for it
    nodes = Nodes([made["north"], made["east"], made["west"], stranger["south"]], app(steps))
    play(nodes, strategy(tmp_path))
    assert any("roster" in sentence for sentence in nodes.told), nodes.told


def test_more_clients_than_ids_of_a_run_without_a_roster(tmp_path: Path, caplog: Say) -> None:
    made = folders(tmp_path, *NAMES, roster=False)
    nodes = Nodes(list(made.values())[:3], app(steps))

    def evaluated(number: int, arrays: Any) -> None:
        if number == 1:
            nodes.add(made["west"], app(steps), 3)

    strategy().start(nodes, start(), num_rounds=2, evaluate_fn=evaluated)  # type: ignore[arg-type]
    assert "its name `west` is not in the roster, or was not connected when the run began" in caplog.text


def test_a_supernode_without_a_folder_is_told_how_to_name_one(tmp_path: Path) -> None:
    made = folders(tmp_path, *NAMES)
    nodes = Nodes([*list(made.values())[:3], None], app(steps))
    np.testing.assert_allclose(play(nodes, strategy(tmp_path)).arrays["w"].numpy(), mean(0, 1, 2), rtol=1e-6)
    assert nodes.told == [
        "this SuperNode names no silo.toml, whose folder keeps the site's records; start it with "
        "--node-config 'moretta=\"silo.toml\"'"
    ]


def test_nothing_is_sent_in_the_clear_to_another_strategy(tmp_path: Path) -> None:
    nodes = Nodes(folders(tmp_path, *NAMES).values(), app(steps))
    result = play(nodes, FedAvg())
    assert (len(result.train_metrics_clientapp), len(result.evaluate_metrics_clientapp)) == (0, 0)
    assert len(nodes.told) == 8
    assert all("asks for a reply in the clear" in sentence for sentence in nodes.told)


def test_an_app_without_the_mod_takes_no_part(tmp_path: Path, caplog: Say) -> None:
    made = folders(tmp_path, *NAMES)
    nodes = Nodes(list(made.values())[:3], app(steps))
    nodes.add(made["west"], app(lambda message, context: reply(message, None, loss=0.0), secure=False), 3)
    np.testing.assert_allclose(play(nodes, strategy(tmp_path)).arrays["w"].numpy(), mean(0, 1, 2), rtol=1e-6)
    assert "its reply holds no message of a secure sum, and was dropped" in caplog.text


def test_the_round_goes_on_without_a_client_that_names_no_metrics(tmp_path: Path, caplog: Say) -> None:
    """It stayed in the sum, whose means then had names that nobody had sent: the server ended with a KeyError."""

    class Unnamed(Nodes):
        def _answered(self, message: Message) -> Message | None:
            found = super()._answered(message)
            if found is not None and found.has_content() and message.metadata.dst_node_id == self.nodes[2]:
                sent = unpacked(found.content)
                if isinstance(sent[0], MaskedUpload):
                    found.content[RECORD] = packed(sent[0])
            return found

    found = play(Unnamed(folders(tmp_path, *NAMES).values(), app(steps)), strategy(tmp_path))
    np.testing.assert_allclose(found.arrays["w"].numpy(), mean(0, 1, 3), rtol=1e-6)
    lines = [record.message for record in caplog.records if "its upload came without the names" in record.message]
    assert lines
    assert all("east" in line for line in lines)


def test_too_few_clients_end_the_run_by_a_sentence(tmp_path: Path, caplog: Say) -> None:
    made = folders(tmp_path, *NAMES)
    with pytest.raises(RunFailed, match="round 1 cannot be completed by 2 of 4 silos, at least 3 are needed"):
        play(Nodes(list(made.values())[:2], app(steps)), strategy(tmp_path))


def test_floors_of_a_site_hold(tmp_path: Path) -> None:
    made = folders(tmp_path, *NAMES[:3])
    made |= {"west": folders(tmp_path / "x", "west", roster=False, more="[privacy]\nfewest-silos = 4\n")["west"]}
    # without rosters, so that all could sum
    plain = folders(tmp_path / "y", *NAMES[:3], roster=False)
    nodes = Nodes([*plain.values(), made["west"]], app(steps))
    np.testing.assert_allclose(play(nodes, strategy()).arrays["w"].numpy(), mean(0, 1, 2), rtol=1e-6)
    assert any(
        "[privacy] fewest-silos = 4 in this site's silo.toml, but the run has less, 3" in one for one in nodes.told
    )


def test_some_clients_play_a_round(tmp_path: Path) -> None:
    made = folders(tmp_path, *NAMES, "centre", "coast", "hills", "lakes")
    nodes = Nodes(made.values(), app(steps))
    some = flower.SecureFedAvg(
        fraction_train=0.5,
        fraction_evaluate=0.5,
        min_available_nodes=8,
        secure=SecureAggregation(roster=tmp_path / "roster.toml"),
        seed=3,
    )
    found = play(nodes, some, 2)
    uploads = [
        node for node, message in nodes.sent if any(isinstance(one, AskSum) for one in unpacked(message.content))
    ]
    assert len(uploads) == 4 * 4
    assert len(set(uploads)) > 4
    assert found.train_metrics_clientapp.keys() == {1, 2}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"secure": SecureAggregation(scheme="none")}, 'scheme = "pairwise"'),
        ({"fraction_evaluate": 0.5}, "expected 0 or fraction_train, 1.0"),
    ],
)
def test_settings_that_no_sum_has_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ParameterError, match=sentence):
        flower.SecureFedAvg(**options)


@pytest.mark.parametrize("bound", [46, 12, 1])
def test_examples_beyond_the_bound_end_the_run_by_a_sentence(bound: int, tmp_path: Path) -> None:
    """Four clients have 10 to 13 examples. No refusal shows which has more than a bound that the server chose."""
    nodes = Nodes(folders(tmp_path, *NAMES).values(), app(steps))
    few = flower.SecureFedAvg(secure=SecureAggregation(roster=tmp_path / "roster.toml"), most_examples=bound)
    with pytest.raises(RunFailed, match=rf"together are {bound} or more.*raise most_examples"):
        play(nodes, few)
    assert not nodes.told


# -- A server that deviates --------------------------------------------------------------------------------------------


class Deviating:
    """A server of three sites that sends what it likes. told: what came back from a node last."""

    def __init__(self, path: Path) -> None:
        self.made = folders(path, *NAMES[:3], roster=False)
        self.nodes = Nodes(self.made.values(), app(steps))
        self.terms = SumTerms(
            stamp=Stamp("run", 0, 0), settings="", silos=NAMES[:3], count=3, seed=0, most_weight=99,
            weighted_by="num-examples",
        )  # fmt: skip

    def ask(self, *messages: Any, node: int = 0, **content: Any) -> Any:
        asked = Message(RecordDict({**content, RECORD: packed(*messages)}), self.nodes.nodes[node], "train")
        [answer] = self.nodes.send_and_receive([asked])
        return answer.error.reason if answer.has_error() else unpacked(answer.content)


def test_terms_are_those_of_a_runs_first_set_up(tmp_path: Path) -> None:
    bad = Deviating(tmp_path)
    first = bad.ask(bad.terms, AdvertiseKey(stamp=Stamp("run", 1, 0)))
    assert first[0].public_key
    others = replace(bad.terms, most_weight=1)
    assert "expected the terms of this run's first set-up" in bad.ask(others, AdvertiseKey(stamp=Stamp("run", 1, 1)))
    assert "expected a set-up after round 1, attempt 0" in bad.ask(bad.terms, AdvertiseKey(stamp=Stamp("run", 1, 0)))
    again = bad.ask(bad.terms, AdvertiseKey(stamp=Stamp("run", 1, 1)))
    assert again[0].public_key != first[0].public_key


@pytest.mark.parametrize("of_one", ["num-examples", "loss"])
def test_masks_of_silos_with_other_terms_do_not_cancel(tmp_path: Path, of_one: str) -> None:
    """If one silo's weight were a metric of a thousand times the others' examples, the mean would be its own result."""
    bad, now = Deviating(tmp_path), Stamp("run", 1, 0)
    terms = [replace(bad.terms, weighted_by=of_one if node == 1 else "num-examples") for node in range(3)]
    adverts = [bad.ask(own, AdvertiseKey(stamp=now), node=node)[0] for node, own in enumerate(terms)]
    keys, signatures = (
        {n: getattr(a, part) for n, a in zip(NAMES, adverts, strict=False)} for part in ("public_key", "signature")
    )
    relayed = PeerKeys(stamp=now, keys=keys, signatures=signatures)
    accepted = [bad.ask(relayed, node=node)[0] for node in range(3)]
    assert len({reply.cohort for reply in accepted}) == (1 if of_one == "num-examples" else 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"settings": 'scheme = "none"'}, 'expected "pairwise"'),
        ({"settings": 'roster = "x.toml"'}, "only a machine's own files may name them"),
        ({"settings": "ring-bits = 65"}, "ring-bits"),
        ({"settings": "{"}, "run.toml"),
        ({"silos": ("south", "east")}, "expected each silo of the run once"),
        ({"silos": ("north", "north", "east")}, "expected each silo of the run once"),
        ({"count": 9}, "expected 2 to 3 silos in a round"),
    ],
)
def test_terms_that_hide_nothing_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    bad = Deviating(tmp_path)
    assert sentence in bad.ask(replace(bad.terms, **changes), AdvertiseKey(stamp=Stamp("run", 1, 0)))


def test_a_site_answers_nothing_out_of_turn(tmp_path: Path) -> None:
    bad = Deviating(tmp_path)
    now = Stamp("run", 1, 0)
    ask = AskSum(stamp=now, encoding={"metrics": 1, "most weight": 99})
    assert "expected a set-up before this" in bad.ask(ask, arrays=start())
    assert "asks for a reply in the clear" in bad.ask(AdvertiseKey(stamp=now), AdvertiseKey(stamp=now))
    assert "asks for a reply in the clear" in bad.ask(AskName(stamp=now), AskName(stamp=now))
    bad.ask(bad.terms, AdvertiseKey(stamp=now))
    assert "upload was asked for without a set-up" in bad.ask(ask, arrays=start())
    assert "before there was an upload" in bad.ask(Survivors(stamp=now, survivors=NAMES[:2]))
    assert "expected a message of a secure sum, got `flower/silo-name`" in bad.ask(SiloName(stamp=now, name="north"))
    assert "expected the terms of the run with the message" in bad.ask(AdvertiseKey(stamp=Stamp("run", 1, 1)))


def idle(message: Message, context: Context) -> Message:
    """Return the weights that came: beside such answers, a sum is one client's own."""
    arrays = {name: one.numpy() for name, one in message.content["arrays"].items()}
    return reply(message, arrays, loss=0.0, by_class=[0.0, 0.0], num_examples=1)


def two_functions() -> ClientApp:
    client = app(steps)()
    client.train("idle")(idle)
    return client


def _told(message: Message) -> None:
    message.content = RecordDict({**message.content, "config": ConfigRecord({"server-round": 9})})


def _reordered(message: Message) -> None:
    arrays = cast(ArrayRecord, message.content["arrays"])
    message.content = RecordDict({**message.content, "arrays": ArrayRecord(dict(reversed(arrays.items())))})


def _idle(message: Message) -> None:
    message.metadata.message_type = "train.idle"


def _of_another_group(message: Message) -> None:
    message.metadata.__dict__["_group_id"] = "9"


@pytest.mark.parametrize("own", [_told, _reordered, _idle, _of_another_group])
def test_a_question_of_its_own_for_one_client_is_not_summed(own: Callable[[Message], None], tmp_path: Path) -> None:
    """Its masks would not cancel, and the difference is noticed before anything is opened."""
    nodes = Nodes(folders(tmp_path, *NAMES).values(), two_functions)
    plain = nodes.push_messages

    def deviating(messages: Any) -> Any:
        messages = list(messages)
        for message in messages:
            if message.metadata.dst_node_id == nodes.nodes[2] and "arrays" in message.content:
                own(message)
        return plain(messages)

    nodes.push_messages = deviating  # type: ignore[method-assign]
    np.testing.assert_allclose(play(nodes, strategy(tmp_path)).arrays["w"].numpy(), mean(0, 1, 3), rtol=1e-6)


def test_a_configuration_of_its_own_for_one_client_is_not_summed(tmp_path: Path) -> None:
    """With a rate of 0 for all others, a sum would be one client's own."""
    nodes = Nodes(folders(tmp_path, *NAMES).values(), app(steps))
    nodes.configure(nodes.nodes[2], rate=0.5)
    np.testing.assert_allclose(play(nodes, strategy(tmp_path)).arrays["w"].numpy(), mean(0, 1, 3), rtol=1e-6)


def test_one_sum_of_a_round_is_kept_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a round over all four, the same round over three is not opened, also by processes that began anew."""
    made = folders(tmp_path, *NAMES)
    play(Nodes(made.values(), app(steps)), strategy(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "north" / "moretta" / "helped.jsonl").read_text().splitlines()]
    [run] = {str(line[1]) for line in lines if line[0] == "sum"}
    assert [line[3] for line in lines if line[0] == "sum" and line[4] == "GIVEN"] == [1]

    def same_run(count: int | None = None) -> str:
        return run.partition(".")[0]

    monkeypatch.setattr(agreement.secrets, "token_hex", same_run)
    again = Nodes(list(made.values())[:3], app(steps))  # with nothing in memory
    with pytest.raises(RunFailed, match="only be repeated by the same silos"):
        play(again, strategy(tmp_path))
    assert not any(isinstance(one, Unmask) for _, message in again.sent for one in unpacked(message.content))


def test_a_record_that_is_lost_during_a_run_is_missed(tmp_path: Path) -> None:
    """A site whose folder was cleared within a run took other terms, and could help to open a round's sum again."""
    bad = Deviating(tmp_path)
    bad.ask(bad.terms, AdvertiseKey(stamp=Stamp("run", 1, 0)))
    record = tmp_path / "north" / "moretta" / "helped.jsonl"
    record.unlink()
    others = replace(bad.terms, most_weight=1)
    assert "its own log says why" in bad.ask(others, AdvertiseKey(stamp=Stamp("run", 1, 1)))
    assert not record.exists()


def test_secrets_are_in_memory_alone(tmp_path: Path) -> None:
    nodes = Nodes(folders(tmp_path, *NAMES).values(), app(steps))
    play(nodes, strategy(tmp_path))
    memory = [Memory.of(nodes.context(node)) for node in nodes.nodes]
    assert len({one.root for one in memory} | {one.upload_root for one in memory}) == 8
    assert not any(repr(value) in repr(memory[0]) for value in vars(memory[0]).values())
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    sent = b"".join(bytes(reply.content[RECORD]["0"].data) for reply in nodes.replies)
    for one in memory:
        for secret in (one.root, one.upload_root):
            assert secret not in files + sent
            assert secret.hex().encode() not in files


# -- A simulation, and what a process keeps between messages -----------------------------------------------------------


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take nodes without a folder for those of a simulation, in a process that has kept nothing."""
    monkeypatch.setattr(site, "_simulated", lambda: True)
    monkeypatch.setattr(site, "_AGREEMENTS", site.KeptAgreements(128))


def contents(message: Message) -> list[bytes]:
    return [bytes(one.data) for _, one in sorted(message.content[RECORD].items())]


@pytest.mark.usefixtures("simulation")
def test_answers_follow_from_the_state_alone_whatever_a_process_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two runs over the same names, each with two set-ups, each message is answered alike at any later time."""
    asked = list[tuple[Nodes, int, bytes, Message]]()
    now = [0]

    def watch(nodes: Nodes, node: int, message: Message) -> bool:
        now[0] = len(asked)
        asked.append((nodes, node, nodes.contexts[node], deepcopy(message)))  # Flower changes its config each round
        return True

    monkeypatch.setattr(site.os, "urandom", lambda count: hashlib.sha256(b"%d" % now[0]).digest()[:count])
    answers = list[list[bytes]]()
    for _ in range(2):
        nodes = Nodes([None] * 4, app(steps), watch)

        def evaluated(number: int, arrays: Any, nodes: Nodes = nodes) -> None:
            if number == 1:
                nodes.gone.add(nodes.nodes[3])
                nodes.add(None, app(steps), 3)

        found = strategy().start(nodes, start(), num_rounds=3, evaluate_fn=evaluated)  # type: ignore[arg-type]
        assert sorted(found.train_metrics_clientapp) == [1, 2, 3]
        answers += map(contents, nodes.replies)
    assert len(answers) == len(asked)
    set_ups = sum(isinstance(unpacked(message.content)[0], SumTerms) for *_, message in asked)
    assert set_ups == 2 * 2 * 4

    def again(place: int) -> list[bytes]:
        nodes, node, before, message = asked[place]
        now[0], nodes.contexts[node], nodes.watch = place, before, None
        nodes.gone.clear()
        [answer] = nodes.send_and_receive([Message(message.content, node, message.metadata.message_type)])
        return contents(answer)

    backwards, places = list(reversed(range(len(asked)))), list(range(len(asked)))
    for most, order in (
        (128, backwards),
        (0, places),
        (1, places),
        (128, random.Random(0).sample(places, len(places))),
    ):
        monkeypatch.setattr(site._AGREEMENTS, "_most", most)
        for place in order:
            assert again(place) == answers[place], (most, place)


@pytest.mark.usefixtures("simulation")
def test_a_process_agrees_on_a_set_ups_keys_once_for_its_later_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    agree, calls = agreement.Offer._agreement, list[str]()

    def counted(self: Any, cohort: Any) -> Any:
        calls.append(self._me)
        return agree(self, cohort)

    monkeypatch.setattr(agreement.Offer, "_agreement", counted)
    play(Nodes([None] * 4, app(steps)), strategy(), 3)
    assert sorted(calls) == sorted(f"silo-{number}" for number in range(4) for _ in range(2))  # at the set-up and after


def test_agreements_are_found_by_all_that_they_follow_from_and_bounded() -> None:
    kept, one, other = site.KeptAgreements(2), *(cast(Agreement, object()) for _ in range(2))
    kept.keep("run", "north", b"1", one)
    kept.keep("run", "south", b"2", None)
    assert (kept.find("run", "south", b"2"), kept.find("other", "north", b"1")) == (None, None)
    assert kept.find("run", "north", b"1") is one
    kept.keep("other", "north", b"1", other)
    assert (kept.find("run", "north", b"1"), kept.find("other", "north", b"1")) == (one, other)
    kept.keep("run", "south", b"2", other)
    assert kept.find("run", "north", b"1") is None  # unused for longest
    assert kept.find("run", "south", b"3") is None  # of another state
    assert kept.find("run", "south", b"2") is None  # and so it was forgotten
    assert repr(kept) == "KeptAgreements(1 of 2, <redacted>)"


@pytest.mark.usefixtures("simulation")
def test_more_nodes_of_a_simulation_than_identities(tmp_path: Path, caplog: Say) -> None:
    """A roster has names and keys of three; a simulation's nodes have no keys, and nothing is summed without."""
    folders(tmp_path, "silo-0", "silo-1", "silo-2")
    nodes = Nodes([None] * 5, app(steps))
    with pytest.raises(RunFailed, match="round 1 cannot be completed by 0 of 3 silos"):
        play(nodes, strategy(tmp_path))
    for number in (3, 4):
        assert f"its name `silo-{number}` is not in the roster" in caplog.text
    assert "the key of silo `silo-0` is not signed" in caplog.text
    assert not any("arrays" in message.content for _, message in nodes.sent)
    nodes = Nodes([None] * 5, app(steps))  # without a roster each node is a silo of its own
    np.testing.assert_allclose(play(nodes, strategy()).arrays["w"].numpy(), mean(*range(5)), rtol=1e-6)


def test_two_supernodes_do_not_share_a_folder(tmp_path: Path) -> None:
    made = folders(tmp_path, *NAMES)
    nodes = Nodes(made.values(), app(steps))
    with held(tmp_path / "north" / "moretta", "flower.json"):
        nodes.send_and_receive(
            [Message(RecordDict({RECORD: packed(AskName(stamp=Stamp("x", 0, 0)))}), nodes.nodes[0], "train")]
        )
    assert nodes.told == ["this site cannot take part in this sum; its own log says why"]
