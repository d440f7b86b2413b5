"""Nodes of a Flower run in this process: each has an app, and the context that Flower hands on between its messages.

Contents and contexts pass through Flower's own serialisation, and each message meets an app that was made anew, as a
SuperNode starts a process for each. What Flower's processes do beside that is tested with these themselves
(`test_flower_processes.py`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import context_from_proto, context_to_proto, recorddict_from_proto, recorddict_to_proto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.supercore.task_identity import TaskIdentity

from moretta import flower
from moretta.secure_aggregation.identity import Identity, public_line

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1  # of the process of a ServerApp
WEIGHTS = np.linspace(-1.0, 1.0, 12, dtype="f4").reshape(3, 4)
Train = Callable[[Message, Context], Message]
Watch = Callable[["Nodes", int, Message], bool]  # whether a message arrives


def app(train: Train, evaluate: Train | None = None, *, secure: bool = True) -> Callable[[], ClientApp]:
    """Return what makes an app of these functions."""

    def made() -> ClientApp:
        client = ClientApp(mods=[flower.secure_sum()] if secure else [])
        client.train()(train)
        client.evaluate()(evaluate or train)
        return client

    return made


def reply(message: Message, arrays: Mapping[str, Any] | None, **metrics: Any) -> Message:
    """Return a reply as apps make it."""
    records: dict[str, Any] = {"metrics": MetricRecord({name.replace("_", "-"): one for name, one in metrics.items()})}
    if arrays is not None:
        records["arrays"] = ArrayRecord({name: Array(np.asarray(one)) for name, one in arrays.items()})
    return Message(RecordDict(records), reply_to=message)


def steps(message: Message, context: Context) -> Message:
    """Move the weights by what this node has: the k-th of them has 10 + k examples."""
    k, arrays = int(context.node_config["k"]), {name: one.numpy() for name, one in message.content["arrays"].items()}
    if message.metadata.message_type == "evaluate":
        return reply(message, None, score=0.25 * k, num_examples=10 + k)
    moved = {"w": arrays["w"] * np.float32(0.5) + np.float32(k), "seen": arrays["seen"] + 1}
    return reply(message, moved, loss=1.0 / (k + 1), by_class=[0.5, float(k)], num_examples=10 + k)


def start() -> ArrayRecord:
    """Return weights and a counter, as a model with batch normalisation has both."""
    return ArrayRecord({"w": Array(WEIGHTS), "seen": Array(np.asarray(3))})


def folders(path: Path, *names: str, roster: bool = True, more: str = "") -> dict[str, Path]:
    """Make a silo.toml for each name, in a folder of its own, with an identity and a common roster."""
    found = {}
    entries = ""
    for name in names:
        (path / name).mkdir(parents=True)
        text = f'[silo]\nname = "{name}"\n'
        if roster:
            identity = Identity.fresh()
            identity.save(path / name / "key")
            entries += f'[[silo]]\nname = "{name}"\nkey = "{public_line(identity.public_key)}"\n'
            text += 'identity = "key"\nroster = "../roster.toml"\n'
        (path / name / "silo.toml").write_text(text + more)
        found[name] = path / name / "silo.toml"
    if roster:
        (path / "roster.toml").write_text(entries)
    return found


class Nodes:
    """A Grid of nodes in this process.

    watch: is shown each message to a node, and says whether it arrives; a node that is gone answers as Flower's
    SuperLink does in its place. told: the errors that nodes sent.
    """

    def __init__(
        self, folders: Iterable[Path | None], app: Callable[[], ClientApp], watch: Watch | None = None
    ) -> None:
        self._ids, self._numbers, self.watch = itertools.count(1001), itertools.count(), watch
        self.apps, self.contexts = dict[int, Callable[[], ClientApp]](), dict[int, bytes]()
        self.configs = dict[int, dict[str, Any]]()
        self.gone, self.told, self.sent, self.bytes = set[int](), list[str](), list[tuple[int, Message]](), [0, 0]
        self.replies, self._answers = list[Message](), dict[str, Message]()
        self.nodes = [self.add(folder, app, k) for k, folder in enumerate(folders)]

    def add(self, folder: Path | None, app: Callable[[], ClientApp], k: int) -> int:
        """Connect a node; without a folder, as a simulation has them."""
        node = next(self._ids)
        self.configs[node] = {"partition-id": k} if folder is None else {"moretta": str(folder)}
        self.configs[node] |= {"k": k}
        self.apps[node] = app
        self.configure(node)
        return node

    def configure(self, node: int, **config: Any) -> None:
        """Give a node a run's configuration, as the SuperLink does."""
        context = Context(7, node, self.configs[node], RecordDict(), config)
        self.contexts[node] = context_to_proto(context).SerializeToString()

    def context(self, node: int) -> Context:
        """Return what Flower keeps for a node."""
        return context_from_proto(ContextProto.FromString(self.contexts[node]))

    def get_node_ids(self) -> list[int]:
        return sorted(self.apps.keys() - self.gone)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return list(self.pull_messages(self.push_messages(messages)))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Have nodes answer; return the ids of what is answered."""
        answers = [one for one in map(self._answered, messages) if one is not None]
        self._answers |= {one.metadata.reply_to_message_id: one for one in answers}
        return [one.metadata.reply_to_message_id for one in answers]

    def pull_messages(self, ids: Iterable[str]) -> list[Message]:
        """Return the answers that are there."""
        return [self._answers.pop(one) for one in list(ids) if one in self._answers]

    def _answered(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = f"asked {next(self._numbers)}"  # as Flower's grids do
        arrives = self.watch is None or self.watch(self, node, message)
        if node in self.gone:
            found = Message(Error(ErrorCode.NODE_UNAVAILABLE, "Error: Node Unavailable"), reply_to=message)
            found.metadata.__dict__["_src_node_id"] = 1  # it is the SuperLink's
            return found
        if not arrives:
            return None
        self.sent.append((node, message))
        context = self.context(node)
        wire = recorddict_to_proto(message.content)
        self.bytes[0] += wire.ByteSize()
        there = Message(recorddict_from_proto(wire), node, message.metadata.message_type)
        there.metadata.__dict__["_message_id"] = "asked"
        there.metadata.__dict__["_group_id"] = message.metadata.group_id
        try:
            answer = self.apps[node]()(there, context)
        except Exception as error:  # as Flower's own process for an app does
            logging.getLogger("flwr").exception("ClientApp raised an exception")
            answer = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=there)
        self.contexts[node] = context_to_proto(context).SerializeToString()
        if answer.has_error():
            self.told.append(answer.error.reason)
            return Message(answer.error, reply_to=message)
        wire = recorddict_to_proto(answer.content)
        self.bytes[1] += wire.ByteSize()
        self.replies.append(Message(recorddict_from_proto(wire), reply_to=message))
        return self.replies[-1]
