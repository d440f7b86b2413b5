"""The casts of the plain baselines."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from moretta.protocols.common.accountant import Accountant
from moretta.protocols.common.enrolment import SiloRows
from moretta.protocols.common.players import Cast
from moretta.protocols.common.releases import Releases
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.training import Training
from moretta.protocols.common.wiring import (
    bound_to,
    cast_of,
    contributor_of,
    enrolment_of,
    highest_rate,
    rows_of,
    without_noise,
)
from moretta.protocols.fedsgd.client import Client, LoneClient
from moretta.protocols.fedsgd.messages import MESSAGES
from moretta.protocols.fedsgd.params import FedSGD
from moretta.protocols.fedsgd.private import PrivateGradient
from moretta.protocols.fedsgd.server import LoneServer, Server


def cast_fedsgd(
    protocol: Training, setting: Setting, rows: Mapping[str, SiloRows], scheme: str, batch_size: int
) -> Cast:
    """Cast FedSGD, and with their settings federated averaging and centralised training."""
    agreed = enrolment_of(setting, scheme, None, setting.columns, batch_size)
    privacy = protocol.privacy if isinstance(protocol, FedSGD) else None
    # Where no sum of fewer than K silos is opened, each adds a K-th of the noise's variance; an upload in the clear has
    # all of it.
    sharers = 1 if scheme == "none" else setting.least(scheme)
    private, accountant, releases = dict[str, PrivateGradient](), None, None
    if privacy is not None:
        bound = hashlib.sha256(bound_to(protocol, setting) + setting.model_source.encode()).digest()
        for name, own in rows.items():
            root = setting.root(name)
            private[name] = PrivateGradient(privacy, own, batch_size, protocol.loss_function, root, bound, sharers)
        accountant = Accountant(privacy, highest_rate(setting, batch_size), sharers, without_noise(setting))
        releases = Releases()
    largest, rounds = setting.secure_aggregation.largest, setting.rounds
    server = Server(protocol, setting.model, agreed, largest, rounds, accountant, releases)
    clients = {
        name: Client(
            protocol, setting.silo_model(), own, contributor_of(setting, scheme, name), rounds, private.get(name)
        )
        for name, own in rows.items()
    }
    return cast_of(server, clients, agreed, MESSAGES, setting.least(scheme), releases)


def cast_local(protocol: Training, setting: Setting) -> Cast:
    """Cast silos that train alone."""
    scheme = setting.secure_aggregation.scheme if len(setting.silos) > 1 else "none"
    agreed = enrolment_of(setting, scheme, None, setting.columns)
    clients = {
        name: LoneClient(protocol, setting.silo_model(), own, contributor_of(setting, scheme, name), setting.rounds)
        for name, own in rows_of(protocol, setting).items()
    }
    server = LoneServer(agreed, setting.model)
    return cast_of(server, clients, agreed, MESSAGES, setting.least(scheme))
