"""Builds PBPFL's roles."""

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from moretta.data.rows import positions_of
from moretta.protocols.common.roles import Roles, enrolment_of, roles_of, rows_of, setups_of
from moretta.protocols.common.setting import Setting
from moretta.protocols.pbpfl.client import Client
from moretta.protocols.pbpfl.head import refuse_dense
from moretta.protocols.pbpfl.messages import MESSAGES
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.protocols.pbpfl.server import Server


def build(protocol: PBPFL, setting: Setting) -> Roles:
    """Build PBPFL's server and silos."""
    secure = setting.secure_aggregation
    plan = ScalePlan.of(setting.model, (setting.example(),))
    positions = positions_of(silo.y for silo in setting.silos)
    shown = setting.spec.run.insecure_secret_seed is not None  # in tests and audits, without secrets
    plain = protocol.variant == "probabilities" and not protocol.label_smoothing
    refuse_dense(plan.head, protocol.loss, positions, shown=shown and plain)
    agreed = enrolment_of(setting, secure.scheme, None, setting.columns, ask_scales=True, sends_model=True)
    server = Server(protocol, setting, plan, agreed)
    blank = setting.blank_model()
    clients = {
        name: Client(
            protocol.loss_function,
            blank,
            plan.head,
            rows_of(setting, setup, sent_model=True),
            setup.contributor(setting.insecure_root(name)),
            protocol.variant,
            setting.root(name) if protocol.exchange == "ratios" else None,
        )
        for name, setup in setups_of(setting, agreed.statistics).items()
    }
    roles = roles_of(server, clients, agreed, MESSAGES, setting.least(secure.scheme))
    return replace(roles, warnings=list(_of_frozen(setting.built)))


def _of_frozen(model: nn.Module) -> Iterator[str]:
    """Yield sentences for users who train beside frozen parameters."""
    frozen = [parameter.numel() for parameter in model.parameters() if not parameter.requires_grad]
    if frozen:
        whole = sum(parameter.numel() for parameter in model.parameters())
        yield (
            f"{sum(frozen)} of {whole} parameters are frozen and count as public: silos are sent them as they are. So "
            "what trains between them has no scale towards them; a silo sees the product of an adapter's two matrices "
            "as it is"
        )
