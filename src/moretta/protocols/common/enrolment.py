"""The set-up that all protocols with a server share: keys, common statistics, and agreement on the model.

    server                                          silo
      test rows are not trained on           <->      (`moretta.protocols.common.overlap`), where their ids are known
      keys of the secure sum                 <->      (`moretta.secure_aggregation`)
      mean and deviation by column           <->      through the secure sum, once a run; where values may be absent
                                                      also the number of values, and histograms of median columns
      Begin(model, schema, preparation)      -->
                                             <--    Ready, or a refusal that names the difference

Who learns what: every silo and the server learn the mean and standard deviation, over all silos, of each input column
and each target that is standardised. Where values are absent, they learn the values filled in. The server also learns
how many values a column has. For a column whose median is filled in it learns the numbers of rows in 64 equal parts of
its range. Under PBPFL the server also learns the statistics of all inputs together and of the targets, with their
numbers. Where rounds use all rows, it learns their number once a run; silos that were not counted cannot join. These
sums show no silo's own figures.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moretta.contract.lazy_rows import LazyRows, loaded
from moretta.contract.messages import Array, Message, Stamp, Tensors
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Outcome, Reason, State, over, under
from moretta.contract.wording import LEAST_SHOWN
from moretta.data.look import shown, total
from moretta.data.tables.preparation import ColumnRules, Preparation, usable
from moretta.errors import PeerError, RowsError
from moretta.protocols.common import modules, scoring
from moretta.protocols.common.augmentation import varied
from moretta.protocols.common.batches import most_rows
from moretta.protocols.common.frozen import Frozen, brought
from moretta.protocols.common.modules import Inputs, LazyTensor
from moretta.protocols.common.overlap import Comparison
from moretta.protocols.common.passes import WHOLE, Passes
from moretta.protocols.common.scoring import Question
from moretta.protocols.common.setting import Setting
from moretta.protocols.common.silo_rows import Begin, Ready, TrainingRows
from moretta.protocols.common.statistics import CLASSES, TARGETS, Counted, Statistics, restored
from moretta.protocols.common.targets import encode
from moretta.secure_aggregation.keyed_sums import Aggregator, Contributor
from moretta.secure_aggregation.keystream import digest_of
from moretta.secure_aggregation.statistics import FLAT, MAY_LACK, Moments, counts, histograms, median_of, moments
from moretta.secure_aggregation.sums import message_digest

log = logging.getLogger("moretta")
T = TypeVar("T")

MOST_ROWS = 2**32  # all silos' rows in a round of all rows; in Z_2^64 that leaves steps of 2^-15 at limit = 2^16

_LATE = Missing(
    Reason.REFUSED,
    "it was not there when rows were counted, which is done once a run, so it cannot join a run whose rounds use all "
    "rows (batch-size = 0)",
)


def prepared(x: NDArray[np.generic], preparation: Preparation, dtype: torch.dtype) -> Tensor:
    """Return prepared inputs (`Preparation.apply`), as a new tensor."""
    return torch.tensor(preparation.apply(loaded(x), _numpy(dtype)))


def inputs_of(x: NDArray[np.generic], preparation: Preparation, dtype: torch.dtype, device: str = "cpu") -> Inputs:
    """Return the same on a device; lazy rows are prepared by batch."""
    rows: Any = x
    if isinstance(rows, LazyRows):
        return LazyTensor(rows, lambda read: prepared(read, preparation, dtype).to(device))
    return prepared(x, preparation, dtype).to(device)


def fitted_alone(x: NDArray[np.generic], rules: ColumnRules, y: NDArray[np.generic] | None = None) -> Preparation:
    """Return the preparation that `Enrolment` fits over silos, for rows of one party.

    Args:
        x: [rows, ..., columns]; NaN is an absent value.
        y: Targets to scale, [rows, outputs]; None leaves them.

    Raises:
        RowsError: A column has no value.
        ParameterError: A target is constant.
    """
    if y is not None:
        wide = y.astype(np.float64)
        mean, deviation = wide.mean(axis=0), wide.std(axis=0)
        return fitted_alone(x, rules).scaling(mean, np.where(deviation > FLAT * np.abs(mean), deviation, 0.0))
    if not rules.fitted:
        return Preparation.nothing()
    columns = x.astype(np.float64).reshape(-1, x.shape[-1])
    there = ~np.isnan(columns)
    if not there.any(axis=0).all():
        raise RowsError(f"column {int(np.argmin(there.any(axis=0)))} (counted from 0) has no value; leave it out")
    mean, deviation = np.nanmean(columns, axis=0), np.nanstd(columns, axis=0)
    deviation = np.where(deviation > FLAT * np.abs(mean), deviation, 0.0)
    fill = mean.copy()
    fill[rules.medians] = np.nanmedian(columns[:, rules.medians], axis=0)
    return _of(rules, fill, mean, deviation)


def _of(
    rules: ColumnRules,
    fill: NDArray[np.float64],
    mean: NDArray[np.float64],
    deviation: NDArray[np.float64],
) -> Preparation:
    """Return the preparation by rules and statistics: fills only where values may be absent, scales only where set."""
    scaled = rules.scaled
    return Preparation(
        np.where(rules.fills > 0, fill, 0.0), np.where(scaled, mean, 0.0), np.where(scaled, usable(deviation), 1.0)
    )


class SiloRows:
    """A silo's rows as tensors, its batches and its half of the enrolment.

    Args:
        of: the rows as arrays; lazy ones are read by batch.
        augment: how images are varied at each use (`varied`); empty for none.
        passes: how the rows of a batch pass through a model.
        frozen: the untrained parts of the server's model.
    """

    def __init__(
        self,
        of: TrainingRows,
        dtype: torch.dtype,
        device: str = "cpu",
        *,
        augment: str = "",
        passes: Passes = WHOLE,
        frozen: Frozen | None = None,
    ) -> None:
        self.frozen = frozen or Frozen({})
        self.of, self.dtype, self.device, self.augment, self.passes = of, dtype, device, augment, passes
        self.answers, self.batches = of.answers, of.batches
        self.take_up()

    def take_up(self) -> None:
        """Prepare rows as `of` has agreed."""
        self.x, self.y = self._prepared(self.of.x), torch.from_numpy(self.of.prepared.scaled(self.of.y)).to(self.device)

    @property
    def agreed(self) -> Sequence[bytes]:
        """Digests of what the set-up agreed on."""
        return *self.of.agreed, *self.frozen.agreed

    def _prepared(self, x: NDArray[np.generic]) -> Inputs:
        return inputs_of(x, self.of.prepared, self.dtype, self.device)

    def prepare_alone(self, rules: ColumnRules, *, targets: bool = False) -> Preparation:
        """Prepare by the silo's own columns, and targets, which no other party has; return the preparation."""
        self.of.prepared = fitted_alone(self.of.x, rules, self.of.y if targets else None)
        self.take_up()
        return self.of.prepared

    def batch(self, number: int, take: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of round `number`, counted from 1, and of a take of it: `Stamp.drawn`."""
        return self.rows(self.batches.of_round(number, take))

    def rows(self, index: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some rows; call it within `randomness` if inputs are varied."""
        rows = torch.from_numpy(index).to(self.y.device)
        return varied(self.x[rows], self.augment) if self.augment else self.x[rows], self.y[rows]

    def answer(
        self, message: Message, contributor: Contributor, model: nn.Module, statistics: Statistics | None = None
    ) -> Message:
        """Answer a message of the set-up, or an ask for a score of `model`, whose weights that overwrites.

        Args:
            statistics: Those for the message's group; None for the silo's.

        Raises:
            MisuseError: The message is another.
        """
        if (answer := self.frozen.answer(message) or contributor.answer(message)) is not None:
            return answer
        if isinstance(message, Question):
            if message.parameters:
                modules.load(model, self.frozen.beside(message.parameters))
            return self.score(message, contributor, model)
        reply = self.of.answer(message, contributor, statistics)
        if isinstance(reply, Ready):
            self.take_up()
        return reply

    def score(
        self,
        ask: Question,
        contributor: Contributor,
        model: nn.Module,
        blind: bytes | None = None,
        agreed: Sequence[bytes] | None = None,
        own: bytes = b"",
    ) -> Message:
        """Upload a model's score on the held-out or the validation rows.

        Args:
            blind: As the contributor's.
            agreed: Digests that the silos of the sum agreed on; None for the set-up's.
            own: A digest of the silo's own model.
        """
        held = self.of.scored(ask)
        outputs = modules.outputs_of(model, self._prepared(held.x)).cpu().numpy()
        outputs = self.of.prepared.unscaled(outputs)
        agreed = self.agreed if agreed is None else agreed
        return held.upload(ask, contributor, outputs, agreed, blind, own)

    @property
    def generators(self) -> list[torch.Generator]:
        """Torch's generators for dropout and augmentation."""
        cuda = self.device.startswith("cuda")
        return [torch.default_generator] + (
            [torch.cuda.default_generators[torch.device(self.device).index or 0]] if cuda else []
        )

    @contextmanager
    def randomness(self, number: int, take: int = 0) -> Iterator[None]:
        """Seed torch for a round and take (`Stamp.drawn`), for dropout, and restore its generator afterwards.

        The seed follows from seed, silo, round and take, so that a resumed run repeats an uninterrupted one's draws.
        """
        drawn = [number, take] if take else [number]
        seed = np.random.SeedSequence([*self.batches.entropy, *drawn]).generate_state(1, np.uint64)
        # Not torch.manual_seed: without a GPU it formats a stack trace at every call, a third of a millisecond.
        generators = self.generators
        saved = list(map(torch.Generator.get_state, generators))
        for generator in generators:
            generator.manual_seed(int(seed[0] >> np.uint64(1)))
        try:
            yield
        finally:
            for generator, state in zip(generators, saved, strict=True):
                generator.set_state(state)


class Enrolment:
    """The server's half: all that it has agreed with the cohort.

    Args:
        columns: How input columns are prepared.
        batch_size: 0 for all of a silo's rows.
        statistics: The closed list of those that silos are asked for.
        comparison: Of silos' rows with the server's test rows, if their subjects are known.
        sends_model: Whether rounds send the model; its frozen part then travels in the set-up alone.

    Attributes:
        figures: Of the score at the end, empty for no score.
        most_weight: Of the cohort, an upper bound of a round's rows.
    """

    def __init__(
        self,
        setting: Setting,
        aggregation: Aggregator,
        columns: ColumnRules,
        batch_size: int,
        statistics: Statistics,
        comparison: Comparison | None = None,
        *,
        sends_model: bool = False,
    ) -> None:
        self._frozen = modules.frozen(setting.model) if sends_model else {}
        self._frozen_digest = (digest_of(self._frozen),) if self._frozen else ()
        self._setting, self.statistics = setting, statistics
        self.figures, self._validated = setting.figures, setting.validated
        self.aggregation, self._rules, self._batch_size, self._comparison = aggregation, columns, batch_size, comparison
        self._schema, self._table = modules.schema(setting.model), setting.spec.table_digest
        self._validators = tuple[str, ...]()  # the silos of all validations of a run
        self.counted: Counted | None = None
        self._has_statistics = False
        self._centers = dict[str, NDArray[np.float64]]()  # of squares, by matrix: a silo answers for one
        self._rows, self._counted = 0, tuple[str, ...]()
        self.cohort: Sequence[str] = ()
        self.agreed: Sequence[bytes] = ()  # digests of what the set-up agreed on
        self.most_weight = 0
        self.preparation = Preparation.nothing()
        self.input_scale, self.target_scale = (0.0, 1.0), 1.0

    def setup(self, now: Stamp, cohort: Sequence[str]) -> Exchange[Aborted | None]:
        """Agree on keys, statistics (once a run), the number of rows (where rounds use all) and the model."""
        if late := set(cohort) - set(self._counted) if self._counted else ():
            return Aborted(dict.fromkeys(sorted(late), _LATE))
        aborted = None if self._comparison is None else (yield from self._comparison.run(now, cohort))
        if aborted is None:
            aborted = yield from self.aggregation.setup(now, cohort)
        if aborted is None and not self._batch_size and not self._counted:
            aborted = yield from self._count_rows(now)
        if aborted is None and not self._has_statistics:
            aborted = yield from self._gather_statistics(now)
        if aborted is not None:
            return aborted
        begin = Begin.of(now, self._schema, self._table, self.preparation)
        replies = yield Ask.all(cohort, begin, Ready)
        if replies.missing:
            return Aborted(replies.missing)
        for digest in self._frozen_digest:
            if (aborted := (yield from brought(now, cohort, self._frozen, digest))) is not None:
                return aborted
        self.cohort, self.agreed = tuple(cohort), (message_digest(begin), *self._frozen_digest)
        self.most_weight = self.aggregation.parties * most_rows(self._batch_size) or self._rows
        return None

    def moving(self, parameters: Tensors) -> dict[str, Array]:
        """Return a model's tensors without those that the set-up sent."""
        return {name: value for name, value in parameters.items() if name not in self._frozen}

    def scored(self, now: Stamp, outcome: Outcome, parameters: Tensors) -> Exchange[Outcome | Aborted]:
        """Return the outcome with its score on the silos' held-out rows, if requested; the end of a server's `finish`.

        Args:
            parameters: The released ones; empty if each silo scores its own model.
        """
        if not self.figures:
            return outcome
        parameters = self.moving(parameters)
        try:
            figures = yield from scoring.score(self.aggregation, now, parameters, self.figures, self.agreed)
        except PeerError as error:  # a finished run does not fail because one silo sent an impossible score
            log.warning("%s: the score on rows that silos hold back is left out: %s", now, error)
            return outcome
        if isinstance(figures, Aborted):
            return outcome if refused_by_all(figures, self.aggregation.cohort, now) else figures
        scores, silos = figures
        tables = (
            (yield from self._tables(now, parameters, silos, scores[scoring.ROWS]))
            if scoring.TABLES in self.figures
            else {}
        )
        return replace(outcome, scores=scores, tables=tables)

    def validation(
        self, now: Stamp, parameters: Callable[[], Tensors], summed: Sequence[str]
    ) -> Exchange[dict[str, float]]:
        """Return the score of a round's new model on the silos' validation rows, as figures of the round.

        Args:
            parameters: Returns the model's, if it is scored.
            summed: The silos in the round's own sum.

        Returns:
            Empty if no score is due, if `summed` are not the silos of the first score (`scoring`), or if the score
            fails.
        """
        if not self._validated or not self._setting.spec.run.evaluates(now.round):
            return {}
        self._validators = self._validators or tuple(sorted(self.cohort))
        if away := sorted(set(self._validators) ^ set(summed)):
            log.warning("%s: the model is not validated, which takes all silos of the first time: %s", now, away)
            return {}
        moving = self.moving(parameters())
        asked = scoring.score(self.aggregation, now, moving, self._validated, self.agreed, validates=True)
        scores = yield from _dispensable(asked, f"{now}: the model is not validated")
        return {} if scores is None else over("validation_", scores[0])

    def _tables(self, now: Stamp, parameters: Tensors, scored: Sequence[str], rows: float) -> Exchange[Tensors]:
        """Return the tables of all silos; empty if one is missing, as nothing is repeated for them.

        scored: the silos of the score, with these rows; they help to open tables over no other set.
        """
        if lost := sorted(set(self.aggregation.cohort) - set(scored)):
            log.warning("%s: the tables of classes are left out: no score is known of %r", now, lost)
            return {}
        asked = scoring.tables(self.aggregation, now, parameters, max(2, self._setting.outputs), self.agreed, rows)
        return (yield from _dispensable(asked, f"{now}: the tables of classes are left out")) or {}

    def _count_rows(self, now: Stamp) -> Exchange[Aborted | None]:
        """Count the cohort's rows at most once a run: counts over two cohorts would show the difference's rows."""
        counted = yield from moments(self.aggregation, now, 0, what="rows")
        if isinstance(counted, Aborted):
            return counted
        # One silo's count, hidden in the sum, can coarsen everybody's ring step. This bounds by how much.
        self._rows, self._counted = min(counted.rows, MOST_ROWS), tuple(self.aggregation.cohort)
        return None

    def _look(self, now: Stamp, classes: int) -> Exchange[Aborted | None]:
        class_counts = yield from counts(self.aggregation, now, classes, CLASSES)
        if isinstance(class_counts, Aborted):
            return class_counts
        self.counted = Counted(*class_counts)
        by_class = f", by class {', '.join(map(str, shown(class_counts[1], LEAST_SHOWN)))}" if classes > 1 else ""
        log.info("%s: %s rows to train on at all silos together%s", now, total(class_counts[1], LEAST_SHOWN), by_class)
        return None

    def _gather_statistics(self, now: Stamp) -> Exchange[Aborted | None]:
        """Request the statistics of the list, matrix by matrix, except rows, which are counted before."""
        for what, (columns, of, may_lack) in self.statistics.matrices.items():
            if what == "rows":
                continue
            aborted = yield from (
                self._look(now, columns) if what == CLASSES else self._find(now, what, columns, of, may_lack)
            )
            if aborted is not None:
                return aborted
        self._has_statistics = True
        return None

    def _find(self, now: Stamp, what: str, columns: int, of: Sequence[int], may_lack: bool) -> Exchange[Aborted | None]:
        """Compute a matrix's mean and deviation, and the preparation. columns, of, may_lack: as `moments`."""
        indices = np.array(of, np.int64)
        found_moments = yield from moments(
            self.aggregation, now, columns, what, may_lack=may_lack, of=indices, centers=self._centers
        )
        if isinstance(found_moments, Aborted):
            return found_moments
        if what == MAY_LACK:
            return (yield from self._fit(now, found_moments))
        if what == TARGETS:
            self.preparation = self.preparation.scaling(found_moments.mean, found_moments.deviation)
        elif what == "inputs":
            self.input_scale = (float(found_moments.mean[0]), float(found_moments.deviation[0]))
        else:
            self.target_scale = float(np.hypot(found_moments.mean[0], found_moments.deviation[0])) or 1.0
        return None

    def _fit(self, now: Stamp, inputs: Moments) -> Exchange[Aborted | None]:
        """Set the preparation of columns, and the scale of all prepared inputs together."""
        rules, layout = self._rules, self._setting.layout
        if layout is not None:  # ids, masks and images have no statistics
            part = Preparation(np.zeros(len(inputs.mean)), inputs.mean, usable(inputs.deviation))
            self.preparation = Preparation.nothing(rules.columns).joined(layout.standardised.tolist(), part)
            return None
        if self.counted is not None:
            self.counted = self.counted.among(inputs)
        fill, of = inputs.mean.copy(), rules.medians
        if of.size:
            counts = yield from histograms(self.aggregation, now, of, rules.low[of], rules.high[of], MAY_LACK)
            if isinstance(counts, Aborted):
                return counts
            fill[of] = median_of(counts, rules.low[of], rules.high[of])
        self.preparation = _of(rules, fill, inputs.mean, inputs.deviation)
        self.input_scale = (0.0, 1.0) if rules.scaled.all() else _scale_of_all(inputs, self.preparation)
        return None

    def state(self) -> State:
        """Return what was agreed for the whole run; keys are agreed anew."""
        return {
            **over("input_", self.preparation.figures),
            "scales": np.array([*self.input_scale, self.target_scale]),
            "has_statistics": int(self._has_statistics),
            "rows": self._rows,
            "counted": "\n".join(self._counted),
            **({"validators": "\n".join(self._validators)} if self._validators else {}),
            **(self.counted.state() if self.counted else {}),
        }

    def restore(self, state: State) -> None:
        """Restore what `state` returned."""
        self._has_statistics = bool(state["has_statistics"])
        self.counted = restored(state)
        self._rows, self._counted = int(state["rows"]), tuple(filter(None, state["counted"].split("\n")))
        self._validators = tuple(filter(None, state.get("validators", "").split("\n")))
        self.preparation = Preparation.loads(under("input_", state))
        mean, deviation, self.target_scale = (float(value) for value in np.asarray(state["scales"]))
        self.input_scale = (mean, deviation)


def _scale_of_all(inputs: Moments, prepared: Preparation) -> tuple[float, float]:
    """Return mean and deviation of all inputs together, prepared."""
    there = inputs.present / inputs.rows
    mean = (inputs.mean - prepared.mean) / prepared.deviation
    filled = (prepared.fill - prepared.mean) / prepared.deviation
    middle = there * mean + (1 - there) * filled
    squares = there * ((inputs.deviation / prepared.deviation) ** 2 + mean**2) + (1 - there) * filled**2
    whole = float(middle.mean())
    return whole, float(np.sqrt(max(float(squares.mean()) - whole**2, 0.0)))


def _dispensable(asked: Exchange[T | Aborted], opening: str) -> Exchange[T | None]:
    """Return the result of a dispensable exchange; None, after a warning with this `opening`, if it aborts."""
    try:
        outcome = yield from asked
    except PeerError as error:
        why = str(error)
    else:
        if not isinstance(outcome, Aborted):
            return outcome
        why = "; ".join(f"silo `{silo}`: {gone.reason}: {gone.detail}" for silo, gone in outcome.missing.items())
    log.warning("%s: %s", opening, why)
    return None


def refused_by_all(ended: Aborted, cohort: Sequence[str], now: Stamp) -> bool:
    """Return whether every silo refused a score, as after a restart with another model; the run ends without one."""
    whys = [ended.missing.get(silo) for silo in cohort]
    if not all(why is not None and why.reason is Reason.REFUSED for why in whys):
        return False
    log.warning("%s: the score on rows that silos hold back is left out: %s", now, whys[0] and whys[0].detail)
    return True


def targets(y: NDArray[np.generic], outputs: int, loss: str, silo: str, dtype: torch.dtype) -> Tensor:
    """Return a silo's targets encoded for the loss (`targets.encode`), as a tensor."""
    return torch.from_numpy(encode(y, outputs, loss, silo, _numpy(dtype)))


def _numpy(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
