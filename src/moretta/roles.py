"""Who plays: from a protocol's settings to its server, its clients and the messages they know."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.config_sections import EngineName, SecureAggregation
from moretta.errors import ParameterError
from moretta.keystream import SecretRoot
from moretta.protocol import Client, Message, Server, Tensors
from moretta.protocols import enrolment, modules
from moretta.protocols.batches import Batches, UnionBatches
from moretta.protocols.cgd.circle import Circle
from moretta.protocols.cgd.client import Client as CGDClient
from moretta.protocols.cgd.client import Place
from moretta.protocols.cgd.grid import Grid, Group, Part, groups_of
from moretta.protocols.cgd.layers import Layers
from moretta.protocols.cgd.messages import MESSAGES as CGD_MESSAGES
from moretta.protocols.cgd.params import CGD
from moretta.protocols.cgd.server import Server as CGDServer
from moretta.protocols.cgd.simulation import Adding, Rows, Simulation
from moretta.protocols.cgd.whole import Whole
from moretta.protocols.enrolment import SMALLEST_DEVIATION, Enrolment, SiloRows, standardised
from moretta.protocols.fedsgd.accountant import Accountant
from moretta.protocols.fedsgd.client import Client as FedSGDClient
from moretta.protocols.fedsgd.client import LoneClient
from moretta.protocols.fedsgd.messages import MESSAGES as FEDSGD_MESSAGES
from moretta.protocols.fedsgd.params import Centralised, FedAvg, FedSGD, Local
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.protocols.fedsgd.server import LoneServer
from moretta.protocols.fedsgd.server import Server as FedSGDServer
from moretta.protocols.pbpfl.client import Client as PBPFLClient
from moretta.protocols.pbpfl.messages import MESSAGES as PBPFL_MESSAGES
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.protocols.pbpfl.server import Server as PBPFLServer
from moretta.protocols.training import Training
from moretta.secure_aggregation import MESSAGES as SUM_MESSAGES
from moretta.secure_aggregation import Contributor, Credentials, Rules, aggregator, contributor
from moretta.secure_aggregation.agreement import SetUp
from moretta.secure_aggregation.cohort import complete
from moretta.secure_aggregation.identity import Identity, Roster, fingerprint
from moretta.secure_aggregation.ring import Ring

POOL = "everybody"  # the one silo of centralised training


@dataclass(frozen=True)
class Silo:
    """A data owner: its name, inputs x [rows, ...], and targets y, classes int[rows] or numbers [rows, outputs].

    Where data is split by column too (`CGD`): row names the row of the grid, whose silos hold different columns of the
    same rows in the same order, columns are the indices of x's among all, ids say whose each row is, and y may have no
    entries where another silo of the row holds the labels.
    """

    name: str
    x: NDArray[np.generic]
    y: NDArray[np.generic]
    row: str = ""
    columns: tuple[int, ...] = ()
    ids: NDArray[np.str_] | None = None


@dataclass(frozen=True)
class Setting:
    """What every protocol is given.

    columns: how many input columns are standardised, 0 for none. session: how often the run was resumed.
    insecure: the seed from which all secrets follow, for tests; None draws them from the operating system.
    roster: the silos' public identities, if they have any. engine: where the roles live, or what plays them all.
    """

    model: nn.Module
    outputs: int
    silos: Sequence[Silo]
    secure_aggregation: SecureAggregation
    batch_size: int
    columns: int
    dtype: torch.dtype
    device: str
    seed: int
    rounds: int
    augment: bool = False
    session: int = 0
    insecure: int | None = field(default=None, repr=False)
    roster: Roster | None = None
    engine: EngineName = "in-process"

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a whole sample, whoever holds its columns."""
        return row_shape(self.silos)

    def silo_model(self) -> nn.Module:
        """Return a copy of the model on the silos' device."""
        return copy.deepcopy(self.model).to(self.device)

    def blank_model(self) -> nn.Module:
        """Return the same with all weights 0: a silo that is sent a perturbed model is not to hold the true one."""
        model = self.silo_model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        return model

    def rules(self, scheme: str) -> Rules:
        """Return what all roles of a sum have set alike. scheme: "none" for a pool of all rows, whatever is set."""
        secure = self.secure_aggregation
        return Rules(
            degree=secure.degree,
            threshold=secure.threshold,
            corrupt_rate=secure.corrupt_rate,
            dropout_rate=secure.dropout_rate,
            min_survivors=self.least(scheme),
            public_weights=secure.weights == "public",
            roster=self.roster,
        )

    def least(self, scheme: str) -> int:
        """Return the fewest silos that a round under this scheme may end with."""
        return self.secure_aggregation.least if scheme == self.secure_aggregation.scheme else 1

    def root(self, role: str) -> SecretRoot:
        """Return the role's secret root."""
        return SecretRoot.fresh() if self.insecure is None else SecretRoot.insecure(self.insecure, role)


