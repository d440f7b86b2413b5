"""Builds the roles of FedSAM."""

from __future__ import annotations

from moretta.errors import ParameterError
from moretta.protocols.common.roles import Roles, enrolment_of, roles_of, rows_of, setups_of
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.training import Training

from .client import Client
from .messages import MESSAGES
from .params import FedSAM
from .server import Server


def build(protocol: Training, setting: Setting) -> Roles:
    """Build the server and the silos; an epoch uses all of a silo's rows."""
    if not isinstance(protocol, FedSAM):
        raise ParameterError(f"expected the settings of FedSAM, got {type(protocol).__name__}")
    secure = setting.secure_aggregation
    agreed = enrolment_of(setting, secure.scheme, None, setting.columns, batch_size=0)
    rounds = setting.spec.run.rounds
    clients = {
        name: Client(
            protocol,
            setting.silo_model(),
            rows_of(setting, setup),
            setup.contributor(setting.insecure_root(name)),
            rounds,
        )
        for name, setup in setups_of(setting, agreed.statistics).items()
    }
    server = Server(setting.model, agreed, secure.largest, rounds)
    return roles_of(server, clients, agreed, MESSAGES, setting.least(secure.scheme))
