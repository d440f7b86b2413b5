"""Small grids of silos, runs of CGD on them that a test can see into, and Algorithm 2 as its box has it, in float64."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cast
import numpy as np
import torch
from cast import Wrap
from networks import seeded
from numpy.typing import NDArray
from torch import nn

from moretta import CGD, Engine, Federation, SecureAggregation, Silo
from moretta.contract.messages import Array, Message, Tensors
from moretta.contract.roles import Client
from moretta.protocols.cgd.client import Client as Participant
from moretta.protocols.cgd.group_keys import group_of
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.roles import Roles
from moretta.run.result import Result
from moretta.secure_aggregation.keyed_sums import Contributor

CLASSES = 3
SEED = 3
FIRST = "0.weight"  # of `network`, whose columns are split


def table(rows: int, columns: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rows of three classes that can be learnt, in columns of different scales."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, CLASSES, rows)
    centers = np.random.default_rng(99).normal(0, 1, (CLASSES, columns))
    return centers[y] + generator.normal(0, 0.7, (rows, columns)), y


def grid(
    rows: Sequence[int],
    columns: Sequence[int],
    *,
    joint: bool = True,
    holders: int | Sequence[int] = 0,
    order: Sequence[int] | None = None,
    ids: bool = False,
) -> list[Silo]:
    """Silos that hold so many rows and so many columns each; one column part is a split by rows alone.

    holders: which column part has the labels, from 0, for all rows of the grid or for each; without `joint` everybody
    has. order: of the columns among the parts, so that no part need hold neighbours.
    """
    x, y = table(sum(rows), sum(columns))
    cuts = np.split(np.arange(sum(columns)) if order is None else np.array(order), np.cumsum(columns)[:-1])
    silos = []
    for i, index in enumerate(np.split(np.arange(sum(rows)), np.cumsum(rows)[:-1])):
        for j, cut in enumerate(cuts):
            if len(columns) == 1:
                silos.append(Silo(f"silo-{i}", x[index], y[index]))
                continue
            labelled = not joint or j == (holders if isinstance(holders, int) else holders[i])
            names = np.array([f"person-{number}" for number in index]) if ids else None
            own = tuple(int(column) for column in cut)
            silos.append(
                Silo(
                    f"silo-{i}-{j}",
                    x[index][:, cut],
                    y[index] if labelled else y[:0],
                    f"row-{i}",
                    own,
                    names,
                    aligned=not ids,
                )
            )
    return silos


def network(columns: int, hidden: Sequence[int] = (7, 5), *, bias: bool = True) -> nn.Sequential:
    """An N-layer network with smooth activations: without kinks, rounding stays rounding."""
    with seeded():
        sizes = [columns, *hidden]
        layers: list[nn.Module] = []
        for size, following in itertools.pairwise(sizes):
            layers += [nn.Linear(size, following, bias=bias), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], CLASSES, bias=bias))


def columns_of(silos: Sequence[Silo]) -> int:
    row = [silo for silo in silos if silo.row == silos[0].row]
    return sum(len(silo.columns) for silo in row) if silos[0].columns else silos[0].x.shape[1]


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a run came to, with what only a test may see: confined models before and after, D, and all roles."""

    result: Result
    players: Roles
    starts: Mapping[str, Tensors]
    models: Mapping[str, Tensors]
    displacement: Tensors

    @property
    def dropped(self) -> list[tuple[int, str]]:
        return [(one["round"], one["silo"]) for one in self.result.record["dropped"]]


@dataclass
class Seen:
    """What `watched` saw: clients' answers by silo, and what was asked, in order."""

    messages: list[tuple[str, Message, Message | None]] = field(default_factory=list)

    def asked(self, kind: type[Message]) -> Iterator[tuple[str, Any]]:
        return ((silo, ask) for silo, ask, _ in self.messages if isinstance(ask, kind))

    def answered(self, kind: type[Message]) -> Iterator[tuple[str, Any]]:
        return ((silo, answer) for silo, _, answer in self.messages if isinstance(answer, kind))


def make(
    silos: Sequence[Silo], protocol: CGD | None = None, model: nn.Module | None = None, **settings: Any
) -> Federation:
    """A federation in float64, with strict messages and an insecure secret seed unless settings say otherwise."""
    protocol = protocol or CGD(delta=(0.1, 0.3))
    settings = {
        "batch_size": 0,
        "dtype": "float64",
        "insecure_secret_seed": 5,
        "engine": Engine(strict=True),
        **settings,
    }
    return Federation(model or network(columns_of(silos)), silos, protocol, **settings)


