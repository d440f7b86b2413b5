"""The server's role: it asks for loss differences, rebuilds the gradient from the directions, and steps."""

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from moretta.contract.messages import Array, Stamp, Tensors
from moretta.contract.roles import Aborted, Exchange, Outcome, Phase, Report, State, no_phase, over, under
from moretta.contract.wording import LARGE_TARGETS
from moretta.errors import ParameterError
from moretta.protocols.baffle import batch_statistics
from moretta.protocols.baffle.params import BAFFLE
from moretta.protocols.baffle.silo import blocks
from moretta.protocols.baffle.silo.client import BUFFER
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.estimate import Combine, Parts, check_sigma, directions_of, forwards_of, gradient
from moretta.protocols.baffle.silo.forward import Layout
from moretta.protocols.baffle.silo.messages import Estimate
from moretta.protocols.baffle.silo.recipe import Recipe
from moretta.protocols.baffle.silo.seeds import SERVER, Seed, agree, parameter_hash
from moretta.protocols.common import modules
from moretta.protocols.common.accountant import Accountant, excess_of
from moretta.protocols.common.clipping import SummedStep
from moretta.protocols.common.enrolment import Enrolment
from moretta.protocols.common.losses import usable_density
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.training import Training
from moretta.secure_aggregation.sums import Sum, query_of


