"""Trackers, which follow a run as it proceeds: TensorBoard, MLflow, or a function of your own.

A tracker is a context manager that lasts as long as the run; its value is called with each line of the history. It
receives nothing of a silo beyond the history. It runs beside the server and at no site: `[run] trackers` is the
server's own key. A failing tracker costs a warning, and not the run.
"""

import copy
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moretta.contract.wording import did_you_mean, kind_of
from moretta.data.references import OWN_CODE, is_reference, resolve
from moretta.errors import MissingExtra, ParameterError

log = logging.getLogger("moretta")


@dataclass(frozen=True)
class TrackedRun:
    """Describe a run that begins or continues.

    Args:
        name: The run's.
        id: The same in all sessions of a run.
        rounds: Of the whole run.
        after: The number of rounds of earlier sessions.
        settings: Of `[model]` and `[protocol]`, such as "protocol.learning-rate", and the seed.
        folder: None if the run has none.
    """

    name: str
    id: str
    rounds: int
    after: int
    settings: Mapping[str, Any]
    folder: Path | None


Line = Mapping[str, Any]
OnLine = Callable[[Line, Mapping[str, float]], object]
"""Called after each round with its line of the history, and the line's numbers by plain names (`figures`)."""

Tracker = Callable[[TrackedRun], AbstractContextManager[OnLine]]
"""Follows a run. If the run fails, its error passes through the context manager."""


@contextmanager
def following(trackers: Sequence[Tracker], run: TrackedRun, warnings: list[str]) -> Iterator[Callable[[Line], None]]:
    """Yield a function that passes a line to all trackers of a run. warnings: receives a sentence for each failure."""
    left = dict[int, tuple[AbstractContextManager[OnLine], OnLine]]()

    @contextmanager
    def warned(number: int) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:  # the run continues, whatever a tracker raises
            left.pop(number, None)
            # Not the error's text, which may hold an address with a password: the result keeps its warnings.
            why = str(error) if isinstance(error, ParameterError) else type(error).__name__
            name = getattr(trackers[number], "__name__", type(trackers[number]).__name__)
            warnings.append(f"the tracker {name} failed ({why}) and receives no more of the run")
            log.info("%s", warnings[-1])
            log.debug("the tracker's error", exc_info=True)

    def pass_on(line: Line) -> None:
        for number, (_, on_line) in list(left.items()):
            with warned(number):
                on_line(copy.deepcopy(line), dict(figures(line)))

    for number, tracker in enumerate(trackers):
        with warned(number):
            context = tracker(run)
            left[number] = context, context.__enter__()
    failure: BaseException | None = None
    try:
        yield pass_on
    except BaseException as error:
        failure = error
        raise
    finally:
        while left:
            number, (context, _) = left.popitem()
            with warned(number):
                context.__exit__(None if failure is None else type(failure), failure, None)


def figures(line: Line, within: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a line of the history by name, such as "bytes/up"; for a list its length."""
    for key, value in line.items():
        if isinstance(value, Mapping):
            yield from figures(value, f"{within}{key}/")
        elif isinstance(value, list):
            yield f"{within}{key}", float(len(value))
        elif isinstance(value, int | float) and key != "round" and math.isfinite(value):
            yield f"{within}{key}", float(value)


@contextmanager
def tensorboard(run: TrackedRun, folder: str | Path | None = None) -> Iterator[OnLine]:
    """Write TensorBoard's events, by default into `tensorboard` of the run folder."""
    from torch.utils.tensorboard import SummaryWriter

    if folder is None and run.folder is None:
        raise ParameterError("the run has no folder to write events into; pass partial(tensorboard, folder=..)")
    place = Path(str(run.folder), "tensorboard") if folder is None else folder
    with SummaryWriter(str(place), purge_step=run.after + 1) as writer:  # removes rounds that are repeated

        def write(line: Line, figures: Mapping[str, float]) -> None:
            for name, value in figures.items():
                writer.add_scalar(name, value, line["round"])

        yield write


@contextmanager
def mlflow(run: TrackedRun, experiment: str = "moretta", uri: str | None = None) -> Iterator[OnLine]:
    """Log a run to MLflow, by default to MLFLOW_TRACKING_URI; a resumed run continues as the same one."""
    for name, value in (("MAX_RETRIES", "2"), ("TIMEOUT", "10")):  # the defaults would delay a run for many minutes
        os.environ.setdefault(f"MLFLOW_HTTP_REQUEST_{name}", value)
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    known = client.get_experiment_by_name(experiment)
    home = client.create_experiment(experiment) if known is None else known.experiment_id
    runs = client.search_runs([home], f"tags.`moretta.run` = '{run.id}'", max_results=1)
    made = runs[0] if runs else client.create_run(home, tags={"moretta.run": run.id}, run_name=run.name)
    for key, setting in {} if runs else run.settings.items():
        client.log_param(made.info.run_id, key, setting)

    def write(line: Line, figures: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(made.info.run_id, [Metric(key, value, now, line["round"]) for key, value in figures.items()])

    status = "FAILED"
    try:
        yield write
        status = "FINISHED"
    finally:
        client.set_terminated(made.info.run_id, status)


IN_THE_BOX: Mapping[str, Tracker] = {"tensorboard": tensorboard, "mlflow": mlflow}  # by the package that they need


def trackers_of(trackers: Sequence[Tracker | str], base: Path) -> list[Tracker]:
    """Return trackers: built-in ones by name, "module:function" beside the run file, and functions as they are.

    Raises:
        ParameterError: A tracker is anything else.
        MissingExtra: A built-in tracker is not installed.
    """
    if isinstance(trackers, str) or not isinstance(trackers, Sequence):
        raise ParameterError(f'trackers: expected a list such as ["tensorboard"]; got {kind_of(trackers)}')
    for tracker in trackers:
        if isinstance(tracker, str) and tracker not in IN_THE_BOX and not is_reference(tracker):
            raise ParameterError(f'trackers: "{tracker}" is not "module:function"; {did_you_mean(tracker, IN_THE_BOX)}')
        if isinstance(tracker, str) and tracker in IN_THE_BOX and find_spec(tracker) is None:
            raise MissingExtra(f"tracking by {tracker} needs it; run: pip install 'moretta[trackers]'")
        if not isinstance(tracker, str) and not callable(tracker):
            raise ParameterError(f"trackers: expected functions of a run, or names; got {kind_of(tracker)}")
    chosen = (
        (IN_THE_BOX.get(tracker) or resolve(tracker, base, OWN_CODE)) if isinstance(tracker, str) else tracker
        for tracker in trackers
    )
    return list(chosen)
