"""The silo's role, with any runner of its model. Neither this module nor its imports need torch.

**Noise on a silo's K scalars** hides whether one row was present, as a row's contribution to them is bounded. In a
round, silo c has the lot S_c (`moretta.protocols.common.batches`), of expected size L_c:

    i in S_c   x_i = the row's own x_1 .. x_K;   x_i <- x_i / max(1, |x_i| / C)
    upload     (sum_i x_i + whole steps of noise, of variance z^2 C^2 / S) / L_c, with the weight L_c

z is dp-noise, C dp-clip, and S the fewest silos of any opened sum
(`moretta.secure_aggregation.settings.SecureAggregation.sharing_noise`); `moretta.protocols.common.lattice` has the
steps. All roles know the directions, which follow from earlier releases. So a round is the sampled Gaussian mechanism
of K numbers, for every K (`moretta.protocols.common.accountant`). No loss is uploaded. Lot and noise follow from the
secret root and from all that the scalars depend on, as in `moretta.protocols.fedsgd.private`; here also the model's
graph, the seed of the directions, and K.

At the epoch level noise hides the silo: its whole difference is clipped and noised, as under federated averaging
(`moretta.protocols.common.noise.SiloNoise.of_update`).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import DTypeLike, NDArray

from moretta.contract.messages import Array, Message
from moretta.contract.roles import Answering, InSteps, Phase, State, no_phase, over, under
from moretta.contract.wording import LARGE_TARGETS
from moretta.errors import MisuseError, ParameterError, PeerError, RowsError
from moretta.protocols.baffle.silo import messages
from moretta.protocols.baffle.silo.blocks import Differences, MovesBlocks
from moretta.protocols.baffle.silo.directions import Directions
from moretta.protocols.baffle.silo.estimate import Combine, Parts, check_sigma, directions_of
from moretta.protocols.baffle.silo.forward import Forward, Normalises
from moretta.protocols.baffle.silo.messages import RUNS_TORCH, Agree, Estimate
from moretta.protocols.baffle.silo.recipe import LocalSteps, Recipe
from moretta.protocols.baffle.silo.seeds import Seed, agreed_graphs, parameter_hash
from moretta.protocols.baffle.silo.work import BlockWork, LossWork
from moretta.protocols.common.augmentation import cropped
from moretta.protocols.common.noise import SiloNoise, Sums
from moretta.protocols.common.scoring import Question, Score, Validate
from moretta.protocols.common.silo_setup import SiloSetup
from moretta.protocols.common.statistics import without_noise
from moretta.secure_aggregation.keystream import SecretRoot
from moretta.secure_aggregation.sums import Query, query_of


def noise_of(setup: SiloSetup, root: SecretRoot) -> SiloNoise | None:
    """Return the noise of a silo; None without any. root: of lots and noise."""
    if setup.privacy is None:
        return None
    return SiloNoise(setup.privacy, len(setup.x), setup.batch_size, root, setup.bound, setup.groups)


def noised_mean(
    noise: SiloNoise,
    derivatives: NDArray[np.float64],
    encoding: Mapping[str, int],
    *purpose: int | str | bytes,
    sizes: Sequence[int] = (),
    sums: Sums | None = None,
) -> NDArray[np.float64]:
    """Return the upload, float64[K], of the rows' scalars.

    A row whose scalars are not finite counts as 0, so that its overflow of the model stays hidden.

    Args:
        derivatives: [K, rows].
        encoding: How the sum will be rounded.
        sizes: The consecutive rows of each contribution, whose mean is clipped; () is one row each.
        sums: As of `moretta.protocols.common.noise.SiloNoise.noised`.
    """
    exact = _finite(derivatives)
    if sizes and len(sizes) < exact.shape[1]:
        with np.errstate(over="ignore"):  # a group whose sum overflows counts as 0 too
            exact = _finite(np.add.reduceat(exact, np.cumsum([0, *sizes[:-1]]), axis=1) / sizes)
    clipped = exact / np.maximum(1.0, np.linalg.norm(exact, axis=0) / noise.privacy.clip)
    return noise.noised({"scalars": clipped.sum(axis=1)}, encoding, *purpose, sums=sums)["scalars"]


def _finite(scalars: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scalars, [K, rows], with 0 for all of a row that has NaN or infinity."""
    return np.where(np.isfinite(scalars).all(axis=0), scalars, 0.0)