class Server:
    """BAFFLE's server.

    Args:
        recipe: The silos' settings.
        setting: Its limit is the largest |x_k|.
        graph_of: Exports the model to ONNX in a precision, for silos that run it.
        accountant: If silos add noise, states their privacy; they then upload no loss.
        combine: Adds directions up, on a device perhaps.
    """

    def __init__(
        self,
        params: BAFFLE,
        recipe: Recipe,
        setting: Setting,
        layout: Layout,
        enrolment: Enrolment,
        graph_of: Callable[[str], bytes],
        accountant: Accountant | None = None,
        combine: Combine = Directions.combine,
    ) -> None:
        self.phase: Phase = no_phase
        self._params, self._recipe, self._layout, self._enrolment = params, recipe, layout, enrolment
        self._model, rounds = copy.deepcopy(setting.model), setting.spec.run.rounds
        # The epoch level's silos have taken their steps: the server moves by the mean difference itself.
        stepping = Training(learning_rate=1.0) if recipe.local_epochs else params
        self._stepper = SummedStep(self._model, stepping, rounds)
        self._secure, self._rounds = setting.secure_aggregation, rounds
        self._graph_of, self._accountant, self._combine = graph_of, accountant, combine
        self._seed = Seed(SERVER, setting.root("server"))
        self._statistics = batch_statistics.shapes(self._model) if params.batch_statistics else {}
        self._average = self._parameters().astype(np.float64)
        if params.ema and params.ema_each == "epoch" and params.epoch_rounds > rounds:
            raise ParameterError(
                f'ema-each = "epoch" averages after each {params.epoch_rounds} rounds (epoch-rounds), and the run '
                f"has {rounds}; lower epoch-rounds"
            )
        self._forwards = 0

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Agree with the cohort, also on the seed of the directions."""
        check_sigma(self._recipe.sigma, self._parameters())
        aborted = yield from self._enrolment.setup(now, cohort)
        if aborted is not None:
            return aborted
        agreed = yield from agree(now, cohort, self._seed, self._layout, self._graph_of)
        if isinstance(agreed, Aborted):
            return agreed
        self._enrolment.agreed = (*self._enrolment.agreed, *agreed)
        return None

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Move the model along the estimate from the silos' loss differences."""
        aggregation, at = self._enrolment.aggregation, self._parameters()
        if not np.isfinite(at).all():
            raise ParameterError(
                f"the parameters are no longer finite before round {now.round}: training has diverged; lower "
                f"learning-rate or set clip-norm, or begin {LARGE_TARGETS}"
            )
        k = self._recipe.most if self._recipe.blocks else self._params.k_of(now.round, self._rounds)
        shapes = self._shapes(k) | {f"{BUFFER}{name}": shape for name, shape in self._statistics.items()}
        most = self._enrolment.most_weight
        if self._accountant is None:
            request = aggregation.want(shapes, dict.fromkeys(shapes, self._secure.largest), most)
        else:
            request = self._accountant.want(aggregation, shapes, self._secure, most)
        ask = Estimate(
            stamp=now,
            parameters=at,
            parameter_hash=parameter_hash(self._layout, at),
            k=k,
            encoding=request.fraction_bits,
        )
        exchange = aggregation.sum(ask, request, query_of(ask, *self._enrolment.agreed, self._seed.seed).digest)
        if self._accountant is not None:  # another cohort has another seed, and so other noise on other scalars
            exchange = self._accountant.counted(exchange, now, ask.parameter_hash, self._seed.seed, k)
        total = yield from exchange
        if isinstance(total, Aborted):
            return total
        with self.phase("update"):
            step, figures = self._read(ask, total)  # figures bound the error of fixed point in an entry of the step
            means = {name: total.means[f"{BUFFER}{name}"] for name in self._statistics}
            buffers = batch_statistics.stepped(self._model, means) if means else {}
            figures |= self._stepper.step(self._layout.split(step), now.round, buffers)
            self._follow(now.round)
        self._forwards += 1 if self._recipe.blocks else forwards_of(self._recipe.form, k)
        validation = yield from self._enrolment.validation(now, lambda: self._trained(self._averaged()), total.silos)
        return Report(figures | {"k": float(k), "rows": float(total.weight), **excess_of(total), **validation})

    def _shapes(self, k: int) -> dict[str, tuple[int, ...]]:
        if self._recipe.local_epochs:
            return {"difference": (self._layout.size,), **({} if self._accountant else {"loss": ()})}
        spoken = 0 if self._accountant else 2 if self._recipe.loss.class_weights else 1
        if self._recipe.own_directions:
            return dict(Parts.of(self._layout).shapes(spoken))
        if self._recipe.blocks:
            units = Parts.of(self._layout, self._recipe.units).shapes(0) if self._recipe.units else {}
            return {"scalars": (self._recipe.scalars + spoken,), **units}
        return {"scalars": (directions_of(self._recipe.form, k) + spoken,)}

    def _read(self, ask: Estimate, total: Sum) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Return the step's direction, float64[n], and the figures of the round."""
        recipe, stamp = self._recipe, ask.stamp
        if recipe.local_epochs:
            loss = {"loss": float(total.means["loss"])} if "loss" in total.means else {}
            return total.means["difference"], loss | {"ring_step": total.steps["difference"]}
        if recipe.own_directions:
            estimate, spoken, ring_step = Parts.of(self._layout).read(total)
            density = self._density(spoken, ring_step)
            return estimate / density, {"loss": float(spoken[0]) / density, "ring_step": ring_step / density}
        about = (stamp.run, stamp.round, ask.parameter_hash)
        if recipe.blocks:
            return self._read_blocks(total, recipe.keys(self._seed.seed, *about))
        directions = recipe.directions(ask.k, self._layout.size, self._seed.seed, *about)
        derivatives, spoken = np.split(total.means["scalars"], [directions.count])
        density = self._density(spoken, total.steps["scalars"])
        figures = {"loss": float(spoken[0]) / density} if len(spoken) else {}
        figures["ring_step"] = total.steps["scalars"] / density * directions.count * directions.largest
        figures["ring_step"] /= directions.count - (recipe.form == "mean")
        return gradient(recipe.form, derivatives / density, directions, self._combine), figures

    def _read_blocks(self, total: Sum, keys: Sequence[bytes]) -> tuple[NDArray[np.float64], dict[str, float]]:
        recipe, estimate = self._recipe, None
        scalars, spoken = np.split(total.means["scalars"], [recipe.scalars])
        density, ring_step = self._density(spoken, total.steps["scalars"]), total.steps["scalars"]
        if recipe.units:
            estimate, _, step = Parts.of(self._layout, recipe.units).read(total)
            ring_step = max(ring_step, step)
        along = blocks.gradient(recipe.blocks, self._layout, scalars, estimate, keys) / density
        figures = {"loss": float(spoken[0]) / density} if len(spoken) else {}
        return along, figures | {"ring_step": ring_step / density}

    def _density(self, spoken: NDArray[np.float64], step: float) -> float:
        """Return a row's mean weight, if rows weigh by class."""
        return 1.0 if len(spoken) < 2 else usable_density(float(spoken[1]), step, self._recipe.loss.class_weights)

    def _parameters(self) -> Array:
        trained = modules.trainable(self._model)
        return self._layout.flat({name: value.detach().cpu().numpy() for name, value in trained.items()})

    def _follow(self, number: int) -> None:
        """Let the average follow the parameters.

        Differs from the paper, whose coefficient is constant: after t rounds the start would still weigh ema^t. The
        authors' code limits it too, by epochs.
        """
        most = number / (number + 9)
        if self._params.ema_each == "epoch" and self._params.ema:
            epochs, early = divmod(number, self._params.epoch_rounds)
            if early:
                return
            most = (1 + epochs) / (10 + epochs)
        self._average += (1.0 - min(self._params.ema, most)) * (self._parameters() - self._average)

    def _averaged(self) -> dict[str, Array]:
        model = copy.deepcopy(self._model)
        self._set(model, self._average)
        return modules.arrays(model)

    @torch.no_grad()
    def _set(self, model: nn.Module, parameters: Array) -> None:
        trained = modules.trainable(model)
        for name, value in self._layout.split(parameters).items():
            trained[name].copy_(torch.tensor(value))

    def _trained(self, parameters: Tensors) -> Tensors:
        """Return the trained tensors; silos have the fixed ones."""
        return {name: parameters[name] for name in self._layout.shapes}

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Release the averaged model as it is, because silos have seen every model in the average."""
        facts: dict[str, float | str] = {"sigma": self._recipe.sigma}
        if not self._recipe.local_epochs:
            facts["forwards"] = float(self._forwards)  # of each silo's batch
            if self._recipe.blocks:
                facts["moves"] = float(self._recipe.most * self._forwards)  # each runs the layers after its block
        if self._accountant is not None:
            facts |= self._accountant.facts(self._accountant.releases.count, self._shapes(self._recipe.most))
        parameters = self._averaged()
        outcome = Outcome(parameters=parameters, released=parameters, facts=facts)
        return (yield from self._enrolment.scored(now, outcome, self._trained(parameters)))

    def state(self) -> State:
        """Return the averaged model, the stepped one, the optimizer, and the run's agreement."""
        return {
            **over("model/", self._averaged()),
            "parameters": self._parameters(),
            "average": self._average.copy(),
            "forwards": self._forwards,
            **over("seed/", self._seed.state()),
            **self._stepper.state(),
            **self._enrolment.state(),
            **(self._accountant.releases.state() if self._accountant else {}),
        }

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self._set(self._model, np.asarray(state["parameters"]))
        buffers = dict(self._model.named_buffers())
        for name in batch_statistics.moving(self._model) if self._statistics else ():
            buffers[name].copy_(torch.tensor(np.asarray(state[f"model/{name}"])))
        self._average = np.array(state["average"], dtype=np.float64)
        if self._accountant is not None:
            self._accountant.releases.restore(state)
        # A run that returns to its best round has still asked in the later ones.
        self._forwards = max(self._forwards, int(state["forwards"]))
        self._seed.restore(under("seed/", state))
        self._stepper.restore(state)
        self._enrolment.restore(state)
