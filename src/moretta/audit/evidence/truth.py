"""The scorer's data, hidden from attackers: the silos' rows, and the roles' states that an in-process run kept."""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.audit.evidence.case import FROZEN, Architecture, Case, Heard, PublicRun, exported, torch_dtype
from moretta.audit.evidence.intervals import Floats
from moretta.audit.evidence.network import outputs_at, tensors
from moretta.contract.messages import Array, Message, Stamp, Tensors
from moretta.contract.roles import Client, State, under
from moretta.data.layout import SampleLayout
from moretta.data.rows import Rows
from moretta.data.silo import Silo, row_shape, rows_digest
from moretta.data.tables.preparation import Preparation
from moretta.engines.checkpoint import CheckpointId, last_checkpoint, rounds_kept
from moretta.engines.files import read_text
from moretta.engines.run_folder import ROWS, read_inputs, read_json, read_model
from moretta.engines.views import Views
from moretta.errors import ParameterError
from moretta.models.hooks import hook_of
from moretta.protocols.common import modules
from moretta.protocols.common.batches import Batches
from moretta.protocols.common.enrolment import SiloRows, prepared, targets
from moretta.protocols.common.roles import Roles
from moretta.protocols.common.silo_rows import Begin, TrainingRows
from moretta.protocols.common.specification import Specification

M = TypeVar("M", bound=Message)

PUBLIC = ("batch-size", "standardise", "standardise-targets", "augment")  # of [data]
AGREED = (
    *("input_fill", "input_mean", "input_deviation", "input_target_mean", "input_target_deviation"),
    *("scales", "has_statistics"),
)  # once, in a run's first set-up
UNTOLD = ("warm-start",)  # of [protocol]: a path
UNTOLD_SECURE = ("roster", "identity")


class Trained(Protocol):
    """Silos with their rows, a model's architecture, and the settings of a run's training.

    Attributes:
        model: The architecture, with weights that reveal nothing.
        silos: All silos that trained, with their rows.
        layout: The packing of a sample of several arrays; None for one array.
        outputs: The number of the model's outputs.
    """

    model: nn.Module
    silos: Sequence[Silo]
    spec: Specification
    layout: SampleLayout | None
    outputs: int

    @property
    def test(self) -> tuple[Array, Array] | None:
        """Rows outside training."""

    def digest(self, seed: int, rounds: int) -> str:
        """Return the digest to which the states of a run are bound."""

    def players(self, rounds: int, seed: int) -> Roles:
        """Return all roles of a run anew, to restore a run's states."""

    def without_edge_processes(self) -> Self:
        """Return the same with every silo's role in this process."""