BUFFER = "buffer/"  # of BatchNorm's statistics in an upload

Estimated = NDArray[np.float64]


class NotFinite(RowsError):
    """Losses, parameters or moments of a silo are NaN or infinite."""


class Client:
    """Answers `Estimate` with its batch's loss differences, or its estimate, or at the epoch level its summed steps.

    Args:
        setup: the silo's input.
        recipe: of its uploads.
        forward: runs the model; if None, `load` makes it from the ONNX graph that the server sends at set-up.
        insecure: for tests, the root of all secrets; None draws them from the operating system.
        runs: `RUNS_TORCH`, or the precision of the graph.
        model: a digest of `forward`'s computation apart from its parameters, to which noise is bound; for a graph from
            the server, the graph's.
        combine: adds the silo's own directions up, on a device perhaps.
    """

    def __init__(
        self,
        setup: SiloSetup,
        recipe: Recipe,
        forward: Forward | None = None,
        insecure: SecretRoot | None = None,
        *,
        load: Callable[[bytes], Forward] | None = None,
        runs: str = RUNS_TORCH,
        model: bytes = b"",
        combine: Combine = Directions.combine,
    ) -> None:
        self.phase: Phase = no_phase
        root, name, noise = insecure or SecretRoot.fresh(), setup.name, insecure or SecretRoot.fresh()
        self._recipe, self._name, self._forward, self._rows = recipe, name, forward, setup.rows()
        self._contributor, self._load, self._runs = setup.contributor(insecure), load, runs
        self._private, self._half_done = noise_of(setup, noise), setup.half_done(recipe.checkpoint_minutes)
        self._seed, self._computes, self._combine, self._steps = Seed(name, root), model, combine, recipe.steps()

    @InSteps
    def answer(self, message: Message) -> Answering:
        """Answer one message; the losses of a batch may be computed together with other silos'."""
        return (yield from self._estimate(message)) if isinstance(message, Estimate) else self._answer(message)

    def privacy(self) -> Mapping[str, float | str]:
        """Return the privacy of the silo's own rows, by its own count of releases; empty without noise."""
        if self._private is None:
            return {}
        return self._private.facts(without_noise(self._rows.answers.names(self._private.run)))

    def first_batch(self, dtype: DTypeLike) -> tuple[Array, Array]:
        """Return inputs and targets of the first round, for measuring memory."""
        return self._rows.take(self._rows.batches.of_round(1), dtype)

    def _answer(self, message: Message) -> Message:
        match message:
            case messages.Commit():
                members = self._contributor.members or message.cohort
                if self._name not in message.cohort or set(members) != set(message.cohort):
                    raise PeerError(
                        f"expected the {len(members)} silos of the secure sum, this one among them, got "
                        f"{len(message.cohort)} others"
                    )
                commitment = self._seed.begin(message.stamp.run, message.cohort)
                return messages.Committed(stamp=message.stamp, commitment=commitment, runs=self._runs)
            case messages.Reveal():
                return messages.Revealed(stamp=message.stamp, contribution=self._seed.reveal(message.commitments))
            case Agree():
                digest = self._seed.agree(message.contributions)
                self._check_layout(message)
                self._rows.agreed = (*self._rows.agreed, *agreed_graphs(message.graphs))
                return messages.Agreed(stamp=message.stamp, digest=digest)
            case Score() | Validate():
                return self._score(message)
        with self.phase("aggregation"):
            return self._rows.answer(message, self._contributor)

    def _check_layout(self, message: Agree) -> None:
        if self._load is not None:
            if not message.graph.size:
                raise PeerError("this silo runs ONNX and was sent no graph; expected one at set-up")
            graph = message.graph.tobytes()
            self._computes = hashlib.sha256(graph).digest()
            if message.graphs.get(self._runs) != self._computes:
                raise PeerError("expected the graph whose digest all silos received, got another; nothing was computed")
            self._forward = self._load(graph)
            if isinstance(self._forward, MovesBlocks) and not self._recipe.blocks:
                self._recipe = self._recipe.by(self._forward.blocks, self._forward.layout.shapes)
        if self._forward is None or self._forward.layout.digest != message.layout:
            what = "the ONNX graph" if self._load is not None else "the silo's model"
            raise ParameterError(
                f"{what} has other tensors, or other fixed ones, than the server's model; expected the same"
            )

    def _estimate(self, ask: Estimate) -> Answering:
        if self._forward is None or not self._seed.seed:
            raise MisuseError("expected a set-up before the first round")
        layout, at = self._forward.layout, ask.parameters
        if at.shape != (layout.size,) or at.dtype != layout.dtype:
            raise PeerError(f"expected {layout.size} parameters of {layout.dtype}, got {at.dtype}{list(at.shape)}")
        if ask.parameter_hash != parameter_hash(layout, at):
            raise PeerError(
                "the round's parameter hash does not fit these parameters in this silo's model; expected the model, "
                "or the ONNX graph, of this set-up"
            )
        most = self._recipe.most
        if self._recipe.blocks and ask.k != most:
            raise PeerError(f"expected {most} moves of the model's blocks, as this silo is set, got {ask.k}")
        if ask.k > most:
            raise PeerError(f"expected a K of at most {most}, as this silo is set, got {ask.k}")
        check_sigma(self._recipe.sigma, at)
        purpose: tuple[int | str | bytes, ...] = (ask.stamp.run, ask.stamp.round, ask.parameter_hash)
        if self._recipe.local_epochs:
            return self._upload_epochs(ask, self._forward, purpose)
        if self._private is not None:
            return self._upload_in_private(ask, self._private, self._forward, purpose)
        about = self._asked(ask, whole=self._rows.batches.whole)
        index = self._rows.batches.of_round(*ask.stamp.drawn)
        if self._recipe.own_directions:
            purpose += ask.stamp.drawn[1:]  # each take has its own
        work = self._work(self._forward, at, index, ask.k, purpose)
        statistics = self._statistics(self._forward, work)
        derivatives, estimate, loss = self._means(work, (yield work))
        if self._recipe.own_directions:
            with self.phase("update"):
                whole = work.gradient(derivatives, estimate)
            tensors = Parts.of(layout).tensors(self._name, whole, loss)
        else:
            tensors = {"scalars": np.concatenate([derivatives, loss])}
            if estimate is not None:
                parts = Parts.of(layout, self._recipe.units)
                tensors |= parts.tensors(self._name, parts.taken(estimate), np.zeros(0))
        with self.phase("aggregation"):
            return self._contributor.upload(ask.stamp, tensors | statistics, len(index), ask.encoding, asked=about)

    def _statistics(self, forward: Forward, work: LossWork | BlockWork) -> dict[str, Array]:
        """Return BatchNorm's statistics at the unmoved parameters, if they are uploaded."""
        if not self._recipe.batch_statistics or not isinstance(forward, Normalises):
            return {}
        with self.phase("local_forward"):
            statistics = forward.statistics(work.at, work.inputs)
        return {f"{BUFFER}{name}": value for name, value in statistics.items()}

    def _asked(self, ask: Estimate, *, whole: bool) -> Query:
        """Return the query of an upload: the ask, the set-up's agreement, and the seed of the directions.

        whole: the same rows in each take; never under noise: each take has its own, and counts.
        """
        about = query_of(ask, *self._rows.agreed, self._seed.seed, whole=whole)
        if self._private is not None:
            about = Sums.of(self._contributor, about).asked
        self._contributor.check(ask.stamp, about)
        return about

    def _means(
        self, work: LossWork | BlockWork, differences: Differences
    ) -> tuple[Estimated, Estimated | None, Estimated]:
        """Return the batch's x_k, float64[K], the estimate of layers of units, float64[n], if any, and the loss.

        If classes have weights, the loss is followed by the mean weight of rows.
        """
        means, loss, estimate = differences.derivatives.mean(axis=1), differences.losses.mean(), differences.estimate
        weights = self._recipe.loss.weights(work.targets)
        whole = means if estimate is None else np.concatenate([means, estimate])
        if not np.isfinite(whole).all() or not np.isfinite(loss):
            raise NotFinite(
                f"the losses of silo `{self._name}` are NaN or infinite in some of {len(whole)} directions; look at "
                "its rows, or lower learning-rate or sigma"
            )
        density = weights.mean() if self._recipe.loss.class_weights else 1.0
        if self._recipe.clip_entry:
            largest = float(np.abs(work.gradient(means, estimate)).max()) / density
            kept = min(1.0, self._recipe.clip_entry / (largest or 1.0))
            means, estimate = means * kept, None if estimate is None else estimate * kept
        return means, estimate, np.array([loss, density] if self._recipe.loss.class_weights else [loss])

    def _work(
        self, forward: Forward, at: Array, index: NDArray[np.int64], k: int, purpose: tuple[int | str | bytes, ...]
    ) -> LossWork | BlockWork:
        recipe = self._recipe
        inputs, targets = self._rows.take(index, at.dtype)
        if recipe.augment:  # once, before losses are compared; repeated asks get the same rows
            rng = np.random.Generator(np.random.PCG64([*self._rows.batches.entropy, int(purpose[1]), *index.tolist()]))
            inputs = cropped(inputs, recipe.augment, rng)
        seed = self._seed.own() if recipe.own_directions else self._seed.seed
        if recipe.blocks:
            if not isinstance(forward, MovesBlocks):
                raise MisuseError("expected a model that was cut into blocks")
            return BlockWork(recipe, forward, at, inputs, targets, recipe.keys(seed, *purpose), self.phase)
        directions = partial(recipe.directions, k, forward.layout.size, seed, *purpose)
        about = (k, seed, *purpose)
        return LossWork(recipe, forward, at, inputs, targets, directions, about, self.phase, self._combine)

    def _upload_in_private(
        self, ask: Estimate, private: SiloNoise, forward: Forward, purpose: tuple[int | str | bytes, ...]
    ) -> Message:
        """Upload the noised scalars alone: no loss, no number of rows."""
        sums = Sums(self._contributor, self._asked(ask, whole=False))
        drawn = private.purpose(ask.stamp, *self._follows_from(ask, self._seed.seed))
        private.uploading(ask.stamp, drawn[-1], sums=sums)
        index, sizes = private.lot_of(*drawn)
        if len(index):
            derivatives = self._work(forward, ask.parameters, index, ask.k, purpose).alone().derivatives
        else:
            derivatives = np.zeros((self._recipe.scalars or directions_of(self._recipe.form, ask.k), 0))
        scalars = noised_mean(private, derivatives, ask.encoding, *drawn, sizes=sizes, sums=sums)
        with self.phase("aggregation"):  # never out of range (`BAFFLE.BETWEEN`)
            return private.upload(ask.stamp, {"scalars": scalars}, ask.encoding, sums)

    def _follows_from(self, ask: Estimate, seed: bytes) -> tuple[int | bytes, ...]:
        return self._computes, self._rows.digest, ask.parameter_hash, seed, ask.k

    def lot(self, ask: Estimate, seed: bytes, graph: bytes = b"") -> NDArray[np.int64]:
        """Return the indices of the rows that an ask draws, for an audit's scorer. graph: of a silo that runs one."""
        if self._private is None:
            return self._rows.batches.of_round(ask.stamp.round)
        self._computes = hashlib.sha256(graph).digest() if graph else self._computes
        return self._private.rows_of_lot(*self._private.purpose(ask.stamp, *self._follows_from(ask, seed)))

    def _upload_epochs(self, ask: Estimate, forward: Forward, purpose: tuple[int | str | bytes, ...]) -> Message:
        """Take steps along the silo's own estimates, and upload the difference: with the mean loss, or noise alone."""
        about = self._asked(ask, whole=self._private is None)
        try:
            difference, loss = self._own_steps(ask, forward, purpose)
        except NotFinite:
            self._steps.begin(ask.stamp.round)  # the moments at the round's start
            if self._private is None:
                raise
            difference, loss = np.zeros(forward.layout.size), 0.0  # an overflow of the model stays hidden
        upload = {"difference": difference}
        with self.phase("aggregation"):
            if self._private is not None:
                sums, follows = Sums(self._contributor, about), self._follows_from(ask, self._seed.seed)
                return self._private.upload_update(ask.stamp, upload, ask.encoding, sums, *follows)
            upload["loss"] = np.asarray(loss)
            return self._contributor.upload(ask.stamp, upload, self._rows.batches.rows, ask.encoding, asked=about)

    def _own_steps(
        self, ask: Estimate, forward: Forward, purpose: tuple[int | str | bytes, ...]
    ) -> tuple[Estimated, float]:
        """Take the round's steps, each with directions of its own; return the difference and the mean loss."""
        recipe, batches, number = self._recipe, self._rows.batches, ask.stamp.round
        at, total, counted, steps = ask.parameters.copy(), 0.0, 0.0, 0
        self._steps.begin(number)
        if kept := self._half_done.begin(*purpose, self._rows.digest, ask.k):
            at, total, counted, steps = kept["at"].copy(), kept["loss"], kept["counted"], kept["steps"]
            self._steps.restore(under("steps/", kept))
        epochs = range((number - 1) * recipe.local_epochs, number * recipe.local_epochs)
        indices = [index for epoch in epochs for index in batches.of_epoch(epoch)]
        for index in indices[steps:]:
            own = (*purpose, self._name, steps)
            work = self._work(forward, at, index, ask.k, own)
            means, estimate, loss = self._means(work, work.alone())
            with self.phase("update"):
                density = loss[1] if len(loss) > 1 else 1.0  # rows weigh by class
                self._steps.step(at, work.gradient(means, estimate) / density, recipe.rates[number - 1])
            total, counted = total + loss[0] * len(index), counted + density * len(index)
            steps += 1
            if steps < len(indices):  # the last of them is the upload
                self._half_done.keep(partial(self._halfway, at, total, counted, steps))
        if not np.isfinite(at).all() or not self._steps.finite:
            raise NotFinite(
                f"the parameters of silo `{self._name}` are no longer finite after its own steps; lower learning-rate "
                f"or set clip-norm, or begin {LARGE_TARGETS}"
            )
        return ask.parameters.astype(np.float64) - at, total / counted

    def _halfway(self, at: Array, total: float, counted: float, steps: int) -> State:
        moments = over("steps/", self._steps.state())
        return {"at": at, "loss": float(total), "counted": float(counted), "steps": steps, **moments}

    def _score(self, ask: Question) -> Message:
        """Upload the trained parameters' score on the held-out rows, a batch's rows at a time."""
        forward, rows, held_out = self._forward, self._rows, self._rows.scored(ask)
        if forward is None:
            raise MisuseError("was asked for a score before the set-up")
        layout = forward.layout
        if {name: array.shape for name, array in ask.parameters.items()} != layout.shapes:
            raise PeerError(f"expected the {len(layout.shapes)} tensors that are trained, got {len(ask.parameters)}")
        at, step = layout.flat(ask.parameters)[None], len(rows.batches.of_round(1))
        outputs_of = []
        for start in range(0, len(held_out.x), step):
            chunk = rows.prepared.apply(held_out.x[start : start + step], layout.dtype)
            outputs_of.append(forward.outputs(at, chunk)[0])
        outputs = rows.prepared.unscaled(np.concatenate(outputs_of))
        return held_out.upload(ask, self._contributor, outputs, rows.agreed)

    @property
    def _parts(self) -> dict[str, Seed | SiloNoise | LocalSteps]:
        parts = {"seed/": self._seed, "private/": self._private, "steps/": self._steps}
        return {prefix: part for prefix, part in parts.items() if part is not None}

    def state(self) -> State:
        """Return the root of contributions, lots and noise, commitments answered, releases, and Adam's moments."""
        return {f"{prefix}{key}": value for prefix, part in self._parts.items() for key, value in part.state().items()}

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        for prefix, part in self._parts.items():
            part.restore(under(prefix, state))
