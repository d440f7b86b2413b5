"""The server's half: a strategy of Flower's whose replies are summed before it sees them."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, MessageType, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from moretta.contract.messages import Message, Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, Replies, Report, Server
from moretta.deployment.flower.messages import ARRAY, METRICS, SLOTS, AskName, SiloName, SumTerms, UploadNames
from moretta.deployment.flower.records import RECORD, packed, unpacked
from moretta.deployment.shared_settings import shared_sums
from moretta.engines.delivery import Delivery, replies_of, valid
from moretta.engines.driver import Driver, RoundEnd
from moretta.engines.usage import Clock
from moretta.errors import MorettaError, ParameterError, PeerError, RunFailed
from moretta.secure_aggregation.agreement import AdvertiseKey, fresh_run
from moretta.secure_aggregation.cohort import Participation, Rules
from moretta.secure_aggregation.encoding import Ring
from moretta.secure_aggregation.graph import AdvertiseCommitted
from moretta.secure_aggregation.identity import Roster
from moretta.secure_aggregation.keyed_sums import KeyedAggregator
from moretta.secure_aggregation.pairwise import PAIRWISE, MaskedUpload
from moretta.secure_aggregation.secure_sum import AskSum
from moretta.secure_aggregation.settings import SecureAggregation
from moretta.secure_aggregation.sums import Sum, as_summed

METRIC_LIMIT = 2.0**16  # the largest metric
WHOLE_LIMITS = {64: 2.0**31, 32: 2.0**16}  # the largest entry of an array of whole numbers, by the ring's bits
WAIT = 60.0  # seconds that a round waits for silos that it needs
HELLO = 600.0  # seconds for a node to send its name
MOST_TOLD = 300  # characters of a node's error
STEP = 1.0  # seconds between two looks at connected nodes
SOONEST, LATEST = 0.01, 3.0  # seconds between two looks for replies
AWAY = (ErrorCode.NODE_UNAVAILABLE, ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)

log = logging.getLogger("moretta")


class SecureFedAvg(FedAvg):  # type: ignore[misc]  # Flower need not be installed where types are checked
    """Flower's FedAvg, whose server learns the weighted means of arrays and metrics, and no client's own.

    Each ClientApp needs ``mods=[moretta.flower.secure_sum()]``. Clients that are lost or refuse are left out, as long
    as enough are left; otherwise the round is lost and the model stays unchanged.

    Args:
        args, options: as of Flower's FedAvg. `fraction_evaluate` is 0 or as `fraction_train`.
        secure: how sums are made, with `roster` the file of all silos' keys; None is `SecureAggregation()`.
        most_examples: a bound of all clients' examples together. A close one leaves finer steps with ring-bits 32.
        seed: of the choice of a round's clients, where `fraction_train` is below 1.

    Raises:
        moretta.errors.ParameterError: settings that no secure sum has, or that Flower's FedAvg combines otherwise.
    """

    def __init__(
        self,
        *args: Any,
        secure: SecureAggregation | None = None,
        most_examples: int = 2**24,
        seed: int = 0,
        **options: Any,  # of Flower's class, which has others in another version
    ) -> None:
        super().__init__(*args, **options)
        self.secure, self.most_examples, self.seed = secure or SecureAggregation(), most_examples, seed
        self.settings = shared_sums(self.secure, type(self).__name__)
        if self.fraction_evaluate not in (0.0, self.fraction_train):
            raise ParameterError(
                f"fraction_evaluate is {self.fraction_evaluate}; expected 0 or fraction_train, {self.fraction_train}"
            )

    def start(self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int = 3, *args: Any, **options: Any) -> Result:
        """Execute the strategy, as Flower's class does. Raises `moretta.errors.RunFailed` if sums cannot continue."""
        log.parent = logging.getLogger("flwr")  # shown beside Flower's own log
        return super().start(SummingGrid(grid, self, num_rounds), initial_arrays, num_rounds, *args, **options)