class Truth:
    """All of a finished in-process run: public facts, the views, and what no role in it knew as a whole.

    Args:
        federation, rounds, seed: As in the run; `planned` keeps the rounds.
        background: Rows x and y that an attacker may have, of the same kind as the silos' but none of theirs. None
            takes the first half of the test rows.

    Raises:
        ParameterError: The run was not recorded, its silos were on several machines, or its folder is not whole.
            Settings, seed or rows have changed since.
    """

    def __init__(
        self, folder: Path, federation: Trained, rounds: int, seed: int, background: tuple[Array, Array] | None = None
    ) -> None:
        self.folder, self.federation, self.planned, self.seed = folder, federation, rounds, seed
        record = read_json(folder / "result.json")
        self.views = Views.open(folder / "views", str(record.get("run")), str(record.get("views", "")))
        if any(silo.remote for silo in federation.silos):
            raise ParameterError(
                f"{folder} has views but no truth to score attacks by, because this run's silos were on several "
                'machines; train the same run file with engine = "in-process", and audit that run'
            )
        if self.place.run != record.get("run"):
            raise ParameterError(
                f"{folder / 'truth'}: expected the states of run {record.get('run')}, got those of {self.place.run}; "
                "restore that folder, or train again"
            )
        if federation.digest(seed, rounds) != self.place.digest:
            raise ParameterError(
                f"{folder}: the settings or the seed in run.toml have changed since the run; restore run.toml, or "
                "train again"
            )
        kept = folder / "truth" / ROWS
        if not kept.exists() or read_text(folder, f"truth/{ROWS}") != rows_digest(federation.silos):
            raise ParameterError(
                f"{folder}: the silos' rows have changed since the run; restore the data, or train again"
            )
        self.views.check()
        lost = {entry["round"] for entry in record.get("lost", ())}  # without an opened sum
        self.run = public_run(record, federation, tuple(number for number in self.views.rounds if number not in lost))
        self._background = background
        gone = [number for number in self.recorded if number - 1 not in rounds_kept(folder / "truth")]
        if gone or not (folder / "inputs.json").exists():
            what = f"the states before round {gone[0]} in truth/" if gone else "inputs.json"
            raise ParameterError(f"{folder}: expected {what}, by which attacks are scored; restore it, or train again")

    # What roles saw

    def heard(self, role: str, *numbers: int) -> list[Heard]:
        """Return the messages of a role's view of some rounds."""
        read, frozen = self.views.data, self.frozen
        return [entry for number in numbers for entry in Heard.of_round(role, number, read(role, number), frozen)]

    def messages(self, role: str, number: int, kind: type[M], peer: str | None = None) -> list[M]:
        """Return the messages of one kind in a role's view of one round. peer: those to and from it alone."""
        heard = [entry.message for entry in self.heard(role, number) if peer in (None, entry.peer)]
        return [message for message in heard if isinstance(message, kind)]

    def case(self, views: Mapping[str, Any], arrays: Mapping[str, Array], *, thorough: bool) -> Case:
        """Return a case of these views, by role and round, and arrays; a role may miss rounds."""
        there = {role: self.views.files.get(role, {}) for role in views}
        read = {role: {n: self.views.data(role, n) for n in views[role] if n in there[role]} for role in views}
        known = {**arrays, **{f"{FROZEN}{name}": value for name, value in self.frozen.items()}}
        return Case(self.run, read, known, self.architecture, thorough)

    @cached_property
    def frozen(self) -> Tensors:
        """The untrained parameters, in the run's dtype."""
        return {name: value.astype(self.run.dtype) for name, value in modules.frozen(self.federation.model).items()}

    @cached_property
    def architecture(self) -> Architecture:
        """How an attacker builds the model."""
        of = self.federation
        if of.spec.text and of.spec.settings.get("model"):
            made = dict(of.spec.settings["model"])
            source, base = made.pop("source"), of.spec.settings.get("run", {}).get("base", ".")
            return Architecture(source, made, base if ":" in source else ".")
        return Architecture(program=exported(of.model, self.run.shape, of.silos[0].x.dtype))

    @property
    def recorded(self) -> tuple[int, ...]:
        """The rounds of training with views, without the release after the last."""
        return self.run.training

    # What roles knew

    @lru_cache(maxsize=4)  # noqa: B019  # for one audit
    def states(self, number: int) -> Mapping[str, State]:
        """Return the roles' states before a recorded round, or after the one before it."""
        checkpoint = last_checkpoint(self.folder / "truth", up_to=number - 1)
        if checkpoint is None or checkpoint[0].round != number - 1:  # of no recorded round, as all of those are present
            raise ParameterError(f"{self.folder / 'truth'}: the states before round {number} were not kept")
        return checkpoint[1]

    @cached_property
    def place(self) -> CheckpointId:
        """The run's place at its last recorded round."""
        checkpoint = last_checkpoint(self.folder / "truth")
        if checkpoint is None:
            raise ParameterError(
                f"{self.folder / 'truth'} lacks the states of the recorded rounds, by which attacks are scored; "
                "restore that folder, or train again"
            )
        return checkpoint[0]

    @cached_property
    def _roles(self) -> Roles:
        return self.federation.players(self.planned, self.seed)

    def roles(self, number: int) -> Roles:
        """Return all roles in their state before a round, valid until a call for another one."""
        roles, states = self._roles, self.states(number)
        roles.server.restore(self._agreed(states["server"]))
        for name, client in roles.clients.items():
            client.restore(states[f"silo-{name}"])
        return roles

    def _agreed(self, state: State) -> State:
        """Return the server's state with its cohort's agreement in the set-up, which the state before it lacks."""
        if state.get("has_statistics", 1):
            return state
        later = last_checkpoint(self.folder / "truth")
        known = {} if later is None else later[1]["server"]
        return {**state, **{name: known[name] for name in AGREED if name in known}}

    @lru_cache(maxsize=64)  # noqa: B019
    def parameters(self, number: int) -> Tensors:
        """Return the true model before a round in the run's dtype, as attacks run it and the run keeps it at the end.

        A server may hold more digits of it. The protocol must have a common model.
        """
        held = sorted(under("model/", self.states(number)["server"]).items())
        return {name: value.astype(self.run.dtype) if value.dtype.kind == "f" else value for name, value in held}

    def final(self, name: str = "model.safetensors") -> Tensors:
        """Return a model of the finished run: "model.safetensors" or "released.safetensors"."""
        return read_model(self.folder, name)

    # Rows

    @cached_property
    def _preparation(self) -> Preparation:
        return Preparation.loads(read_inputs(self.folder))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return torch_dtype(self.run)

    def prepared(self, x: Array, y: Array, who: str) -> Rows:
        """Return rows as the model takes them, and targets as the loss does (`protocols.common.targets`)."""
        of = self.federation
        made = prepared(x, self._preparation, self.dtype).numpy()
        expected = targets(y, of.outputs, of.spec.protocol.loss, who, self.dtype).numpy()
        return Rows(made, self._preparation.scaled(expected))

    @lru_cache(maxsize=256)  # noqa: B019
    def rows(self, silo: str) -> Rows:
        """Return all rows that a silo trains on. Raises ParameterError if split columns leave no whole rows."""
        member = next(member for member in self.federation.silos if member.name == silo)
        if member.columns:
            raise ParameterError(f"columns are split, so {silo} alone has no whole rows")
        return self.prepared(member.x, member.y, silo)

    def joined(self, used: Mapping[str, Any]) -> Rows:
        """Return some rows of several silos, one silo after the other. used: the numbers of each silo's rows."""
        parts = [self.rows(silo).of(index) for silo, index in used.items()]
        return Rows(np.concatenate([part.x for part in parts]), np.concatenate([part.y for part in parts]))

    def batch(self, silo: str, number: int) -> NDArray[np.int64]:
        """Return the numbers of the rows that a silo uses in a round of an SGD-type protocol."""
        return self.batches(silo, self.run.rows[silo]).of_round(*self.drawn(number))

    def batches(self, who: str, rows: int) -> Batches:
        """Return the batches of a silo, or of a row of a grid, with `rows` rows."""
        in_order = self.run.setting("batches") == "in-order"
        return Batches(rows, self.federation.spec.data.batch_size, self.seed, who, in_order=in_order)

    def drawn(self, number: int) -> tuple[int, ...]:
        """Return the draw of rows, dropout and key of a round: `Stamp.drawn` of its last take."""
        return Stamp(self.place.run, number, 0, self._takes.get(number, 0)).drawn

    @cached_property
    def _takes(self) -> Mapping[int, int]:
        lines = read_text(self.folder, "history.jsonl").splitlines()
        return {line["round"]: line.get("take", 0) for line in map(json.loads, lines)}

    def role(self, silo: str, number: int) -> Client:
        """Return a silo's role by PyTorch, for any runner, as it stood in a round, set up."""
        client = self._pytorch_roles.clients[silo]
        client.restore(self.states(number)[f"silo-{silo}"])
        at, of = Stamp(self.place.run, number, 0), self.federation
        client.answer(Begin.of(at, modules.schema(of.model), of.spec.table_digest, self._preparation))
        return client

    @cached_property
    def _pytorch_roles(self) -> Roles:
        return self.federation.without_edge_processes().players(self.planned, self.seed)

    @cached_property
    def background(self) -> Rows:
        """Rows that an attacker may have. Raises `moretta.errors.ParameterError` for a run without such rows."""
        if self._background is not None:
            return self.prepared(*self._background, "background")
        x, y = self._test("take background knowledge from; give --background FILE")
        return self.prepared(x[::2], y[::2], "background")

    @cached_property
    def others(self) -> Rows:
        """Rows outside training that no attacker has."""
        x, y = self._test("compare members with; give the run test rows")
        return self.prepared(x[1::2], y[1::2], "test")

    def _test(self, lacking: str) -> tuple[Array, Array]:
        held = self.federation.test
        if held is None or len(held[0]) < 2:
            raise ParameterError(f"there are no test rows to {lacking}")
        return held

    def network(self) -> torch.nn.Module:
        """Return the architecture as silos run it, with weights that reveal nothing; a module of its own."""
        return copy.deepcopy(self.federation.model).train()

    def outputs(self, parameters: Tensors, x: Array) -> Floats:
        """Return the outputs of the model as silos run it, float64[rows, outputs]."""
        with torch.no_grad():
            outputs = outputs_at(self.network(), tensors(parameters), torch.tensor(x))
        return np.asarray(outputs.double().numpy())

    def predicted(self, parameters: Tensors, x: Array) -> Floats:
        """Return the outputs of the model in eval mode, float64[rows, outputs]."""
        model = copy.deepcopy(self.federation.model)
        modules.load(model, parameters)
        return np.asarray(modules.outputs_of(model, torch.tensor(x)).double().numpy())

    def gradient(self, silo: str, number: int, parameters: Tensors | None = None, loss: Any = None) -> Tensors:
        """Return the gradient of the mean loss on a silo's batch of a round, by tensor.

        Dropout and augmentation draw as in the run.

        Args:
            parameters: None takes the true model before the round.
            loss: A function of outputs and targets; None takes the run's.
        """
        of, rows = self.federation, self.silo_rows(silo, self.federation.spec.run.device)
        at = self.parameters(number) if parameters is None else parameters
        with rows.randomness(*self.drawn(number)):
            x, y = (tensor.cpu().numpy() for tensor in rows.batch(*self.drawn(number)))
            return gradient(of.model, at, Rows(x, y), loss or self.loss, of.spec.run.device)

    @lru_cache(maxsize=256)  # noqa: B019
    def silo_rows(self, silo: str, device: str = "cpu") -> SiloRows:
        """Return a silo's rows with its randomness. device: the run's draws as the silo did, having its generator."""
        held, varied = self.rows(silo), self.federation.spec.data.varied
        rows = TrainingRows(held.x, held.y, self.batches(silo, self.run.rows[silo]))
        return SiloRows(rows, self.dtype, device, augment=varied)

    @property
    def loss(self) -> Any:
        """The loss, of outputs and targets (`moretta.protocols.common.losses.Loss`)."""
        return self.federation.spec.protocol.loss_function