@dataclass(frozen=True)
class Cast:
    """The roles of one run.

    standardisation: of inputs, as agreed on. scheme: of the secure sums. least: the fewest silos that a round may have.
    models: the models as they stand: the common one under the empty name, or each silo's own under its.
    displacement: of confined models, what they have all moved by, taken as a model of its own.
    """

    server: Server
    clients: Mapping[str, Client]
    standardisation: Standardisation
    scheme: str
    messages: Sequence[type[Message]]
    least: int
    models: Callable[[], Mapping[str, Tensors]]
    displacement: Callable[[], Tensors] | None = None


class Standardisation(Protocol):
    """What is taken off each input column, and what it is divided by: float64[columns], or [1] for all alike."""

    @property
    def mean(self) -> NDArray[np.float64]:
        """By column."""

    @property
    def deviation(self) -> NDArray[np.float64]:
        """By column."""


def cast(protocol: Training, setting: Setting) -> Cast:
    """Cast the roles of a protocol. Raises `moretta.errors.ParameterError` where model, data and loss do not fit."""
    match protocol:
        case Centralised():
            batch = setting.batch_size * len(setting.silos)
            return _fedsgd(protocol, setting, {POOL: _pooled_rows(protocol, setting)}, "none", batch)
        case FedAvg():  # an epoch uses all of a silo's rows
            return _fedsgd(protocol, setting, _rows(protocol, setting), setting.secure_aggregation.scheme, 0)
        case Local():
            return _local(protocol, setting)
        case PBPFL():
            return _pbpfl(protocol, setting)
        case CGD():
            return _cgd(protocol, setting) if setting.engine == "in-process" else _simulated(protocol, setting)
        case _:
            rows, scheme = _rows(protocol, setting), setting.secure_aggregation.scheme
            return _fedsgd(protocol, setting, rows, scheme, setting.batch_size)


def _fedsgd(protocol: Training, setting: Setting, rows: Mapping[str, SiloRows], scheme: str, batch_size: int) -> Cast:
    agreed = _enrolment(setting, scheme, batch_size, ask_scales=False)
    privacy = protocol.privacy if isinstance(protocol, FedSGD) else None
    # Where K silos' sum alone is seen, each adds a K-th of the noise's variance; an upload in the clear has all of it.
    sharers = 1 if scheme == "none" else setting.least(scheme)
    private, accountant = dict[str, PrivateGradient](), None
    if privacy is not None:
        for name, own in rows.items():
            root = setting.root(name)
            private[name] = PrivateGradient(privacy, own, batch_size, protocol.loss_function, root, sharers)
        left_out = "means and deviations of the input columns, summed without noise" if setting.columns else ""
        accountant = Accountant(privacy, max(one.rate for one in private.values()), sharers, left_out)
    largest, rounds = setting.secure_aggregation.largest, setting.rounds
    server = FedSGDServer(protocol, setting.model, agreed, largest, rounds, accountant)
    clients = {
        name: FedSGDClient(
            protocol, setting.silo_model(), own, _contributor(setting, scheme, name), rounds, private.get(name)
        )
        for name, own in rows.items()
    }
    return _cast(server, clients, agreed, FEDSGD_MESSAGES, setting.least(scheme))