def train(made: Federation, rounds: int = 4, *, wrap: Wrap | None = None, **settings: Any) -> Run:
    """Train, and look at the roles before and after."""
    with casting(wrap) as (players, starts):
        result = made.train(rounds, SEED, **settings)
    assert players[-1].displacement is not None
    return Run(result, players[-1], starts, copied(players[-1].models()), dict(players[-1].displacement()))


def run(
    silos: Sequence[Silo],
    rounds: int = 4,
    protocol: CGD | None = None,
    engine: str | Engine = "in-process",
    scheme: str = "pairwise",
    wrap: Wrap | None = None,
    model: nn.Module | None = None,
    **settings: Any,
) -> Run:
    """Make a federation and train it."""
    if isinstance(engine, str):
        engine = Engine.model_validate({"name": engine, "strict": engine == "in-process"})
    settings.setdefault("aggregation", SecureAggregation.model_validate({"scheme": scheme}))
    return train(make(silos, protocol, model, engine=engine, **settings), rounds, wrap=wrap)


@contextlib.contextmanager
def casting(wrap: Wrap | None = None) -> Iterator[tuple[list[Roles], dict[str, Tensors]]]:
    """Keep what is cast, and the confined models as they stand then; `wrap` may change the roles before they play."""
    starts: dict[str, Tensors] = {}

    def looked_at(made: Roles) -> None:
        if wrap is not None:
            wrap(made)
        starts.update(copied(made.models()))

    with cast.casting(looked_at) as players:
        yield players, starts


def copied(models: Mapping[str, Tensors]) -> dict[str, Tensors]:
    return {owner: {name: np.array(value) for name, value in tensors.items()} for owner, tensors in models.items()}


def participants(players: Roles) -> dict[str, Participant]:
    """The clients of a cast, as what they are."""
    found = {name: client for name, client in players.clients.items() if isinstance(client, Participant)}
    assert len(found) == len(players.clients)
    return found


def watched(seen: Seen) -> Wrap:
    """Note every message and its answer."""

    def wrap(players: Roles) -> None:
        for name, client in players.clients.items():
            _answer_by(client, lambda answer, message, name=name: _noted(seen, name, answer, message))

    return wrap


def _noted(seen: Seen, name: str, answer: Callable[[Message], Message], message: Message) -> Message:
    try:
        reply = answer(message)
    except Exception:
        seen.messages.append((name, message, None))
        raise
    seen.messages.append((name, message, reply))
    return reply


@dataclass
class Fault:
    """What goes wrong once: a silo's answer to one kind of message in one round (of one group, if it is given).

    how: "before", nothing of it is done; "after", it is done and the answer is lost; or what the answer is turned into.
    """

    silo: str
    round: int
    kind: type[Message]
    how: str | Callable[[Any], Message] = "before"
    group: str = ""
    times: int = 1
    happened: int = 0

    def is_of(self, silo: str, message: Message) -> bool:
        return (
            (silo, message.stamp.round) == (self.silo, self.round)
            and isinstance(message, self.kind)
            and self.group in ("", group_of(message.stamp))
            and self.happened < self.times
        )


def failing(*faults: Fault) -> Wrap:
    """Have clients fail; `happened` says how often each fault did."""

    def wrap(players: Roles) -> None:
        for name, client in players.clients.items():
            _answer_by(client, lambda answer, message, name=name: _befallen(faults, name, answer, message))

    return wrap


def _befallen(faults: Sequence[Fault], name: str, answer: Callable[[Message], Message], message: Message) -> Message:
    for fault in faults:
        if fault.is_of(name, message):
            fault.happened += 1
            if fault.how == "before":
                raise ConnectionError("the line is dead")
            reply = answer(message)
            if callable(fault.how):
                return fault.how(reply)
            raise ConnectionError("the line went dead")
    return answer(message)


def _answer_by(client: Client, by: Callable[[Callable[[Message], Message], Message], Message]) -> None:
    answer = client.answer
    client.answer = lambda message: by(answer, message)  # type: ignore[method-assign]


def both(*wraps: Wrap) -> Wrap:
    """Apply several, the first innermost."""

    def wrap(players: Roles) -> None:
        for one in wraps:
            one(players)

    return wrap


def contributor_of(client: Participant, group: str) -> Contributor:
    return client._contributors[group]


# -- Algorithm 2 as its box has it -------------------------------------------------------------------------------------


