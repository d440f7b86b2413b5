"""The server's role."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from torch import nn

from moretta.contract.messages import Stamp
from moretta.contract.roles import Aborted, Exchange, Outcome, Phase, Report, State, no_phase, under
from moretta.protocols.common import modules
from moretta.protocols.common.clipping import SummedStep
from moretta.protocols.common.enrolment import Enrolment
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.sums import query_of

from .messages import TrainOn


class Server:
    """Moves the model by the mean of what silos moved by. limit: the largest |value| of an uploaded entry."""

    def __init__(self, model: nn.Module, enrolment: Enrolment, limit: float, rounds: int) -> None:
        self.phase: Phase = no_phase
        self._model = copy.deepcopy(model).train()
        # The silos have made their steps, so the mean difference is taken as it is.
        self._stepper = SummedStep(self._model, Training(learning_rate=1.0), rounds)
        self._enrolment, self._limit = enrolment, limit

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Agree with the cohort."""
        return (yield from self._enrolment.setup(now, cohort))

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Send the model, and move it."""
        trained, buffers = modules.trainable(self._model), modules.running_buffers(self._model)
        shapes: dict[str, tuple[int, ...]] = {"loss": ()}
        shapes |= {f"gradient/{name}": tuple(value.shape) for name, value in trained.items()}
        shapes |= {f"buffer/{name}": tuple(value.shape) for name, value in buffers.items()}
        aggregation = self._enrolment.aggregation
        wanted = aggregation.want(shapes, dict.fromkeys(shapes, self._limit), self._enrolment.most_weight)
        ask = TrainOn(stamp=now, parameters=modules.arrays(self._model), encoding=wanted.fraction_bits)
        total = yield from aggregation.sum(ask, wanted, query_of(ask, *self._enrolment.agreed).digest)
        if isinstance(total, Aborted):
            return total
        with self.phase("update"):
            gradients = {name: total.means[f"gradient/{name}"] for name in trained}
            means = {name: total.means[f"buffer/{name}"] for name in buffers}
            clipped = self._stepper.step(gradients, now.round, means)
        figures = {"rows": float(total.weight), "ring_step": max(total.steps.values())}
        return Report({"loss": float(total.means["loss"])} | figures | clipped)

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Release the model as it is: every silo has seen it anyway."""
        parameters = modules.arrays(self._model)
        outcome = Outcome(parameters=parameters, released=parameters)
        return (yield from self._enrolment.scored(now, outcome, parameters))

    def state(self) -> State:
        """Return the model, norms of earlier rounds, and what was agreed once."""
        model = {f"model/{name}": value for name, value in modules.arrays(self._model).items()}
        return {**model, **self._stepper.state(), **self._enrolment.state()}

    def restore(self, state: State) -> None:
        """Take up what `state` returned."""
        modules.load(self._model, under("model/", state))
        self._stepper.restore(state)
        self._enrolment.restore(state)