def _local(protocol: Training, setting: Setting) -> Cast:
    scheme = setting.secure_aggregation.scheme if len(setting.silos) > 1 else "none"
    agreed = _enrolment(setting, scheme, setting.batch_size, ask_scales=False)
    clients = {
        name: LoneClient(protocol, setting.silo_model(), own, _contributor(setting, scheme, name), setting.rounds)
        for name, own in _rows(protocol, setting).items()
    }
    server = LoneServer(agreed, setting.model)
    return _cast(server, clients, agreed, FEDSGD_MESSAGES, setting.least(scheme))


def _pbpfl(protocol: PBPFL, setting: Setting) -> Cast:
    secure = setting.secure_aggregation
    if secure.scheme != "none" and secure.ring_bits < 64:
        raise ParameterError(
            f"ring-bits = {secure.ring_bits}: PBPFL's corrections multiply the ring's rounding; use ring-bits = 64"
        )
    sample = torch.zeros(2, *setting.row_shape, dtype=_input_dtype(setting))
    plan = ScalePlan.of(setting.model, (sample,))
    agreed = _enrolment(setting, secure.scheme, setting.batch_size, ask_scales=True)
    server = PBPFLServer(
        protocol,
        setting.model,
        plan,
        agreed,
        setting.root("server"),
        secure.largest,
        tuple(sample.shape[1:]),
        setting.rounds,
    )
    clients = {
        name: PBPFLClient(
            protocol.loss_function, setting.blank_model(), plan.head, own, _contributor(setting, secure.scheme, name)
        )
        for name, own in _rows(protocol, setting).items()
    }
    return _cast(server, clients, agreed, PBPFL_MESSAGES, setting.least(secure.scheme))


def _cast(
    server: Server, clients: Mapping[str, Client], agreed: Enrolment, messages: Sequence[type[Message]], least: int
) -> Cast:
    """Return the cast of a protocol whose server holds the model, or whose silos each have one."""

    def models() -> Mapping[str, Tensors]:
        common = modules.under("model/", server.state())
        return {"": common} if common else {name: modules.under("model/", c.state()) for name, c in clients.items()}

    return Cast(server, clients, agreed, agreed.aggregation.scheme, _schema(messages), least, models)


@dataclass(frozen=True)
class _Scales:
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]


def _cgd(protocol: CGD, setting: Setting) -> Cast:
    """Cast an aggregator without a model, and the participants."""
    grid, secure, model = grid_of(setting.silos), setting.secure_aggregation, setting.model
    blind = secure.scheme != "none" if protocol.blind is None else protocol.blind
    if blind and secure.scheme == "none":
        raise ParameterError('blind = true has nothing to hide sums in under scheme = "none"; remove one of them')
    split = any(silo.columns for silo in setting.silos)
    joint = split and protocol.vertical == "joint"
    shapes = {name: tuple(value.shape) for name, value in modules.trainable(model).items()}
    layers = Layers.of(model) if split else None
    first = "" if layers is None else layers.weight
    groups = groups_of(grid, shapes, first, joint=joint)
    enrolments = {
        name: _group_enrolment(setting, group, reads_inputs=layers is None or first in group.shapes)
        for name, group in groups.items()
        if len(group.members) > 1
    }
    clients, alone = dict[str, CGDClient](), dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]()
    for silo in setting.silos:
        rows = _participant_rows(protocol, setting, silo, grid, joint=joint)
        if setting.columns and split and len(grid.column_groups[_group_of(grid, silo.name)]) == 1:
            alone[silo.name] = rows.standardise_alone()  # nobody else has these columns
        clients[silo.name] = _participant(protocol, setting, silo, rows, grid, groups, joint=joint, blind=blind)
    rules = setting.rules(secure.scheme)
    server = CGDServer(grid, groups, enrolments, complete(rules), secure.largest, joint=joint, blind=blind)
    whole = Whole(grid, clients, model, layers, enrolments, alone)
    return Cast(
        server,
        clients,
        whole,
        secure.scheme,
        _schema(CGD_MESSAGES),
        setting.least(secure.scheme),
        whole.models,
        whole.displaced,
    )


