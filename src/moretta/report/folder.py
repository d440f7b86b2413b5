"""A finished run folder, read into a frozen record.

It reads `result.json` (the outcome), `history.jsonl` (a line a round), `rows.json` (digests) and, after an audit,
`audit.json`. Their keys are the run folder's contract; unknown keys are ignored, so that a newer engine may add some
within the same format.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from moretta.data.silo import HELD_OUT, TEST
from moretta.engines.files import read_file
from moretta.engines.run_folder import ROWS_BY_SILO
from moretta.errors import ParameterError
from moretta.protocols.common.severity import Severity, is_whole

FORMAT = 1
"""The version of the run folder that this module reads."""


TEST_ROWS = "test rows"
"""The background of an audit that used only the run's own test rows."""


LEADING = ("auc", "balanced_accuracy", "average_precision")
UNEVEN = 0.1  # classes are uneven if the commonest exceeds an even share by this fraction of the rows


def is_finite(value: float | None) -> bool:
    """Return whether a run has a finite number; its files have null, or in earlier versions NaN, for any other."""
    return value is not None and math.isfinite(value)


class _Part(BaseModel):
    """A frozen part of a run folder; types are not coerced, unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", populate_by_name=True)


class PlainScores(_Part):
    """A loss, and an accuracy or an mse."""

    loss: float | None = None
    accuracy: float | None = None
    mse: float | None = None


class SiloScore(PlainScores):
    """One silo's rows and the model's scores on them; None if the run has no number."""

    rows: int | None = None
    metrics: Mapping[str, float | None] = {}


class ClassScore(_Part):
    """One class: its rows, the rows with this prediction, and its scores, None if they are not numbers."""

    name: str = Field(alias="class")
    rows: int
    predicted: int
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None


class SureRows(_Part):
    """Rows whose predicted class has a probability from `low` to `high`: their mean, and how many are correct."""

    low: float = Field(alias="from")
    high: float = Field(alias="to")
    rows: int
    probability: float
    accuracy: float


class ClassTables(_Part):
    """A classifier's tables.

    Attributes:
        confusion: A row for each true class; empty with too many classes.
        reliability: The bins that have rows.
    """

    by_class: tuple[ClassScore, ...]
    confusion: tuple[tuple[int, ...], ...] = ()
    reliability: tuple[SureRows, ...] = ()

    @model_validator(mode="after")
    def _fits(self) -> "ClassTables":
        count = len(self.by_class)
        if self.confusion and {len(self.confusion), *map(len, self.confusion)} != {count}:
            raise ValueError(f"expected a confusion matrix of {count} classes")
        return self


class TestScores(PlainScores):
    """The model's scores on the test rows: accuracy (a fraction) for classes, mse for numbers; None without such rows.

    Args:
        per_silo: Scores of a shared model on each silo's training rows, or of each silo's own model on the test rows.
        mean: Under CGD the mean over the confined models; the other scores are then the worst model's.
        displacement: Under CGD the scores of D alone.
        by: "silos" if the scores are on rows that silos hold back.
        silos: The scores on those, if the server has test rows too.
        classes: Tables of a classifier, if they are of one model.
        units: The number of the rows' subjects.
        baseline: The accuracy of the commonest class, or the mean squared error of the mean.
        intervals: Of 95 %, by figure.
        curves: At equal steps from 0 to 1, recall by false alarms and precision by recall.
        seeds: The number of runs whose means the figures are; 0 for one run.
    """

    __test__ = False  # not a pytest class

    rows: float | None = None
    top5: float | None = None
    metrics: Mapping[str, float | None] = {}
    classes: ClassTables | None = None
    per_silo: Mapping[str, SiloScore] = {}
    mean: PlainScores | None = None
    displacement: PlainScores | None = None
    by: Literal["silos"] | None = None
    silos: PlainScores | None = None
    units: int | None = None
    baseline: float | None = None
    intervals: Mapping[str, tuple[float | None, float | None]] = {}
    curves: Mapping[str, tuple[float, ...]] = {}
    seeds: int = Field(default=0, exclude=True)

    @model_validator(mode="after")
    def _has_a_score(self) -> "TestScores":
        if not self.available and not (self.accuracy is None and self.mse is None):
            raise ValueError("an accuracy or an mse needs a loss beside it")
        return self

    @property
    def available(self) -> bool:
        """Whether the run had test rows, the server's or those that silos hold back."""
        return "loss" in self.model_fields_set  # null where training diverged

    @property
    def diverged(self) -> bool:
        """Whether the model's loss on these rows is not a finite number."""
        return self.available and not is_finite(self.loss)

    @property
    def shares(self) -> tuple[float, ...]:
        """Each class's fraction of the rows; empty if no table counts them."""
        counts = [row.rows for row in self.classes.by_class] if self.classes else []
        return tuple(count / sum(counts) for count in counts) if any(counts) else ()

    @property
    def headline(self) -> tuple[str, ...]:
        """The figures of a verdict: for uneven classes, those that the commonest class does not dominate."""
        uneven = bool(self.shares) and max(self.shares) > 1 / len(self.shares) + UNEVEN
        leading = (*(LEADING if uneven else ()), "accuracy", "mse" if self.accuracy is None else "")
        headed = tuple(key for key in leading if self.figure(key) is not None)
        return headed or ("position_accuracy" if "position_accuracy" in self.metrics else "loss",)

    def figure(self, key: str) -> float | None:
        """Return a score by its key in ``result.json``."""
        return self.metrics.get(key) if key not in ("accuracy", "mse", "loss") else getattr(self, key)

    def guessed(self, key: str) -> float | None:
        """Return the score of always naming the commonest class, or the mean of numbers; None if unknown."""
        shares = self.shares
        if key == "mse" or not shares:
            return self.baseline if key == ("mse" if self.accuracy is None else "accuracy") else None
        even = 1 / sum(share > 0 for share in shares)
        positive = shares[1] if len(shares) == 2 else 1 / len(shares)
        chances = {"accuracy": max(shares), "auc": 0.5, "balanced_accuracy": even, "average_precision": positive}
        return chances.get(key)


