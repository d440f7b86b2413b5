"""A site's half: the mod that answers the secure sum's messages, and uploads the results of the app's functions."""

import hashlib
import json
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, MessageType, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.constant import ErrorCode

from moretta.config import silo_file
from moretta.config.silo_file import SiloFile, SiloSection
from moretta.contract.messages import Message, Spent, Tensors
from moretta.deployment.flower.messages import ARRAY, CODEC, METRICS, SLOTS, AskName, SiloName, SumTerms, UploadNames
from moretta.deployment.flower.records import RECORD, packed, question_digest, unpacked
from moretta.deployment.site_policy import permitted_sums
from moretta.engines.folder_lock import held
from moretta.errors import MorettaError, ParameterError, PeerError, PolicyError, RowsError, SumSpent, disclosed
from moretta.secure_aggregation.agreement import AdvertiseKey, Agreement
from moretta.secure_aggregation.cohort import Credentials, Origin, Participation, Rules
from moretta.secure_aggregation.encoding import MOST_WEIGHT, Ring, shapes_of
from moretta.secure_aggregation.graph import AdvertiseCommitted
from moretta.secure_aggregation.keyed_sums import KeyedContributor
from moretta.secure_aggregation.keystream import KEY_BYTES, SecretRoot, encode_parts
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.pairwise import PAIRWISE
from moretta.secure_aggregation.secure_sum import AskSum
from moretta.secure_aggregation.settings import SecureAggregation
from moretta.secure_aggregation.sums import Query, message_digest, query_of

FOLDER = "moretta"  # the key of --node-config that names the site's silo.toml
SIMULATED = "partition-id"  # the key by which a simulation counts its nodes
LOCK, HELD = "flower.json", "{folder} is in use by {holder}; give each SuperNode a silo.toml of its own"
KINDS = (MessageType.TRAIN, MessageType.EVALUATE)

log = logging.getLogger("flwr")  # the log that operators of a SuperNode read


def secure_sum() -> Mod:
    """Return the mod that sums the results of a ClientApp's functions in secret: ``ClientApp(mods=[...])``.

    The server needs `SecureFedAvg`. The mod refuses questions of any other strategy, so nothing is sent in the clear. A
    SuperNode names its silo.toml by ``--node-config 'moretta="silo.toml"'``; nodes of a simulation need no file.
    Functions registered by ``@app.query()`` stay as they are.
    """
    return _mod


def _mod(message: FlowerMessage, context: Context, call_next: ClientAppCallable) -> FlowerMessage:
    if message.metadata.message_type.partition(".")[0] not in KINDS:
        return call_next(message, context)
    try:
        with _site(context) as site:
            answers = site.answer(message, context, call_next)
        return FlowerMessage(RecordDict({RECORD: packed(*answers)}), reply_to=message)
    except MorettaError as error:
        return FlowerMessage(Error(ErrorCode.MOD_FAILED_PRECONDITION, disclosed(error, log)), reply_to=message)


@dataclass(repr=False)
class Memory:
    """A site's memory between two messages, in Flower's `context.state`: secret, and never on disk.

    Args:
        root: of the keys of the last set-up.
        heard: its messages, the terms first.
        upload_root: of the secrets of the last upload.
        ask, asked, shapes: the question that this upload answered.
        opened: the messages that asked to open its sum.
        helped: the record of sums of a site without a folder, in a simulation.
    """

    root: bytes = b""
    heard: list[bytes] = field(default_factory=list)
    upload_root: bytes = b""
    ask: bytes = b""
    asked: bytes = b""
    shapes: str = ""
    opened: list[bytes] = field(default_factory=list)
    helped: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, context: Context) -> "Memory":
        """Return the memory in a context."""
        record = context.state.get(RECORD)
        return cls(**record) if isinstance(record, ConfigRecord) else cls()

    def keep(self, context: Context) -> None:
        """Keep it for the next message."""
        context.state[RECORD] = ConfigRecord({key: value for key, value in vars(self).items() if value})