def _group_enrolment(setting: Setting, group: Group, *, reads_inputs: bool) -> Enrolment:
    scheme, members = setting.secure_aggregation.scheme, len(group.members)
    rules = setting.rules(scheme)
    if scheme == "pairwise":
        rules.check(members)
    summing = aggregator(scheme, setting.secure_aggregation.ring_bits, rules)
    weight = next(iter(group.shapes.values()))
    split = any(silo.columns for silo in setting.silos)
    columns = (weight[1] if split else setting.columns) if setting.columns and reads_inputs else 0
    return Enrolment(summing, modules.schema(setting.model), columns, setting.batch_size, ask_scales=False)


def _group_of(grid: Grid, name: str) -> str:
    return next(group for group, members in grid.column_groups.items() if name in members)


def _participant_rows(protocol: CGD, setting: Setting, silo: Silo, grid: Grid, *, joint: bool) -> SiloRows:
    row = grid.parts[silo.name].row
    if joint and silo.name != grid.heads[row]:
        y = torch.empty(0)
    else:
        y = enrolment.targets(silo.y, setting.outputs, protocol.loss, silo.name, setting.dtype)
    batches = Batches(len(silo.x), setting.batch_size, setting.seed, row)  # of a row's holders the same
    return SiloRows(silo.x, y, batches, setting.dtype, setting.device, augment=setting.augment)


def _participant(
    protocol: CGD,
    setting: Setting,
    silo: Silo,
    rows: SiloRows,
    grid: Grid,
    groups: Mapping[str, Group],
    *,
    joint: bool,
    blind: bool,
) -> CGDClient:
    row = grid.parts[silo.name].row
    mine = {name: group for name, group in groups.items() if silo.name in group.members}
    place = Place(
        silo.name,
        tuple(grid.rows[row]) if joint else (silo.name,),
        grid.heads[row] if joint else None,
        silo.columns,
        mine,
    )
    scheme = setting.secure_aggregation.scheme
    contributors = {
        name: _contributor(setting, scheme, silo.name) for name, group in mine.items() if len(group.members) > 1
    }
    insecure = None if setting.insecure is None else setting.root(silo.name)
    credentials = _credentials(setting, silo.name, scheme)
    set_up = SetUp(silo.name, complete(setting.rules(scheme)), credentials, insecure, setting.session)
    return CGDClient(
        protocol,
        place,
        setting.silo_model(),
        rows,
        setting.root(silo.name),
        contributors,
        Circle(silo.name, set_up, insecure, setting.session),
        setting.rounds,
        blind=blind,
        ids=silo.ids,
    )


def _simulated(protocol: CGD, setting: Setting) -> Cast:
    """Cast all participants of a grid as one server that asks nobody."""
    grid, secure = grid_of(setting.silos), setting.secure_aggregation
    x, y, counts = _whole(protocol, setting)
    mean, deviation = np.zeros(1), np.ones(1)
    if setting.columns:
        mean, found = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
        deviation = np.where(found >= SMALLEST_DEVIATION, found, 1.0)
    simulation = Simulation(
        protocol,
        setting.model,
        grid,
        Rows(standardised(x, mean, deviation, setting.dtype), y, counts),
        Adding("exact-ring" if setting.engine == "exact-ring" else "fused", Ring(secure.ring_bits), secure.largest),
        setting.insecure,
        setting.rounds,
        setting.batch_size,
        setting.seed,
    )
    return Cast(simulation, {}, _Scales(mean, deviation), "none", (), 0, simulation.models, simulation.displaced)


def _whole(protocol: Training, setting: Setting) -> tuple[NDArray[np.generic], torch.Tensor, dict[str, int]]:
    """Return the rows of all silos together, with all their columns: inputs, targets, and how many a row of the grid.

    Rows of the grid come one after the other.
    """
    grid, silos = grid_of(setting.silos), {silo.name: silo for silo in setting.silos}
    blocks, labels, counts = list[NDArray[np.generic]](), list[NDArray[np.generic]](), dict[str, int]()
    for row, names in grid.rows.items():
        head = silos[grid.heads[row]]
        counts[row] = len(head.x)
        labels.append(head.y)
        if not head.columns:
            blocks.append(head.x.reshape(len(head.x), -1))
            continue
        whole = np.empty((len(head.x), sum(len(silos[name].columns) for name in names)), dtype=head.x.dtype)
        for name in names:
            if len(silos[name].x) != len(head.x):
                raise ParameterError(
                    f"row `{row}`: expected as many rows of `{name}` as of `{head.name}`, {len(head.x)}, in the same "
                    f"order; got {len(silos[name].x)}"
                )
            whole[:, list(silos[name].columns)] = silos[name].x
        blocks.append(whole)
    y = enrolment.targets(np.concatenate(labels), setting.outputs, protocol.loss, POOL, setting.dtype)
    return np.concatenate(blocks), y, counts