Size = Annotated[float, Field(ge=0.0, le=1e18)]  # neither infinite nor NaN, which no bar of a figure can be


class TrafficRecord(_Part):
    """Bytes: means over silos and rounds, and those of secure aggregation's keys and shares."""

    up_per_silo_per_round: Size
    down_per_silo_per_round: Size
    secure_aggregation: Size = 0.0


class MissedRound(_Part):
    """A silo that missed an answer of a round, and why."""

    round: int
    silo: str
    reason: str


class SumRecord(_Part):
    """A sum that silos helped to open, in some rounds: keys as in ``result.json`` (docs/run-folder.md)."""

    of: str
    take: int = 0
    group: str = ""
    used: bool = True
    silos: tuple[str, ...]
    rounds: tuple[int, ...]


class AggregationRecord(_Part):
    """The scheme of sums: `pairwise`, `none`, ...; ring_bits is `None` for a scheme without a ring."""

    scheme: str
    ring_bits: int | None = None


class RoundRecord(_Part):
    """One line of `history.jsonl`; only evaluated rounds have test scores."""

    round: int
    attempt: int = 0
    loss: float | None = Field(default=None, validation_alias=AliasChoices("loss", "scaled_loss"))
    test_loss: float | None = None
    test_accuracy: float | None = None
    test_mse: float | None = None
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    validation_mse: float | None = None
    epsilon: Annotated[float | None, BeforeValidator(lambda spent: None if spent == "unbounded" else spent)] = None


class PictureRecord(_Part):
    """A file of images in the run folder, reconstructed ones and true ones, with a caption."""

    file: str = Field(pattern=r"^audit/[A-Za-z0-9_-]+\.safetensors$")  # no other folder
    caption: str