class KeptAgreements:
    """The seeds of silos' last set-ups, so that a process need not agree again for each message: secret, in memory.

    An agreement never changes, so a role made with it equals one made from the messages. Its key is a digest of all
    that it follows from. Actions that may happen once are recorded elsewhere, by each role.

    Args:
        most: The largest number of agreements to keep.
    """

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, OrderedDict[tuple[str, str], tuple[bytes, Agreement]]()

    def find(self, run: str, silo: str, digest: bytes) -> Agreement | None:
        """Return the agreement of a silo's root and messages of a run; forget it, and return None, for others."""
        last = self._kept.pop((run, silo), None)
        if last is None or last[0] != digest:
            return None
        self._kept[run, silo] = last
        return last[1]

    def keep(self, run: str, silo: str, digest: bytes, agreement: Agreement | None) -> None:
        """Keep the result of a set-up, and forget the least recently used. None: it is not complete."""
        if agreement is not None:
            self._kept[run, silo] = digest, agreement
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def __repr__(self) -> str:
        return f"KeptAgreements({len(self._kept)} of {self._most}, <redacted>)"


_AGREEMENTS = KeptAgreements(128)


class FlowerSite:
    """A silo's role for one message, made anew from its memory.

    Args:
        file: The silo's silo.toml.
        helped: The sums that it has helped to open.
    """

    def __init__(self, file: SiloFile, memory: Memory, helped: HelpedSums) -> None:
        self._file, self._memory, self._helped = file, memory, helped
        self._name, keys = file.silo.name, file.with_keys(SecureAggregation())
        self._credentials = Credentials.of(self._name, keys.identity_of(self._name), keys.load_roster())

    def answer(self, message: FlowerMessage, context: Context, call_next: ClientAppCallable) -> list[Message]:
        """Answer a message, by training if requested. Raises `moretta.errors.MorettaError` to refuse."""
        asks = unpacked(message.content)
        try:
            match asks:
                case [AskName(stamp=now)]:
                    return [SiloName(stamp=now, name=self._name)]
                case [SumTerms() as terms, AdvertiseKey() | AdvertiseCommitted() as begin]:
                    return [self._set_up(terms, begin)]
                case [AdvertiseKey() | AdvertiseCommitted()]:
                    raise PeerError("expected the terms of the run with the message that begins a set-up")
                case [AskSum() as ask]:
                    return self._upload(ask, message, context, call_next)
                case [one]:
                    return [self._go_on(one)]
        except SumSpent as spent:
            stamp, take = asks[-1].stamp, spent.next_take
            return [Spent(stamp=stamp, next_take=take, survivors=spent.survivors, whole=spent.whole)]
        raise PolicyError(
            "the server asks for a reply in the clear, which this app's moretta.flower.secure_sum() refuses; use "
            "moretta.flower.SecureFedAvg in the ServerApp"
        )

    def _set_up(self, terms: SumTerms, begin: Message) -> Message:
        memory, before = self._memory, [CODEC.decode(data).stamp for data in self._memory.heard[1:2]]
        self._agreed(terms)
        if not self._helped.answers.hold(terms.stamp.run, "terms", message_digest(terms)):
            raise PolicyError("expected the terms of this run's first set-up, got others; begin another run for them")
        if any(begin.stamp.run == stamp.run and begin.stamp <= stamp for stamp in before):
            raise PeerError(f"expected a set-up after {before[0]}, got {begin.stamp}")
        memory.root, memory.heard = os.urandom(KEY_BYTES), [CODEC.encode(terms)]
        memory.ask, memory.opened = b"", []
        return self._go_on(begin)

    def _go_on(self, asks: Message) -> Message:
        role, memory = self._role(self._terms()), self._memory
        answer = role.answer(asks)
        if answer is None:
            raise PeerError(f"expected a message of a secure sum, got `{asks.TAG}`")
        (memory.opened if memory.ask else memory.heard).append(CODEC.encode(asks))
        return answer

    def _upload(
        self, ask: AskSum, message: FlowerMessage, context: Context, call_next: ClientAppCallable
    ) -> list[Message]:
        memory, terms = self._memory, self._terms()
        role = self._role(terms, reopens=False)
        if memory.ask and ask.stamp <= (before := CODEC.decode(memory.ask).stamp):
            raise PeerError(f"expected to be asked for an upload after {before}, got {ask.stamp}")
        if ask.encoding.get(MOST_WEIGHT) != terms.most_weight:
            raise PeerError(f"expected an encoding for {terms.most_weight} examples, as in the terms of this run")
        kind = message.metadata.message_type.partition(".")[0]
        del message.content[RECORD]
        asked, sent = question_digest(message, context), _arrays(message.content)
        reply = _replied(message, context, call_next)
        tensors, weight, names = taken(reply, sent if kind == MessageType.TRAIN else None, terms)
        query = query_of(ask, asked, message_digest(names), whole=True)
        memory.upload_root = os.urandom(KEY_BYTES)
        upload = role.upload(
            ask.stamp, tensors, weight, ask.encoding, asked=query, origin=self._origin(memory.upload_root)
        )
        memory.ask, memory.asked, memory.opened = CODEC.encode(ask), query.digest, []
        memory.shapes = json.dumps(shapes_of(tensors))
        return [upload, names]

    def _role(self, terms: SumTerms, *, reopens: bool = True) -> KeyedContributor:
        """Return the silo's half of the sums after the last message, from roots and messages.

        reopens: whether the last upload's sum may still be opened.
        """
        memory = self._memory
        settings, rules = self._agreed(terms)
        origin, run = self._origin(memory.root), terms.stamp.run
        roster = "" if rules.roster is None else rules.roster.digest
        digest = hashlib.sha256(encode_parts(self._name, roster, memory.root, *memory.heard)).digest()
        kept = _AGREEMENTS.find(run, self._name, digest)
        role = KeyedContributor(PAIRWISE, self._name, Ring(settings.ring_bits), rules, origin, self._helped, run, kept)
        if kept is None:
            for data in memory.heard[1:]:
                role.answer(CODEC.decode(data))
            _AGREEMENTS.keep(run, self._name, digest, role.agreement)
        if not reopens:
            return role
        if memory.ask:
            ask: Any = CODEC.decode(memory.ask)
            shapes = {name: tuple(shape) for name, shape in json.loads(memory.shapes).items()}
            query, origin = Query(memory.asked, whole=True), self._origin(memory.upload_root)
            role.reopen(ask.stamp, shapes, ask.encoding, query, origin)
        for data in memory.opened:
            role.answer(CODEC.decode(data))
        return role

    def _terms(self) -> SumTerms:
        if not self._memory.heard:
            raise PeerError("expected a set-up before this; this process has none, as after a restart")
        terms: Any = CODEC.decode(self._memory.heard[0])
        return cast(SumTerms, terms)

    def _agreed(self, terms: SumTerms) -> tuple[SecureAggregation, Rules]:
        players = Participation(terms.silos, terms.count, terms.seed)
        settings = permitted_sums(terms.settings, players, self._file)
        rules = settings.rules(None if self._credentials is None else self._credentials.roster, players)
        return settings, terms.bound_to(rules)

    def _origin(self, root: bytes) -> Origin:
        return Origin(self._credentials, SecretRoot(root))


