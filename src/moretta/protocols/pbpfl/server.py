"""The server of PBPFL: it perturbs the model, asks silos, recovers the gradient, and steps."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from moretta.contract import roles
from moretta.contract.messages import Stamp
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Outcome, Phase, Reason, Report, State, over
from moretta.errors import PeerError
from moretta.protocols.common import modules
from moretta.protocols.common.clipping import RunningMedian, SummedStep
from moretta.protocols.common.enrolment import Enrolment
from moretta.protocols.common.losses import density_of
from moretta.protocols.common.setting import Setting
from moretta.protocols.pbpfl import ratios, softmax
from moretta.protocols.pbpfl.messages import BlindedSoftmax, Predictions, Ratios, Softmax, TrainOn
from moretta.protocols.pbpfl.params import PBPFL
from moretta.protocols.pbpfl.perturbation import Key, Perturbation
from moretta.protocols.pbpfl.scales import ScalePlan
from moretta.protocols.pbpfl.sizes import Sizes, agreed, outliers, rms, sizes_of, within
from moretta.protocols.pbpfl.terms import bounded_alpha
from moretta.protocols.pbpfl.work import Trunk
from moretta.secure_aggregation.keystream import Keystream, SecretRoot, digest_of
from moretta.secure_aggregation.sums import query_of, spent_of

SYNTHETIC_ROWS = 256
SYNTHETIC_NUMBERS = 1 << 15  # inputs per pass through the model, at least 8 rows
LEAST_ROWS = 8


@dataclass(frozen=True)
class Exchanged:
    """The result of the exchange under cross-entropy.

    Attributes:
        answers: By silo.
        true: The server's view of each silo's batch, empty for blinded ratios.
        sizes: The median over silos.
        left_out: Silos with sizes out of proportion to the others', or predictions without an answer.
    """

    answers: Mapping[str, Softmax | BlindedSoftmax]
    true: Mapping[str, softmax.TrueSoftmax]
    sizes: Sizes
    left_out: Mapping[str, Missing]


def largest_rho(model: nn.Module, plan: ScalePlan, loss: str, sizes: Sizes, error: float) -> float:
    """Return the largest |alpha r| / |y| from which float32 recovers the gradient to about 1e-4.

    Rounding is amplified at two places. At the head the factor is the ratio of noisy to true error: rho^2 |y| / |e|
    under the squared error, rho under cross-entropy. Below the head the corrections' cotangents are the same for all H
    inputs of the head. The factor is their norm over that of e W: |r|^2 alpha sqrt(H) / |e W|, or |r| sqrt(H) / |W|,
    for each of the L layers that they pass. The constants are measured (`docs/models-measured.md`).

    Args:
        loss: "mse" or "cross-entropy".
        sizes: Of alpha and of the outputs, |y|.
        error: |e|, the rms of y - t, for the squared error.
    """
    head, weight = plan.head, plan.head.effective(model)
    layers = sum(parameter.dim() > 1 for parameter in model.parameters()) - 1 or 1
    norm = max(float(weight.detach().norm()), 0.3 * math.sqrt(head.outputs))  # a head may begin at 0
    if loss == "cross-entropy":
        below = 8000.0 / layers * sizes.alpha * norm / (sizes.outputs * math.sqrt(head.inputs * head.outputs))
        return min(10.0, below)
    below = 800.0 / layers * sizes.alpha * norm / (sizes.outputs**2 * head.outputs * math.sqrt(head.inputs))
    return math.sqrt(error * min(144.0 / sizes.outputs, below))


class Server:
    """Holds the true model; the silos see it perturbed by a fresh key every round.

    The server holds the model, steps it and writes checkpoints in float64 (with scales of powers of two in the run's
    dtype); `Perturbation.perturb` explains why. Silos receive it, also at the release, in the run's dtype.

    Args:
        setting: Its limit is the largest |value| in an upload of the noisy loss's gradient. Those of the corrections
            are rms(alpha) and rms(alpha)^2 times as large.
        plan: The scales of the model.
    """

    def __init__(self, params: PBPFL, setting: Setting, plan: ScalePlan, enrolment: Enrolment) -> None:
        self.phase: Phase = roles.no_phase
        self._params, self._dtype = params, setting.dtype
        model = copy.deepcopy(setting.model) if params.scales == "powers-of-two" else setting.start()
        self._model = model.train()
        self._tensors = self._model.state_dict(keep_vars=True)  # the tensors themselves, which each step changes
        self._perturbation = Perturbation(plan, params.partitions, params.form, params.scales)
        self._trained, self._buffers = modules.trainable(self._model), modules.running_buffers(self._model)
        self._stepper = SummedStep(self._model, params, setting.spec.run.rounds)
        self._enrolment, self.setup, self._root = enrolment, enrolment.setup, setting.root("server")
        self._limit, self._sample_shape = setting.secure_aggregation.largest, setting.row_shape
        self._layout = setting.layout
        self._sizes: Sizes | None = None  # of the last round; None before the first
        self._so_far = {"alpha": RunningMedian(), "outputs": RunningMedian()}  # they bound the next sizes
        self._loss = float("inf")

    def round(self, now: Stamp) -> Exchange[Report | Aborted]:
        """Run the algorithm of `practical.md`, section III: perturb, sum, recover, step."""
        aggregation = self._enrolment.aggregation
        with self.phase("perturbation"):
            sizes, rho, key = self._drawn(now)
            noisy = self._enrolment.moving(self._perturbation.perturb(self._tensors, key, self._dtype))
        request = aggregation.want(*self._uploads(sizes.alpha), self._enrolment.most_weight)
        exchanged: Exchanged | None = None
        encoding = request.fraction_bits if self._params.loss == "mse" else {}
        ask = TrainOn(stamp=now, parameters=noisy, parts=key.parts, direction=key.direction, encoding=encoding)
        if self._params.loss != "mse":
            ended = yield from self._exchange(ask, key, request.fraction_bits, sizes)
            if isinstance(ended, Aborted):
                return ended
            exchanged = ended
        expected = query_of(ask, *self._enrolment.agreed).digest
        total = yield from aggregation.sum(exchanged.answers if exchanged else ask, request, expected)
        left_out = exchanged.left_out if exchanged else {}
        if isinstance(total, Aborted):
            return Aborted({**total.missing, **left_out}, total.because, total.opened)
        del ask, noisy  # as large as the model
        density = density_of(total, self._params.class_weights)
        with self.phase("update"):
            gradient = self._perturbation.recover(total.means, key, in_place=True)
            for value in gradient.values():
                np.divide(value, density, out=value)  # in their own memory
            gradient = self._perturbation.plan.head.chained(gradient, self._model)
            buffers = self._perturbation.recover_buffers(total.means, key) if self._buffers else {}
            clipped = self._stepper.step(gradient, now.round, buffers)
        if exchanged:
            measured = exchanged.sizes
        else:  # the last of the squared error's scalars is beta, mean(alpha^2 / 2)
            positions = self._perturbation.plan.head.positions
            alpha = float(np.sqrt(2.0 * max(total.means["scalars"][-1], 0.0) / positions))
            measured = Sizes(alpha, self._enrolment.target_scale)
        self._sizes = within(measured, self._so_far)
        figures = {"rows": float(total.weight), "rho": rho, **clipped}
        figures["ring_step"] = self._perturbation.largest_step(total.steps, key) / density
        if self._params.variant == "paper" and (self._params.class_weights or self._params.exchange == "ratios"):
            # The loss is -u . y + U log sum exp(y) by row. U, the row's class weight, would reveal its label; blinded
            # ratios show no y.
            return Report(figures, left_out)
        log_normaliser = 0.0
        if exchanged:  # only silos in the sum count, as some may have been lost since the exchange
            each = [exchanged.true[silo].log_normaliser for silo in total.silos]
            log_normaliser = float(np.concatenate(each).mean())
        self._loss = self._perturbation.true_loss(total.means, key, log_normaliser) / density
        return Report({"loss": self._loss, **figures}, left_out)

    def key(self, now: Stamp) -> Key:
        """Return the coming round's key, the same for every attempt at a take; the server's secret."""
        return self._drawn(now)[-1]

    def _drawn(self, now: Stamp) -> tuple[Sizes, float, Key]:
        """Return sizes, rho (the setting's, or less for recovery in float32) and the key."""
        sizes, rho = self._sizes or self._synthetic_sizes(now), self._params.rho
        if self._dtype != torch.float64:
            loss = self._loss if np.isfinite(self._loss) else 0.0
            numbers = len(self._perturbation.parts) * self._perturbation.plan.head.positions
            error = float(np.sqrt(2.0 * max(loss, 0.0) / numbers)) or sizes.outputs
            rho = min(rho, largest_rho(self._model, self._perturbation.plan, self._params.loss, sizes, error))
        stream = self._root.stream("perturbation", now.run, *now.drawn)
        return sizes, rho, self._perturbation.draw_key(stream, rho * sizes.outputs / sizes.alpha)

    def _deltas(self, now: Stamp, silo: str, predictions: Predictions | Ratios) -> Keystream:
        """Return the keystream of a silo's deltas. Answers to different predictions never share deltas.

        A silo accepts one answer in a take, so the same predictions get the same answer in every attempt. Ratios have
        new lambdas in each attempt, so there the same alphas get the same deltas.
        """
        seen = {"z": predictions.z} if isinstance(predictions, Predictions) else {}
        predicted = digest_of({**seen, "alpha": predictions.alpha})
        return self._root.stream("delta", now.run, *now.drawn, silo, predicted)

    def _exchange(
        self, ask: TrainOn, key: Key, encoding: Mapping[str, int], last: Sizes
    ) -> Exchange[Exchanged | Aborted]:
        """Collect noisy predictions and answer with the softmax of the true ones, which a silo cannot form.

        Blinded ratios show the server no outputs. It then takes their size from the model on synthetic inputs.
        """
        blinded, outputs, now = self._params.exchange == "ratios", len(key.parts), ask.stamp

        def check(silo: str, predictions: Predictions | Ratios) -> None:
            got, what = (predictions.words, "ratios of ") if isinstance(predictions, Ratios) else (predictions.z, "")
            if got.shape[1] != outputs:
                raise PeerError(f"expected {what}{outputs} outputs a row, got {got.shape[1]}")

        replies = yield Ask.all(self._enrolment.cohort, ask, Ratios if blinded else Predictions, check)
        if spent := spent_of(replies):
            return Aborted(spent)
        if not replies.answers:
            return Aborted(replies.missing)
        with self.phase("perturbation"):
            predicted, true = replies.answers, dict[str, softmax.TrueSoftmax]()
            if blinded:
                size = self._synthetic_sizes(now).outputs
                reported = {silo: Sizes(rms(predictions.alpha), size) for silo, predictions in predicted.items()}
            else:
                true = {silo: softmax.true_softmax(predictions, key.offset) for silo, predictions in predicted.items()}
                reported = {silo: sizes_of(batch) for silo, batch in true.items()}
            left_out, answers = outliers(reported, agreed(reported, last)), dict[str, Softmax | BlindedSoftmax]()
            for silo in [silo for silo in predicted if silo not in left_out]:
                deltas = self._deltas(now, silo, predicted[silo])
                try:
                    answers[silo] = (
                        ratios.answer(predicted[silo], key, deltas, encoding)
                        if blinded
                        else softmax.answer(true[silo], key, self._params.variant, deltas, now, encoding)
                    )
                except PeerError as error:
                    left_out[silo] = Missing(Reason.MALFORMED, str(error))
        if not answers:
            return Aborted({**replies.missing, **left_out})
        return Exchanged(answers, true, agreed({silo: reported[silo] for silo in answers}, last), left_out)

    def _synthetic_sizes(self, now: Stamp) -> Sizes:
        """Return the model's sizes on inputs drawn with the silos' common mean and deviation."""
        stream = self._root.stream("synthetic inputs", now.run, now.round)
        rows = min(SYNTHETIC_ROWS, max(LEAST_ROWS, SYNTHETIC_NUMBERS // math.prod(self._sample_shape)))
        inputs, batches = self._synthetic_inputs(stream, rows), list[tuple[torch.Tensor, torch.Tensor]]()
        # A copy, because a forward in train mode moves running statistics. A key scales it as in a round, because the
        # outputs of a normalisation may sum to 0 without scales.
        key, head = self._perturbation.draw_key(stream, offset_size=0.0), self._perturbation.plan.head
        noisy = self._perturbation.perturb(self._tensors, key, self._dtype)
        model = modules.with_tensors(self._model, noisy, self._dtype)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):  # for dropout
            torch.default_generator.manual_seed(0)
            trunk = Trunk(model, head)
            for start in range(0, SYNTHETIC_ROWS, rows):
                batches.append(trunk.forward(self._synthetic_inputs(stream, rows) if start else inputs))
        h, outputs = (torch.cat(parts) for parts in zip(*batches, strict=True))
        alpha = bounded_alpha(h, bias=head.bias is not None)
        if self._params.loss == "mse":
            return Sizes(alpha, self._enrolment.target_scale)
        centred = outputs.double() - outputs.double().mean(dim=1, keepdim=True)
        return Sizes(alpha, float(centred.square().mean().sqrt()) or 1.0)

    def _synthetic_inputs(self, stream: Keystream, rows: int) -> torch.Tensor:
        mean, deviation = self._enrolment.input_scale
        shape = (rows, *self._sample_shape)
        tables = [
            module.num_embeddings
            for module in self._model.modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        ]
        if tables and deviation == 0 and self._layout is None:  # tokens: they have no scale
            return torch.from_numpy((stream.uniform(math.prod(shape)) * min(tables)).astype(np.int64).reshape(shape))
        drawn = stream.normal(math.prod(shape)).reshape(shape)
        inputs = mean + deviation * drawn
        if self._layout is not None:
            inputs[:, self._layout.standardised] = drawn[:, self._layout.standardised]
            inputs = self._layout.plausible(inputs, min(tables, default=2))
        return torch.from_numpy(inputs).to(self._dtype)

    def _uploads(self, alpha: float) -> tuple[dict[str, tuple[int, ...]], dict[str, float]]:
        head, m, form = self._perturbation.plan.head, self._params.partitions, self._perturbation.form
        once, twice = self._limit * max(1.0, alpha), self._limit * max(1.0, alpha**2)
        limits = {"noisy": self._limit} | {f"sigma/{s}": once for s in range(m)}
        uploads: dict[str, tuple[tuple[int, ...], float]] = {}
        if form == "squared-error":
            limits["beta"] = twice
            whole = twice * head.positions  # they add up over positions
            uploads = {"scalars": ((m + 2,), whole), "alpha_h": ((head.inputs + (head.bias is not None),), whole)}
        elif form == "probabilities":
            uploads = {"scalars": ((1,), self._limit)}
        else:
            limits |= {f"beta/{s}": once for s in range(m)} | {f"psi/{s}": self._limit for s in range(m)}
            uploads = {"scalars": ((m + 1,), once)}
        for name, parameter in self._trained.items():
            if name == head.magnitude:
                continue  # its gradient follows from that of W
            above = name in head.above
            prefixes = ("noisy", *(["psi"] if form == "paper" else [])) if above else tuple(limits)
            uploads |= {f"{p}/{name}": (tuple(parameter.shape), limits.get(p, self._limit)) for p in prefixes}
        for name, buffer in self._buffers.items():
            uploads[f"buffer/{name}"] = (tuple(buffer.shape), self._limit)
        if self._params.class_weights:
            uploads["density"] = ((), self._limit)
        return {n: shape for n, (shape, _) in uploads.items()}, {n: limit for n, (_, limit) in uploads.items()}

    def finish(self, now: Stamp) -> Exchange[Outcome | Aborted]:
        """Release R o W without offset: exact predictions for every silo (`practical.md`, section III-D)."""
        key = self._perturbation.draw_key(self._root.stream("release", now.run, now.round), offset_size=0.0)
        plan = self._perturbation.plan
        facts: dict[str, float | str] = {
            "free_scales": float(plan.positive),
            "forced_to_one": float(len(plan.forced)),
        }
        if plan.signs:
            facts["free_signs"] = float(len(plan.signs))
        if frozen := [parameter for parameter in self._model.parameters() if not parameter.requires_grad]:
            facts["frozen"] = float(len(frozen))
        if self._params.exchange == "ratios":
            facts["outputs"] = float(len(key.parts))  # ratios hide a softmax of two only
        released = self._perturbation.perturb(self._tensors, key, self._dtype)
        outcome = Outcome(
            parameters=modules.arrays(self._model, self._dtype),
            released=released,
            facts=facts,
            unperturbed={forced.tensor: forced.because for forced in plan.forced},
        )
        return (yield from self._enrolment.scored(now, outcome, released))

    def state(self) -> State:
        """Return model, optimizer, the secret root, and the next key's other inputs."""
        model = over("model/", modules.arrays(self._model))
        sizes = {} if self._sizes is None else {"alpha": self._sizes.alpha, "outputs": self._sizes.outputs}
        seen: State = {"loss": self._loss, "secret_root": self._root.reveal(), **sizes}
        medians = {f"sizes/{name}": np.array(median.seen) for name, median in self._so_far.items()}
        return {**model, **self._stepper.state(), **self._enrolment.state(), **medians, **seen}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        modules.load(self._model, roles.under("model/", state))
        self._stepper.restore(state)
        self._enrolment.restore(state)
        self._sizes = Sizes(state["alpha"], state["outputs"]) if "alpha" in state else None
        self._so_far = {name: RunningMedian(state[f"sizes/{name}"]) for name in self._so_far}
        self._loss, self._root = float(state["loss"]), SecretRoot(state["secret_root"])