class Attacked(_Part):
    """The result of one attack.

    Attributes:
        title: The attack's action, for people.
        score, chance, interval: None if they are not numbers.
        constant: The score of always naming the most frequent value; None without such a value.
        sentence: With its full stop.
    """

    attack: str
    title: str
    severity: Severity
    role: str
    view: str
    knowledge: str
    measure: str
    score: float | None
    chance: float | None
    constant: float | None = None
    interval: tuple[float | None, float | None]
    succeeded: bool
    seconds: float
    sentence: str
    figures: Mapping[str, float | None] = {}
    source: str = ""
    pictures: tuple[PictureRecord, ...] = ()

    @property
    def ended(self) -> str:
        """Its result, in words."""
        return "succeeded" if self.succeeded else "no evidence" if is_whole(*self.interval) else "failed"

    @property
    def advantage(self) -> float:
        """The score's part of the distance from chance to the highest score: 1 for the highest, 0 without a success.

        It compares attacks whose scores measure different things.
        """
        if self.score is None or self.chance is None or not self.succeeded:
            return 0.0
        return (self.score - self.chance) / (1.0 - self.chance) if self.chance < 1.0 else self.score


class NotRun(_Part):
    """An attack that did not run, or ended without a result, and why. title, severity: as in `Attacked`."""

    attack: str
    title: str
    severity: Severity
    role: str
    because: str


class AuditRecord(_Part):
    """`audit.json`: the results of attacks on the run's recorded views.

    Attributes:
        background: The attackers' rows, `TEST_ROWS` or the name of a file.
        switched_off: By key of the run file, the attacks that could run with that key's default.
    """

    run: str
    index: str = ""
    thorough: bool = False
    background: str = TEST_ROWS
    confined_by: Literal["kernel", "python"] = "python"
    views: tuple[int, ...] = ()
    attacks: tuple[Attacked, ...]
    not_run: tuple[NotRun, ...] = ()
    switched_off: Mapping[str, tuple[str, ...]] = {}


class ScoredRows(_Part):
    """`rows.json`: digests of the rows on which a run was scored; empty if the folder lacks them."""

    test: str = Field(default="", alias=TEST)
    at_silos: str = Field(default="", alias=HELD_OUT)


class RunRecord(_Part):
    """The record of a run: `result.json`, and `folder`, `history`, `audit` (or None) and `digests` by `read_run`."""

    folder: Path = Field(default=Path(), exclude=True)
    history: tuple[RoundRecord, ...] = Field(default=(), exclude=True)
    audit: AuditRecord | None = Field(default=None, exclude=True)
    digests: ScoredRows = Field(default=ScoredRows(), exclude=True)

    name: str
    run: str = ""
    protocol: str
    task: Literal["classification", "regression"]
    rounds: int
    silos: int
    silo_names: tuple[str, ...] = ()
    parameters: int
    test: TestScores
    traffic: TrafficRecord = Field(alias="bytes")
    seconds: Mapping[str, Size]
    dropped: tuple[MissedRound, ...] = ()
    sums: tuple[SumRecord, ...] | None = None
    versions: Mapping[str, str | None]
    secure_aggregation: AggregationRecord | None = None
    facts: Mapping[str, JsonValue] = {}
    warnings: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, JsonValue]] = {}
    insecure_secret_seed: bool = False
    views: str = ""

    @model_validator(mode="after")
    def _has_a_total(self) -> "RunRecord":
        if "total" not in self.seconds:
            raise ValueError("seconds has no total")
        return self

    @property
    def missed(self) -> tuple[MissedRound, ...]:
        """Silos that missed a whole round: they missed an answer and had no part in the round's result.

        If the run does not record the members of sums, all that missed an answer.
        """
        took_part = {
            (silo, number)
            for opened in self.sums or ()
            if opened.used and opened.of != "set-up"
            for number in opened.rounds
            for silo in opened.silos
        }
        return tuple(gone for gone in self.dropped if (gone.silo, gone.round) not in took_part)

    def scored_as(self, other: "RunRecord") -> bool:
        """Return whether both were scored on the same rows: by digests, or by their number if one has no digest."""
        key = "test" if self.test.by is None else "at_silos"
        own, theirs = getattr(self.digests, key), getattr(other.digests, key)
        counts = {self.test.rows, other.test.rows} - {None}
        return self.test.by == other.test.by and len(counts) < 2 and (own == theirs or not own or not theirs)

    @property
    def scales_targets(self) -> bool:
        """Whether the loss is of standardised targets."""
        return bool(self.setting("data", "standardise-targets"))

    @property
    def content(self) -> dict[str, Any]:
        """The record in the form of ``result.json``, on which claims depend."""
        return self.model_dump(by_alias=True)

    def setting(self, section: str, key: str) -> JsonValue:
        """Return the value of one key of the run file, None if the run did not record it."""
        return self.settings.get(section, {}).get(key)