@contextmanager
def _site(context: Context) -> Iterator[FlowerSite]:
    """Make the silo's role for one message, lock its folder, and keep what it needs for the next one."""
    memory = Memory.of(context)
    try:
        file = silo_of(context)
        if FOLDER in context.node_config:
            with held(file.out, LOCK, HELD):
                yield FlowerSite(file, memory, file.helped.begin(begun=bool(memory.heard)).opened)
        elif _simulated():
            helped = HelpedSums(memory.helped, lambda line, force: memory.helped.append(line))
            yield FlowerSite(file, memory, helped)
        else:
            raise PolicyError(
                "this SuperNode names no silo.toml, whose folder keeps the site's records; start it with "
                f"--node-config '{FOLDER}=\"silo.toml\"'"
            )
    finally:
        memory.keep(context)


def silo_of(context: Context) -> SiloFile:
    """Return the silo.toml that a node names; without one, settings of a silo named by the node's number."""
    if (named := context.node_config.get(FOLDER)) is not None:
        return silo_file.load(str(named), rows=False)
    return SiloFile(silo=SiloSection(name=f"silo-{context.node_config.get(SIMULATED, context.node_id)}"))


def _simulated() -> bool:
    """Return whether this process is an actor of Flower's simulation, which has all nodes on one machine."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _replied(message: FlowerMessage, context: Context, call_next: ClientAppCallable) -> RecordDict:
    """Return the result of the app's own function. Its errors may quote rows, and stay here."""
    try:
        reply = call_next(message, context)
        return reply.content
    except Exception as error:  # an app may raise anything
        log.exception("Moretta: the app's %s function failed", message.metadata.message_type)
        raise RowsError(f"the app's function failed with {type(error).__name__}") from error


