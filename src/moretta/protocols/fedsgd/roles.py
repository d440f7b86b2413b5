"""Builds the roles of FedSGD, federated averaging, FedProx, silos that train alone, and one pool of all rows."""

from __future__ import annotations

import hashlib

from moretta.contract.roles import Client as Role
from moretta.protocols.common.accountant import Accountant
from moretta.protocols.common.batches import most_rows
from moretta.protocols.common.releases import Releases
from moretta.protocols.common.roles import (
    POOL,
    Left,
    Roles,
    enrolment_of,
    highest_rate,
    pool_of,
    roles_of,
    rows_of,
    setups_of,
    without_noise,
)
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.stacked import Stacked
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.client import Client, LoneClient
from moretta.protocols.fedsgd.messages import MESSAGES
from moretta.protocols.fedsgd.params import FedSGD
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.protocols.fedsgd.server import LoneServer, Server


def build_fedsgd(protocol: Training, setting: Setting) -> Roles:
    """Build FedSGD's server and silos."""
    return _build(protocol, setting, setting.secure_aggregation.scheme, setting.data.batch_size)


def build_fedavg(protocol: Training, setting: Setting) -> Roles:
    """Build the same for federated averaging and FedProx, where an epoch uses all of a silo's rows."""
    return _build(protocol, setting, setting.secure_aggregation.scheme, 0)


def build_centralised(protocol: Training, setting: Setting) -> Roles:
    """Build a server and one party that has all rows."""
    return _build(protocol, setting, "none", most_rows(setting.data.batch_size) * len(setting.silos), pooled=True)


def _build(protocol: Training, setting: Setting, scheme: str, batch_size: int, *, pooled: bool = False) -> Roles:
    agreed = enrolment_of(setting, scheme, None, setting.columns, batch_size)
    if pooled:
        played = {POOL: pool_of(setting, agreed.statistics)}
    else:
        setups = setups_of(setting, agreed.statistics, scheme)
        played = {name: (setup, rows_of(setting, setup)) for name, setup in setups.items()}
    privacy, loss = protocol.privacy if isinstance(protocol, FedSGD) else None, protocol.loss_function
    private, accountant, releases = dict[str, PrivateGradient](), None, None
    if privacy is not None:
        sharers = 1 if scheme == "none" else setting.least(scheme)
        for name, (setup, own) in played.items():
            bound = hashlib.sha256(setup.bound + setting.spec.model_source.encode()).digest()
            private[name] = PrivateGradient(privacy, own, batch_size, loss, setting.root(name), bound, sharers)
        left_out = without_noise(setting, agreed.statistics)
        accountant, releases = Accountant(privacy, highest_rate(setting, batch_size), sharers, left_out), Releases()
    largest, rounds = setting.secure_aggregation.largest, setting.run.rounds
    server = Server(protocol, setting.model, agreed, largest, rounds, accountant, releases)
    model = setting.silo_model().train()
    stacked = Stacked(model, loss)
    clients = {
        name: Client(
            protocol, model, own, setup.contributor(setting.insecure_root(name)), rounds, private.get(name), stacked
        )
        for name, (setup, own) in played.items()
    }
    return roles_of(server, clients, agreed, MESSAGES, setting.least(scheme), releases, accountant)


def build_local(protocol: Training, setting: Setting) -> Roles:
    """Build silos that train alone."""
    scheme = setting.secure_aggregation.scheme if len(setting.silos) > 1 else "none"
    agreed = enrolment_of(setting, scheme, None, setting.columns)
    rounds, clients = setting.run.rounds, dict[str, Role]()
    for name, setup in setups_of(setting, agreed.statistics, scheme).items():
        sums = setup.contributor(setting.insecure_root(name))
        clients[name] = LoneClient(protocol, setting.silo_model(), rows_of(setting, setup), sums, rounds)
    server = LoneServer(agreed, setting.model)
    return roles_of(server, clients, agreed, MESSAGES, setting.least(scheme))


def left(client: Role) -> Left:
    """Return what a silo's role leaves at its site: where it added noise, the privacy of its own rows."""
    return Left(privacy=client.privacy()) if isinstance(client, Client) else Left()
