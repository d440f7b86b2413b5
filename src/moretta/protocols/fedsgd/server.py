"""The coordinating roles of the plain baselines."""

import copy

import numpy as np

from moretta.contract.messages import Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Outcome, Phase, Report, State, no_phase, over, under
from moretta.errors import PeerError
from moretta.protocols.common import modules
from moretta.protocols.common.accountant import Accountant, excess_of
from moretta.protocols.common.clipping import SummedStep
from moretta.protocols.common.enrolment import Enrolment
from moretta.protocols.common.losses import density_of
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.training import Training
from moretta.protocols.fedsgd.messages import Show, Shown, Step, Stepped, TrainOn
from moretta.protocols.fedsgd.params import Epochs
from moretta.secure_aggregation.keystream import digest_of
from moretta.secure_aggregation.sums import query_of


class Server:
    """FedSGD's server, with `Epochs` federated averaging's and FedProx's. accountant: if silos add noise."""

    def __init__(
        self, params: Training, setting: Setting, enrolment: Enrolment, accountant: Accountant | None = None
    ) -> None:
        self.phase: Phase = no_phase
        self._model = copy.deepcopy(setting.model).train()
        # Silos with their own epochs have taken their steps: the server moves by the mean difference itself.
        stepping = Training(learning_rate=1.0) if isinstance(params, Epochs) else params
        self._stepper = SummedStep(self._model, stepping, setting.spec.run.rounds)
        self._enrolment, self._secure = enrolment, setting.secure_aggregation
        self._params, self._accountant, self.setup = params, accountant, enrolment.setup
        self._trained = modules.trainable(self._model)
        self._buffers = {} if accountant else modules.running_buffers(self._model)
        self._shapes: dict[str, tuple[int, ...]] = {} if accountant else {"loss": ()}  # of the summed tensors
        self._shapes |= {f"gradient/{name}": tuple(value.shape) for name, value in self._trained.items()}
        if params.class_weights and not isinstance(params, Epochs):
            self._shapes["density"] = ()  # a gradient weighs by its rows' weights, an epoch's difference by rows
        self._shapes |= {f"buffer/{name}": tuple(value.shape) for name, value in self._buffers.items()}
        self._limits = dict.fromkeys(self._shapes, self._secure.largest)

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Move the model along the mean of the silos' gradients, or of their weight changes under `Epochs`."""
        aggregation, shapes = self._enrolment.aggregation, self._shapes
        most = self._enrolment.most_weight
        if self._accountant is None:
            request = aggregation.want(shapes, self._limits, most)
        else:
            request = self._accountant.want(aggregation, shapes, self._secure, most)
        parameters = modules.arrays(self._model)
        ask = TrainOn(stamp=now, parameters=self._enrolment.moving(parameters), encoding=request.fraction_bits)
        exchange = aggregation.sum(ask, request, query_of(ask, *self._enrolment.agreed).digest)
        if self._accountant is not None:
            exchange = self._accountant.counted(exchange, now, digest_of(parameters))
        total = yield from exchange
        if isinstance(total, Aborted):
            return total
        with self.phase("update"):
            density = density_of(total, self._params.class_weights)
            gradient = {name: total.means[f"gradient/{name}"] for name in self._trained}
            for value in gradient.values():
                np.divide(value, density, out=value)  # in their own memory
            buffers = {name: total.means[f"buffer/{name}"] for name in self._buffers}
            clipped = self._stepper.step(gradient, now.round, buffers)
        loss = {"loss": float(total.means["loss"]) / density} if "loss" in total.means else {}
        figures = {"rows": float(total.weight), "ring_step": max(total.steps.values()) / density}
        figures |= excess_of(total)
        validation = yield from self._enrolment.validation(now, lambda: modules.arrays(self._model), total.silos)
        return Report(loss | figures | clipped | validation)

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Release the server's present model: the last step's, or under early stopping the best round's."""
        parameters = modules.arrays(self._model)
        facts = (
            {} if self._accountant is None else self._accountant.facts(self._accountant.releases.count, self._shapes)
        )
        outcome = Outcome(parameters=parameters, released=parameters, facts=facts)
        return (yield from self._enrolment.scored(now, outcome, parameters))

    def state(self) -> State:
        """Return model, optimizer, the run's agreement, and under an accountant the releases."""
        model, released = modules.arrays(self._model), self._accountant.releases.state() if self._accountant else {}
        return {**over("model/", model), **self._stepper.state(), **self._enrolment.state(), **released}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        modules.load(self._model, under("model/", state))
        self._stepper.restore(state)
        self._enrolment.restore(state)
        if self._accountant is not None:
            self._accountant.releases.restore(state)


class LoneServer:
    """Has each silo step alone; learns losses, batches' numbers of rows and, at the end, the models."""

    def __init__(self, setting: Setting, enrolment: Enrolment) -> None:
        self.phase: Phase = no_phase
        self._enrolment, self._expected = enrolment, modules.arrays(setting.model)
        # The only agreement is the same standardisation as under the other protocols.
        self.setup, self.state, self.restore = enrolment.setup, enrolment.state, enrolment.restore

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Let each silo take its step."""
        replies = yield Ask.all(self._enrolment.cohort, Step(stamp=now), Stepped)
        if replies.missing:
            return Aborted(replies.missing)
        rows = np.array([reply.rows for reply in replies.answers.values()])
        losses = np.array([reply.loss for reply in replies.answers.values()])
        return Report({"loss": float(rows @ losses / rows.sum()), "rows": float(rows.sum())})

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Collect the models."""

        def check(silo: str, shown: Shown) -> None:
            if modules.shapes(shown.parameters) != modules.shapes(self._expected):
                raise PeerError("expected the tensors of the model, with their shapes and dtypes")

        replies = yield Ask.all(self._enrolment.cohort, Show(stamp=now), Shown, check)
        if replies.missing:
            return Aborted(replies.missing)
        models = {silo: reply.parameters for silo, reply in replies.answers.items()}
        return (yield from self._enrolment.scored(now, Outcome(parameters={}, models=models), {}))