def _arrays(content: RecordDict) -> ArrayRecord:
    records = list(content.array_records.values())
    if len(records) != 1:
        raise ParameterError(f"expected one ArrayRecord, got {len(records)}")
    return records[0]


def taken(content: RecordDict, sent: ArrayRecord | None, terms: SumTerms) -> tuple[Tensors, int, UploadNames]:
    """Return an app's contribution to a sum: its tensors, the number of its examples, and metrics' names.

    Args:
        sent: The arrays that the app received, whose names, shapes and kinds its own must have. None if only metrics
            count.

    Raises:
        PolicyError: The app's arrays or metrics have another form, which the server would see.
        RowsError: The number of examples is not a whole number of at least 1.
    """
    tensors = {} if sent is None else _like(sent, _arrays(content))
    records = list(content.metric_records.values())
    if len(records) != 1 or terms.weighted_by not in records[0]:
        raise PolicyError(f"expected one MetricRecord in the app's reply, with the key `{terms.weighted_by}`")
    metrics = dict(records[0])
    weight = metrics.pop(terms.weighted_by)
    if isinstance(weight, list) or not np.isfinite(weight) or weight != int(weight) or weight < 1:
        raise RowsError(f"`{terms.weighted_by}` is {weight!r:.40}; expected a whole number, 1 or more")
    if weight > terms.most_weight:  # a silo that refused would show its own number to who tries bounds
        log.warning(
            "Moretta: `%s` counts as %d, the most of all silos together, at which the server ends the run; raise "
            "SecureFedAvg(most_examples=...)", terms.weighted_by, terms.most_weight
        )  # fmt: skip
        weight = terms.most_weight
    widths = {name: len(value) if isinstance(value, list) else 0 for name, value in sorted(metrics.items())}
    if empty := [name for name, value in metrics.items() if value == []]:
        raise PolicyError(f"expected numbers as metrics of the app's reply; `{empty[0]:.40}` is an empty list")
    names = UploadNames(stamp=terms.stamp, metrics=widths)
    slots = np.zeros(SLOTS)
    slots[: names.slots] = [number for name in widths for number in np.atleast_1d(metrics[name])]
    return {**tensors, METRICS: slots}, int(weight), names


def _like(sent: ArrayRecord, own: ArrayRecord) -> dict[str, Any]:
    if different := sorted(sent.keys() ^ own.keys()):
        raise PolicyError(f"expected the arrays that were sent back from the app; {different!r:.200} differ")
    tensors = {}
    for name, array in sent.items():
        for what, expected, got in (
            ("shape", tuple(array.shape), tuple(own[name].shape)),
            ("kind of numbers", np.dtype(array.dtype).kind, np.dtype(own[name].dtype).kind),
        ):
            if expected != got:
                raise PolicyError(
                    f"`{name}`: expected the {what} that was sent, {expected!r}, from the app; got {got!r}"
                )
        tensors[ARRAY + name] = own[name].numpy()
    return tensors
