"""A server that sends one silo something else than the others: settings, a graph, columns' scales, or another set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from sum_driver import Vanished, play

from moretta.contract.messages import Array, Message, Stamp
from moretta.contract.roles import Aborted, Exchange, Reason
from moretta.data.tables.preparation import Preparation
from moretta.protocols.baffle.silo.client import Client
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import Agree, Estimate
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.silo.seeds import SERVER, Seed, agree, parameter_hash
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.scoring import HeldOut, ask_for
from moretta.protocols.common.silo_rows import Begin, TrainingRows
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.protocols.common.statistics import Statistics
from moretta.protocols.common.targets import RowLosses
from moretta.secure_aggregation import statistics
from moretta.secure_aggregation.agreement import KeysAccepted
from moretta.secure_aggregation.cohort import Participation, Rules
from moretta.secure_aggregation.keyed_sums import Contributor
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.schemes import aggregator, contributor
from moretta.secure_aggregation.secure_sum import AskSum
from moretta.secure_aggregation.sums import query_of

NAMES = ("a", "b", "c")
RULES = Rules(min_survivors=2, limit=64.0, participation=Participation(NAMES, 3))
Answer = Callable[[str, Any], Message]


def ended(exchange: Exchange[Any], answer: Answer, lost: Collection[str] = ()) -> Any:
    """Return what the exchange ends with. answer: of each silo, by its name."""

    def silo(name: str, message: Message) -> Message:
        if name in lost:
            raise Vanished
        return answer(name, message)

    return play(exchange, {name: partial(silo, name) for name in (*NAMES, "d")}, codec=False)


@pytest.mark.parametrize("scheme", ["pairwise", "additive-shares"])
@pytest.mark.parametrize("of_b", ["the others'", "b's alone"])
def test_masks_of_silos_with_other_settings_do_not_cancel(scheme: str, of_b: str) -> None:
    """With learning rates of 1e-30 at all others, a sum would be one silo's own update."""
    given = {name: Rules(**vars(RULES) | {"settings": of_b if name == "b" else "the others'"}) for name in NAMES}
    silos = {name: contributor(scheme, name, 64, given[name], run="r") for name in NAMES}
    server, now = aggregator(scheme, 64, given["a"]), Stamp("r", 1, 0)
    own = {name: np.array([7.0 if name == "b" else 0.0]) for name in NAMES}
    digests = list[bytes]()

    def answer(name: str, message: Any) -> Message:
        if isinstance(message, AskSum):
            return silos[name].upload(now, {"w": own[name]}, 1, message.encoding, asked=query_of(message))
        reply = silos[name].answer(message)
        assert reply is not None
        if isinstance(reply, KeysAccepted) and message.stamp.attempt:  # a server that does not compare them
            digests.append(reply.cohort)
            return replace(reply, cohort=digests[0])
        return reply

    named = ended(server.setup(now, NAMES), answer)
    assert (named is None) == (of_b == "the others'")
    if isinstance(named, Aborted):
        assert named.missing.keys() == {"b"}
        assert "the same run file at all sites" in named.missing["b"].detail
        now = Stamp("r", 1, 1)
        assert ended(server.setup(now, NAMES), answer) is None
        assert len(set(digests)) == 2
    request = server.want({"w": (1,)}, {"w": 64.0}, 3)
    total = ended(server.sum(AskSum(stamp=now, encoding=request.fraction_bits), request), answer)
    summed = np.nan if isinstance(total, Aborted) else total.means["w"][0] * total.weight
    assert (abs(summed - 7.0) < 1e-3) == (of_b == "the others'")


LAYOUT = Layout({"w": (1,)}, "float32", b"f" * 32)


class Graph:
    """A model that a server wrote: its outputs are zero, or the inputs' own."""

    layout = LAYOUT

    def __init__(self, graph: bytes) -> None:
        self._leaks = graph == b"leak"

    def at_once(self, rows: int) -> int:
        return 1

    def outputs(self, at: Array, x: Array) -> Array:
        outputs: Array = np.zeros((len(at), len(x), 1), np.float32)
        return at[:, None, :1] * x[None, :, :1] if self._leaks else outputs