class _Format(_Part):
    format: int


_P = TypeVar("_P", bound=_Part)


def read_run(folder: Path) -> RunRecord:
    """Read a finished run folder.

    An audit may be missing. One of another run is left out with a warning in the record.

    Raises:
        ParameterError: The folder or one of its files is missing, has another format version, or breaks the contract.
            The sentence names the file, the line and the key.
    """
    if not folder.is_dir():
        raise ParameterError(f"{folder} is not a run folder: there is no such directory.")
    file = folder / "result.json"
    record = _formatted(
        RunRecord, _read(file, "the run has not finished; continue it by `moretta train --resume`"), file
    )
    lines = folder / "history.jsonl"
    history = tuple(
        _parse(RoundRecord, line, f"{lines}, line {number},")
        for number, line in enumerate(_read(lines, "the folder is not whole").splitlines(), start=1)
        if line.strip()
    )
    audit, notes = _audit(folder / "audit.json", record)
    digests = ScoredRows()
    with suppress(FileNotFoundError, ParameterError):  # only its owner may read it
        digests = _parse(ScoredRows, read_file(folder, ROWS_BY_SILO), str(folder / ROWS_BY_SILO))
    last = history[-1].round if history else 0
    cut = f"history.jsonl ends with round {last} of {record.rounds}, so curves and counts of rounds are incomplete"
    warnings = (*record.warnings, *notes, *((cut,) if last != record.rounds else ()))
    added = {"folder": folder, "history": history, "audit": audit, "digests": digests, "warnings": warnings}
    return record.model_copy(update=added)


def _audit(file: Path, record: RunRecord) -> tuple[AuditRecord | None, tuple[str, ...]]:
    """Return the audit of this run, if any, and a warning about another run's audit."""
    if not file.exists():
        return None, ()
    audit = _formatted(AuditRecord, _read(file, "the folder is not whole"), file)
    if audit.index and audit.index != record.views:
        return None, ("audit.json is of an earlier end of this run, so it is not shown; audit the run again",)
    if audit.run != record.run:
        return None, ("audit.json is of another run, so it is not shown; audit this one by `moretta audit`",)
    return audit, ()


def _formatted(model: type[_P], raw: bytes, file: Path) -> _P:
    form = _parse(_Format, raw, str(file)).format
    if form != FORMAT:
        raise ParameterError(f"{file} is of format {form}, and this version of Moretta reads format {FORMAT} only.")
    return _parse(model, raw, str(file))


def _read(file: Path, without: str) -> bytes:
    try:
        return read_file(file.parent, file.name)
    except FileNotFoundError:
        raise ParameterError(f"{file.parent} has no {file.name}: {without}.") from None


def _parse(model: type[_P], raw: bytes, where: str) -> _P:
    """Parse a record; raise the first error as one sentence, where pydantic lists all over many lines."""
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "json_invalid":
            raise ParameterError(f"{where} is not JSON: {first['ctx']['error']}.") from None
        if first["type"] == "missing":
            raise ParameterError(f"{where} lacks the key {key}.") from None
        reason = first["msg"].removeprefix("Value error, ")
        reason = reason[0].lower() + reason[1:]
        raise ParameterError(f"{where} is broken{f' at {key}' if key else ''}: {reason}.") from None