def gradient(model: torch.nn.Module, parameters: Tensors, rows: Rows, loss: Any, device: str = "cpu") -> Tensors:
    """Return the gradient of the mean loss on rows, by tensor; the model itself stays as it is."""
    copied = copy.deepcopy(model).to(device).train()
    modules.load(copied, parameters)
    batch = torch.tensor(rows.x, device=device), torch.tensor(rows.y, device=device)
    return modules.on_host(modules.gradient(copied, modules.trainable(copied), loss, batch)[0])


def public_run(record: Mapping[str, Any], federation: Trained, recorded: tuple[int, ...]) -> PublicRun:
    """Return a run's public facts. record: the run's ``result.json``."""
    settings = json.loads(json.dumps(record["settings"], default=str))
    data = {key: value for key, value in settings.get("data", {}).items() if key in PUBLIC}
    data["augment"] = data.get("augment") or "none"
    protocol = {key: value for key, value in settings["protocol"].items() if key not in UNTOLD}
    secure = {k: v for k, v in settings.get("secure-aggregation", {}).items() if k not in UNTOLD_SECURE}
    summed = record["secure_aggregation"]
    return PublicRun(
        id=record["run"],
        protocol=record["protocol"],
        task=record["task"],
        settings={"protocol": protocol, "secure-aggregation": secure, "data": {"batch-size": 32, **data}},
        silos=tuple(record["silo_names"]),
        rows={silo.name: len(silo.x) for silo in federation.silos},
        shape=row_shape(federation.silos),
        outputs=federation.outputs,
        dtype=federation.spec.run.dtype,
        scheme=summed["scheme"],
        ring_bits=summed["ring_bits"],
        rounds=record["rounds"],
        recorded=recorded,
        **_head(federation),
        arrays={} if federation.layout is None else federation.layout.dump(),
        mask=hook.mask if (hook := hook_of(federation.model)) else (),
    )


def _head(federation: Trained) -> dict[str, str]:
    """Return the names of the last linear layer's parameters, as the architecture shows them."""
    held = dict(federation.model.named_parameters())
    weights = [name for name, parameter in held.items() if parameter.ndim == 2 and len(parameter) == federation.outputs]
    if not weights:
        return {}
    layer = re.sub(r"(parametrizations\.)?weight(\.original1?|_\w+)?$", "", weights[-1])
    bias, stem = f"{layer}bias", weights[-1][:-1]
    magnitude = {f"{layer}weight_v": f"{stem}g", f"{layer}parametrizations.weight.original1": f"{stem}0"}
    return {
        "head": weights[-1],
        "head_bias": bias if bias in held else "",
        "head_magnitude": magnitude.get(weights[-1], ""),
    }