def grid_of(silos: Sequence[Silo]) -> Grid:
    """Return who holds which rows and columns; a silo without a row of the grid is one by itself.

    The labels of a row are with the first of its silos that has any.
    """
    parts = {silo.name: Part(silo.name, silo.row or silo.name, silo.columns) for silo in silos}
    heads = {parts[silo.name].row: silo.name for silo in reversed(silos) if len(silo.y)}
    return Grid(parts, heads)


def row_shape(silos: Sequence[Silo]) -> tuple[int, ...]:
    """Return the shape of a whole sample: a silo's own, or that of all columns of its row of the grid."""
    first = silos[0]
    if not first.columns:
        return first.x.shape[1:]
    return (sum(len(silo.columns) for silo in silos if silo.row == first.row),)


def _enrolment(setting: Setting, scheme: str, batch_size: int, *, ask_scales: bool) -> Enrolment:
    rules = setting.rules(scheme)
    if scheme == "pairwise":
        rules.check(len(setting.silos))
    summing = aggregator(scheme, setting.secure_aggregation.ring_bits, rules)
    return Enrolment(summing, modules.schema(setting.model), setting.columns, batch_size, ask_scales)


def _contributor(setting: Setting, scheme: str, name: str) -> Contributor:
    insecure = None if setting.insecure is None else setting.root(name)
    secure = setting.secure_aggregation
    credentials = _credentials(setting, name, scheme)
    return contributor(
        scheme,
        name,
        secure.ring_bits,
        setting.rules(scheme),
        credentials=credentials,
        insecure=insecure,
        session=setting.session,
    )


def _credentials(setting: Setting, name: str, scheme: str) -> Credentials | None:
    """Return how a silo proves who it is, where there is a roster and something to protect."""
    secure = setting.secure_aggregation
    if setting.roster is None or secure.identity is None or scheme == "none":
        return None
    identity = Identity.load(secure.identity.replace("{silo}", name))
    if identity.public_key != setting.roster.keys[name]:
        raise ParameterError(
            f"the identity of silo `{name}` is not the one that the roster lists for it; expected "
            f"{fingerprint(setting.roster.keys[name])}, got {fingerprint(identity.public_key)} (moretta keys show)"
        )
    return Credentials(identity, setting.roster)


def _rows(protocol: Training, setting: Setting) -> dict[str, SiloRows]:
    return {
        silo.name: SiloRows(
            silo.x,
            enrolment.targets(silo.y, setting.outputs, protocol.loss, silo.name, setting.dtype),
            Batches(len(silo.x), setting.batch_size, setting.seed, silo.name),
            setting.dtype,
            setting.device,
            augment=setting.augment,
        )
        for silo in setting.silos
    }


def _pooled_rows(protocol: Training, setting: Setting) -> SiloRows:
    x = np.concatenate([silo.x for silo in setting.silos])
    y = np.concatenate([silo.y for silo in setting.silos])
    parts = [Batches(len(silo.x), setting.batch_size, setting.seed, silo.name) for silo in setting.silos]
    targets = enrolment.targets(y, setting.outputs, protocol.loss, POOL, setting.dtype)
    return SiloRows(x, targets, UnionBatches(parts), setting.dtype, setting.device, augment=setting.augment)


def _input_dtype(setting: Setting) -> torch.dtype:
    return torch.int64 if setting.silos[0].x.dtype.kind in "iu" else setting.dtype


def _schema(messages: Sequence[type[Message]]) -> Sequence[type[Message]]:
    return (*SUM_MESSAGES, *enrolment.MESSAGES, *messages)