def oracle(
    starts: Mapping[str, Tensors],
    silos: Sequence[Silo],
    rates: Sequence[float],
    *,
    absent: Collection[tuple[int, str, str]] = (),
    batch_size: int = 0,
    bias: bool = True,
    hidden: Sequence[int] = (7, 5),
    mean: Array | float = 0.0,
    deviation: Array | float = 1.0,
    decay: float = 0.0,
    in_order: bool = False,
) -> tuple[dict[str, dict[str, Array]], dict[str, Array]]:
    """Return the confined models after len(rates) rounds and D, by plain autograd: D -= alpha sum n g / sum n.

    starts: a whole model by owner, a row of a joint grid or a participant; weights of columns that it does not read are
    no part of it. absent: round, owner and what of its gradient was in no sum: "" all, a silo's name the columns of
    that silo, "heads" all but the first layer's weight.
    """
    model = network(columns_of(silos), hidden, bias=bias).double()
    displacement = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
    held = {owner: _rows_of(owner, silos, mean, deviation) for owner in starts}
    reads = {owner: {name: torch.ones_like(value) for name, value in displacement.items()} for owner in starts}
    for owner, (_, _, columns, _) in held.items():
        reads[owner][FIRST] = torch.zeros_like(displacement[FIRST]).index_fill_(1, torch.tensor(columns), 1.0)
    for number, rate in enumerate(rates, 1):
        total = {name: torch.zeros_like(value) for name, value in displacement.items()}
        weight = {name: torch.zeros_like(value) for name, value in displacement.items()}
        for owner, (x, y, _, row) in held.items():
            summed = {name: value.clone() for name, value in reads[owner].items()}
            for name, mask in summed.items():
                for part in (part for at, who, part in absent if (at, who) == (number, owner)):
                    if part == "" or (part == "heads" and name != FIRST):
                        mask.zero_()
                    elif part != "heads" and name == FIRST:
                        mask[:, next(list(silo.columns) for silo in silos if silo.name == part)] = 0.0
            index = torch.from_numpy(Batches(len(x), batch_size, SEED, row, in_order=in_order).of_round(number))
            own = {
                name: ((torch.tensor(starts[owner][name]).double() + value) * reads[owner][name]).requires_grad_()
                for name, value in displacement.items()
            }
            outputs = torch.func.functional_call(model, own, (x[index],))
            loss = nn.functional.cross_entropy(outputs, y[index])
            for name, gradient in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
                total[name] += len(index) * (gradient + decay * own[name].detach()) * summed[name]
                weight[name] += len(index) * summed[name]
        for name in displacement:
            displacement[name] = displacement[name] - rate * total[name] / weight[name].clamp(min=1)
    models = {
        owner: {
            name: (torch.tensor(starts[owner][name]).double() + value * reads[owner][name]).numpy()
            for name, value in displacement.items()
        }
        for owner in starts
    }
    return models, {name: value.numpy() for name, value in displacement.items()}


def _rows_of(
    owner: str, silos: Sequence[Silo], mean: Array | float, deviation: Array | float
) -> tuple[torch.Tensor, torch.Tensor, list[int], str]:
    """Return an owner's x with all columns (0 where it holds none), y, its columns, and the row that names batches."""
    own = [silo for silo in silos if owner in (silo.row, silo.name)]
    if not own[0].columns:
        x = (own[0].x - mean) / deviation
        return torch.tensor(x), torch.tensor(own[0].y), list(range(x.shape[1])), own[0].name
    whole = np.zeros((len(own[0].x), columns_of(silos)))
    columns = [column for silo in own for column in silo.columns]
    for silo in own:
        whole[:, list(silo.columns)] = silo.x
    y = next(silo.y for silo in own if len(silo.y))
    return torch.tensor((whole - mean) / deviation), torch.tensor(y), columns, own[0].row


def furthest(found: Tensors, expected: Tensors) -> float:
    """Return the largest difference of any tensor, relative to its largest entry."""
    assert set(found) == set(expected)
    return max(
        float(np.abs(found[name].astype(np.float64) - expected[name]).max())
        / max(float(np.abs(expected[name]).max()), 1e-300)
        for name in expected
    )


def apart(found: Run, expected: Run) -> float:
    """Return by how much two runs' confined models and D differ at most."""
    assert set(found.models) == set(expected.models)
    return max(
        furthest(found.displacement, expected.displacement),
        *(furthest(found.models[owner], expected.models[owner]) for owner in expected.models),
    )


def same_bytes(found: Run, expected: Run) -> bool:
    """Return whether two runs' confined models and D are the same to the last bit."""
    return bytes_of(found) == bytes_of(expected)


def bytes_of(found: Run) -> dict[tuple[str, str], bytes]:
    everything = {**found.models, "": found.displacement}
    return {(owner, name): value.tobytes() for owner, tensors in everything.items() for name, value in tensors.items()}