class SummingGrid:
    """A Grid that gives a strategy one reply, all clients' mean. Other calls pass to Flower's Grid."""

    def __init__(self, grid: Grid, strategy: SecureFedAvg, rounds: int) -> None:
        self._grid, self._strategy, self._phases = grid, strategy, rounds
        self._phases *= (strategy.fraction_train > 0) + (strategy.fraction_evaluate > 0)
        self._rounds: Iterator[RoundEnd] | None = None
        self._delivery: GridDelivery
        self._server: SumServer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes; after the first sum, as many as a strategy waits for, because the driver chooses nodes."""
        own = self._strategy
        enough = max(own.min_available_nodes, own.min_train_nodes, own.min_evaluate_nodes)
        return (
            self._grid.get_node_ids() if self._rounds is None else range(1, 1 + max(enough, len(self._delivery.known)))
        )

    def send_and_receive(
        self, messages: Iterable[FlowerMessage], *, timeout: float | None = None
    ) -> Iterable[FlowerMessage]:
        """Carry out the secure sum that these messages request; return one reply with its means, or none."""
        asked = list(messages)
        if not asked:
            return []
        try:
            self._rounds = self._rounds or self._begin()
            self._server.arrays = _sent(asked[0])
            self._delivery.question, self._delivery.timeout = asked[0], timeout
            end, total = next(self._rounds), self._server.total
        except MorettaError as error:
            log.error("%s", error)
            raise
        if end.lost or total is None:
            return []
        for dropout in end.dropped:
            if dropout.silo not in total.silos:
                log.warning("this sum is without `%s`: %s", dropout.silo, dropout.reason)
        log.info("summed %d clients of %d", len(total.silos), len(end.cohort))
        return [FlowerMessage(self._reply(total), reply_to=asked[0])]

    def _begin(self) -> Iterator[RoundEnd]:
        """Ask nodes for their names, and return the rounds that a driver carries out with them."""
        strategy, settings = self._strategy, self._strategy.secure
        run = fresh_run(roster := settings.load_roster())
        self._delivery = delivery = GridDelivery(self._grid, run, roster)
        silos = delivery.silos if roster is None else sorted(roster.keys)
        count = min(len(silos), max(int(len(silos) * strategy.fraction_train), strategy.min_train_nodes))
        players = Participation(tuple(silos), count, strategy.seed)
        rules = settings.rules(roster, players)
        rules.check(count)
        about = {"silos": players.silos, "count": count, "seed": strategy.seed, "weighted_by": strategy.weighted_by_key}
        about |= {"settings": strategy.settings, "most_weight": strategy.most_examples}
        delivery.terms = SumTerms(stamp=Stamp(run, 0, 0), **about)
        delivery.known = silos
        self._server = SumServer(settings, delivery.terms.bound_to(rules), strategy.most_examples)
        server, over = cast(Server, self._server), cast(Delivery, delivery)
        chosen = None if count == len(silos) else players.of_round
        return Driver(server, silos, run, over, rules.least("pairwise"), chosen, only=True).rounds(1, self._phases)

    def _reply(self, total: Sum) -> RecordDict:
        layouts = Counter(tuple(sorted(self._delivery.names[silo].metrics.items())) for silo in total.silos)
        metrics, slots = MetricRecord(), iter(total.means[METRICS].tolist())
        for name, width in max(layouts, key=layouts.__getitem__):
            metrics[name] = [next(slots) for _ in range(width)] if width else next(slots)
        metrics[self._strategy.weighted_by_key] = total.weight
        reply = RecordDict({"metrics": metrics})
        if sent := self._server.arrays:
            means = {name: as_summed(total.means[ARRAY + name], np.dtype(array.dtype)) for name, array in sent.items()}
            reply["arrays"] = ArrayRecord({name: Array(mean) for name, mean in means.items()})
        return reply


def _sent(asked: FlowerMessage) -> ArrayRecord:
    """Return the arrays that silos train and return; empty for an evaluation."""
    trains = asked.metadata.message_type == MessageType.TRAIN
    return next(iter(asked.content.array_records.values())) if trains else ArrayRecord()


class SumServer:
    """The server's role: one sum a round.

    Attributes:
        arrays: The arrays that silos train and return.
        total: The sum of the last round; None without one.
    """

    def __init__(self, settings: SecureAggregation, rules: Rules, most_weight: int) -> None:
        self._settings, self._most_weight = settings, most_weight
        self._sum = KeyedAggregator(PAIRWISE, Ring(settings.ring_bits), rules)
        self.arrays = ArrayRecord()
        self.total: Sum | None = None

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Agree on keys."""
        return self._sum.setup(now, cohort)

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Sum the arrays and the metrics."""
        self.total = None
        most, whole = self._settings.largest, WHOLE_LIMITS[self._settings.ring_bits]
        shapes, limits = {METRICS: (SLOTS,)}, {METRICS: max(most, METRIC_LIMIT)}
        for name, array in self.arrays.items():
            shapes[ARRAY + name] = tuple(array.shape)
            limits[ARRAY + name] = max(most, whole) if np.dtype(array.dtype).kind in "iu" else most
        request = self._sum.want(shapes, limits, self._most_weight)
        total = yield from self._sum.sum(AskSum(stamp=now, encoding=request.fraction_bits), request)
        if isinstance(total, Aborted):
            return total
        if total.weight >= self._most_weight:
            raise RunFailed(
                f"all clients' examples together are {self._most_weight} or more, expected fewer; raise most_examples "
                "of SecureFedAvg"
            )
        self.total = total
        return Report({})


class GridDelivery:
    """Delivers asks over a grid to silos by their names, at any node (`moretta.engines.delivery`).

    Attributes:
        known: The silos that may take part; empty for all.
        terms: The terms of the run's sums.
        question: The content beside an `AskSum`; None without one.
        timeout: The seconds for each answer; None waits without limit.
        names: The names of metrics in each silo's last upload.
    """

    def __init__(self, grid: Grid, run: str, roster: Roster | None) -> None:
        self.clock = Clock()
        self._grid, self._run = grid, run
        self.known: Collection[str] = () if roster is None else roster.keys
        self._nodes, self._before = dict[str, int](), dict[str, int]()  # of present and earlier silos
        self._asked = dict[int, str]()  # nodes' own names
        self._renewed = False
        self.terms: SumTerms
        self.question: FlowerMessage | None = None
        self.timeout: float | None = HELLO
        self.names = dict[str, UploadNames]()
        self._look()

    @property
    def silos(self) -> list[str]:
        """The connected silos, sorted."""
        return sorted(self._nodes)

    def deliver(self, ask: Ask) -> Replies:
        """Send each silo its message."""
        there = {silo: message for silo, message in ask.messages.items() if silo in self._nodes}
        records = {id(message): self._record(message) for message in there.values()}
        answers = self._exchanged({self._nodes[silo]: records[id(message)] for silo, message in there.items()})

        def answer(silo: str, message: Message) -> Message | Missing:
            came = answers.get(self._nodes.get(silo, 0), _GONE if silo not in there else _LATE)
            if isinstance(came, Missing):
                return came
            reply = valid(silo, ask, message, came[0])
            if isinstance(reply, MaskedUpload):
                if not isinstance(came[-1], UploadNames):
                    return Missing(Reason.MALFORMED, "its upload came without the names of its metrics")
                self.names[silo] = came[-1]
            return reply

        replies = replies_of(ask, answer)
        if ask.reply is MaskedUpload:
            self._compare_metrics(replies)
        return replies

    def back(self, silos: Sequence[str], least: int) -> Sequence[str]:
        """Wait until at least `least` of these silos answer."""
        until = time.monotonic() + WAIT
        while True:
            self._look(again=silos)
            there = [silo for silo in silos if silo in self._nodes]
            if len(there) >= least or time.monotonic() > until:
                return there
            time.sleep(STEP)

    def away(self, silos: Sequence[str]) -> Mapping[str, Missing]:
        """Return the silos without a connected node."""
        self._look()
        return {silo: _GONE for silo in silos if silo not in self._nodes}

    def renewed(self) -> bool:
        """Return whether a silo is at another node than before, as after a restart."""
        renewed, self._renewed = self._renewed, False
        return renewed

    def _record(self, message: Message) -> RecordDict:
        if isinstance(message, AdvertiseKey | AdvertiseCommitted):
            return RecordDict({RECORD: packed(replace(self.terms, stamp=message.stamp), message)})
        with_it = self.question.content if isinstance(message, AskSum) and self.question is not None else {}
        return RecordDict({**with_it, RECORD: packed(message)})

    def _exchanged(self, contents: Mapping[int, RecordDict]) -> dict[int, list[Message] | Missing]:
        """Return each node's answer to its content: one or more messages, or the reason of their absence."""
        kind = MessageType.TRAIN if self.question is None else self.question.metadata.message_type
        sent = [FlowerMessage(content, node, kind) for node, content in contents.items()]
        replies = self._replies(sent) if sent else []
        asked = {
            message.metadata.message_id: message.metadata.dst_node_id for message in sent
        }  # of a node that is gone, others reply
        return {asked[reply.metadata.reply_to_message_id]: _heard(reply) for reply in replies}

    def _replies(self, sent: Sequence[FlowerMessage]) -> list[FlowerMessage]:
        """Send messages and return the replies, as `send_and_receive` of a grid.

        That looks for replies every 0.1 or 3 seconds. Here the next look follows after a twentieth of the elapsed time.
        """
        waits, began, replies = set(filter(None, self._grid.push_messages(sent))), time.monotonic(), []
        while waits and (self.timeout is None or time.monotonic() - began < self.timeout):
            more = list(self._grid.pull_messages(waits))
            replies += more
            waits.difference_update(reply.metadata.reply_to_message_id for reply in more)
            if waits:
                time.sleep(min(max((time.monotonic() - began) / 20, SOONEST), LATEST))
        return replies

    def _compare_metrics(self, replies: Replies) -> None:
        """Log uploads with other metrics than most: their masks differ, so the sum leaves them out."""
        metrics = {silo: tuple(sorted(self.names[silo].metrics)) for silo in replies.answers if silo in self.names}
        [(most, _)] = Counter(metrics.values()).most_common(1) or [((), 0)]
        for silo in (silo for silo in metrics if metrics[silo] != most):
            log.warning("the app of `%s` returns the metrics %s, and most others' %s", silo, metrics[silo], most)

    def _look(self, again: Collection[str] = ()) -> None:
        """Ask new nodes for their names, and forget those that have gone. again: silos to ask once more."""
        connected = set(self._grid.get_node_ids())
        asked = {node: name for node, name in self._asked.items() if node in connected and name not in again}
        hello = RecordDict({RECORD: packed(AskName(stamp=Stamp(self._run, 0, 0)))})
        new = dict.fromkeys(connected - asked.keys(), hello)
        for node, came in self._exchanged(new).items():
            if not isinstance(came, Missing) or came.reason is not Reason.DISCONNECTED:
                asked[node] = self._name_of(node, came)
        uses = Counter(filter(None, asked.values()))
        for name in sorted(name for name in uses if uses[name] > 1 and asked != self._asked):
            nodes = sorted(node for node, called in asked.items() if called == name)
            log.warning("nodes %s all call themselves `%s`, so none of them takes part; stop all but one", nodes, name)
        there = {name: node for node, name in asked.items() if uses[name] == 1}
        self._renewed |= any(self._before.get(name, node) != node for name, node in there.items())
        self._nodes, self._asked, self._before = there, asked, {**self._before, **there}

    def _name_of(self, node: int, came: list[Message] | Missing) -> str:
        """Return the name of the silo at a node; empty, with a sentence in the log, if it takes no part."""
        if isinstance(came, Missing) or not isinstance(came[0], SiloName):
            why = came.detail if isinstance(came, Missing) else f"expected its name, got `{came[0].TAG}`"
        elif self.known and came[0].name not in self.known:
            why = f"its name `{came[0].name}` is not in the roster, or was not connected when the run began"
        else:
            return came[0].name
        log.warning("node %d takes no part: %s", node, why)
        return ""


_GONE = Missing(Reason.DISCONNECTED, "no node of it is connected")
_LATE = Missing(Reason.LATE, "no answer came in time")


def _heard(reply: FlowerMessage) -> list[Message] | Missing:
    """Return the messages of a reply, one or more, or the reason of their absence."""
    if reply.has_error():
        away = reply.error.code in AWAY
        return Missing(Reason.DISCONNECTED if away else Reason.REFUSED, str(reply.error.reason)[:MOST_TOLD])
    try:
        return unpacked(reply.content) or _IN_THE_CLEAR
    except PeerError as error:
        return Missing(Reason.MALFORMED, str(error))


_IN_THE_CLEAR = Missing(
    Reason.MALFORMED, "its reply holds no message of a secure sum, and was dropped; has the app secure_sum() as a mod?"
)