@pytest.mark.parametrize("tells", ["the truth", "others their graph"])
def test_a_graph_that_one_silo_alone_is_sent_reads_nothing(tells: str) -> None:
    """The difference of two sums of one take, under another graph at b alone, was b's own losses."""
    zeros = np.zeros((8, 1), np.float32)
    recipe, common = Recipe("base", 1e-2, RowLosses("mse"), 4), {"rounds": 9, "scheme": "pairwise", "loss": "mse"}
    silos = {
        name: Client(
            SiloSetup(name, zeros + x, zeros, "s", batch_size=2, seed=1, rules=RULES, run="r", **common),  # type: ignore[arg-type]
            recipe,
            load=Graph,
            runs="float32",
        )
        for name, x in zip(NAMES, (3.0, 5.0, 7.0), strict=True)
    }
    server, seed = aggregator("pairwise", 64, RULES), Seed(SERVER, SecretRoot.fresh())
    shown = {b"zero": np.frombuffer(b"zero", np.uint8), b"leak": np.frombuffer(b"leak", np.uint8)}
    digest_of = {graph: hashlib.sha256(graph).digest() for graph in shown}

    def answer(name: str, message: Any) -> Message:
        if isinstance(message, Agree):
            own = b"zero" if name == "b" and message.stamp.attempt else b"leak"
            digest = digest_of[own] if tells == "others their graph" or own == b"leak" else digest_of[b"leak"]
            fields = {key: getattr(message, key) for key in ("stamp", "contributions", "layout")}
            message = Agree(**fields, graph=shown[own], graphs={"float32": digest})
        return silos[name].answer(message)

    totals = []
    for attempt in (0, 1):
        now = Stamp("r", 1, attempt)
        assert ended(server.setup(now, NAMES), answer) is None
        agreed = ended(agree(now, NAMES, seed, LAYOUT, lambda kind: b"leak"), answer)
        if attempt and tells == "the truth":
            assert "expected the graph whose digest all silos received" in agreed.missing["b"].detail
            return
        assert len(agreed) == 1
        request, at = server.want({"scalars": (5,)}, {"scalars": 64.0}, 6), np.ones(1, np.float32)
        figures = {"parameters": at, "parameter_hash": parameter_hash(LAYOUT, at), "k": 4}
        ask = Estimate(stamp=now, **figures, encoding=request.fraction_bits)  # type: ignore[arg-type]
        totals.append(ended(server.sum(ask, request), answer))
    assert len(totals[0].silos) == 3
    assert totals[1].missing["b"].reason is Reason.SPENT  # it has helped with this take, under the graphs of then


def rows_of(name: str, helped: HelpedSums, rows: int, *listed: tuple[str, int, int, tuple[int, ...]]) -> TrainingRows:
    x = np.random.default_rng(ord(name)).normal(size=(rows, 1))
    held_out = HeldOut(x, np.zeros((rows, 1)), "mse", ("loss", "mse"), 5, helped.answers)
    batches, closed = Batches(rows, 5, 0, name, "r"), Statistics(tuple(listed))
    return TrainingRows(
        x, np.zeros((rows, 1)), batches, schema="s", held_out=held_out, answers=helped.answers, statistics=closed
    )


def half_of(name: str, helped: HelpedSums) -> Contributor:
    return contributor("pairwise", name, 64, RULES, helped=helped, run="r")


def test_one_model_is_scored_on_rows_that_are_prepared_in_one_way() -> None:
    """Scores of one model under other means and deviations told, exactly, how many held-back values pass a bound."""
    helped = {name: HelpedSums(over_runs=True) for name in NAMES}
    halves = {name: half_of(name, helped[name]) for name in NAMES}
    scaled = [(statistics.MAY_LACK, order, 1, ()) for order in (1, 2)]
    rows = {name: rows_of(name, helped[name], 40, *scaled) for name in NAMES}
    server, model = aggregator("pairwise", 64, RULES), {"w": np.ones(1)}

    def answer(name: str, message: Any) -> Message:
        if hasattr(message, "parameters"):
            held = rows[name].scored(message)
            outputs = rows[name].prepared.apply(held.x, np.float64) * message.parameters["w"]
            return held.upload(message, halves[name], outputs, rows[name].agreed)
        return rows[name].answer(message, halves[name])

    def score(attempt: int, mean: float) -> Any:
        now = Stamp("r", 6, attempt)
        assert ended(server.setup(now, NAMES), answer) is None
        begin = Begin.of(now, "s", "", Preparation(np.zeros(1), np.array([mean]), np.ones(1)))
        for name in NAMES:
            answer(name, begin)
        ask, request = ask_for(server, now, model, ("loss", "mse"))
        return ended(server.sum(ask, request), answer)

    assert score(0, 0.5).weight == 3
    assert score(1, 0.5).weight == 3  # the same again
    assert "that was scored before, got another" in score(2, 0.25).missing["a"].detail


def test_all_statistics_are_of_one_set() -> None:
    """Means over all and squares over all but one told that one's number of rows."""
    sizes = {"a": 21, "b": 9, "c": 14, "d": 33}
    rules = Rules(min_survivors=2, limit=64.0, participation=Participation(tuple(sizes), 4))
    listed = [(statistics.MAY_LACK, order, 1, ()) for order in (1, 2)]
    helped = {name: HelpedSums(over_runs=True) for name in sizes}
    halves = {name: contributor("pairwise", name, 64, rules, helped=helped[name], run="r") for name in sizes}
    rows = {name: rows_of(name, helped[name], sizes[name], *listed) for name in sizes}
    server = aggregator("pairwise", 64, rules)

    def asked(run: str, order: int, attempt: int, lost: Sequence[str] = ()) -> Any:
        now = Stamp(run, 0, attempt)
        assert (
            ended(server.setup(now, tuple(sizes)), lambda name, message: rows[name].answer(message, halves[name]))
            is None
        )
        name = statistics._tensor(statistics.MAY_LACK, order)
        request = server.want({name: (statistics.LIMBS, 2)}, {name: float(statistics.HALF)}, 4)
        what = {"what": statistics.MAY_LACK, "order": order, "center": np.zeros(1), "columns": statistics.ALL}
        ask = statistics.AskMoments(stamp=now, **what, encoding=request.fraction_bits)  # type: ignore[arg-type]
        total = server.sum(ask, request, query_of(ask).digest)
        return ended(total, lambda name, message: rows[name].answer(message, halves[name]), lost=lost)

    assert len(asked("r", 1, 0).silos) == 4
    assert {why.reason for why in asked("r", 2, 1, lost=("d",)).missing.values()} == {Reason.SPENT}
    assert len(asked("r", 2, 2).silos) == 4
