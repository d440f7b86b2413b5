"""The site's end: a filter that keeps a training task's result, and answers the server's secure sum of it."""

import hashlib
import json
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from nvflare.fuel.f3.cellnet.defs import CellChannel

from moretta.config import silo_file
from moretta.config.silo_file import SiloFile, SiloSection
from moretta.contract.messages import Array, Message, Stamp
from moretta.deployment.kits import SILO
from moretta.deployment.site_policy import permitted_sums
from moretta.engines import views
from moretta.engines.flare.cells import guard_stream
from moretta.engines.folder_lock import take_turn
from moretta.errors import PRIVATE, MorettaError, PeerError, PolicyError, RangeError, RowsError, disclosed
from moretta.secure_aggregation.cohort import Participation
from moretta.secure_aggregation.encoding import MOST_WEIGHT
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.secure_sum import CODEC, AskSum, SumClient
from moretta.secure_aggregation.sums import message_digest

TASK, TOPIC = "train", "moretta.sum"
SAID, DATA, SILOS, KIND, METRICS = "said", "data", "silos", "kind", "metrics"  # of aux messages, or a result's meta
WEIGHT, METRIC = "weight/", "metric/"  # the tensors of a sum
KINDS = {DataKind.WEIGHTS: "FULL", DataKind.WEIGHT_DIFF: "DIFF"}
HEADERS = (AppConstants.START_ROUND, AppConstants.CURRENT_ROUND, AppConstants.NUM_ROUNDS, AppConstants.VALIDATE_TYPE)

log = logging.getLogger("moretta")


@dataclass(frozen=True, repr=False)
class TaskResult:
    """The result of a script.

    Attributes:
        kind: "FULL" weights, or their "DIFF" to the model.
        weight: The number of steps, at least 1.
        about: The digest of the task.
    """

    kind: str
    weight: int
    weights: Mapping[str, Array]
    metrics: Mapping[str, float] = field(default_factory=dict)
    about: bytes = b""

    @classmethod
    def of(cls, dxo: DXO, model: Mapping[str, Any]) -> "TaskResult":
        """Return a result.

        Args:
            model: The task's model, whose names, shapes and kinds of numbers the result must have.

        Raises:
            PolicyError: The arrays have another form.
            RangeError: An array has NaN or infinity.
            RowsError: The number of steps is invalid. This error stays at the site.
        """
        if dxo.data_kind not in KINDS or dxo.meta.get(MetaKey.PROCESSED_ALGORITHM):
            raise PolicyError(f"expected weights or their difference, got {dxo.data_kind} as a filter changed it")
        if different := sorted(model.keys() ^ dxo.data.keys()):
            raise PolicyError(f"expected the arrays of the model; {different!r:.200} differ")
        weights = {name: plain(array) for name, array in dxo.data.items()}
        for name, array in weights.items():
            like = plain(model[name])
            if array.shape != like.shape or array.dtype.kind not in ("f" if like.dtype.kind == "f" else "fiu"):
                raise PolicyError(
                    f"`{name}`: expected {like.dtype} {list(like.shape)}, got {array.dtype} {list(array.shape)}"
                )
            if not np.isfinite(array).all():
                raise RangeError(f"`{name}` has NaN or infinity; lower its learning rate, or look at its rows")
        steps = dxo.meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND, 1)
        if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 1:
            raise RowsError(f"{MetaKey.NUM_STEPS_CURRENT_ROUND} is {steps!r:.40}; expected a whole number, 1 or more")
        metric = dxo.meta.get(MetaKey.INITIAL_METRICS)
        numbers = metric if isinstance(metric, Mapping) else {} if metric is None else {"metric": metric}
        metrics = {
            str(name): float(number) for name, number in numbers.items() if isinstance(number, int | float | np.number)
        }
        return cls(
            KINDS[dxo.data_kind],
            int(steps),
            weights,
            {n: number for n, number in metrics.items() if np.isfinite(number)},
        )


def task_digest(task: Shareable) -> bytes:
    """Return SHA-256 of all that a script reads of a task, the same for all sites of a sum."""
    dxo, rounds = from_shareable(task), [task.get_header(name) for name in HEADERS]
    model = {name: plain(array) for name, array in dxo.data.items()}
    rest = json.dumps([dxo.data_kind, list(model), dxo.meta, rounds], sort_keys=True, default=repr)
    return hashlib.sha256(message_digest(PlainUpload.unasked(Stamp("flare", 0, 0), model)) + rest.encode()).digest()


def plain(tensor: Any) -> Array:
    """Return an array or a tensor as an array."""
    return np.asarray(tensor.detach().cpu().numpy() if hasattr(tensor, "detach") else tensor)


def _as_sent(own: Any, sent: Any) -> Any:
    """Return a counter in the kind of the sent number: FLARE's own FedAvg sends a counter's mean, a float."""
    whole = plain(own).dtype.kind in "iu" and plain(sent).dtype.kind == "f"
    return plain(own).astype(plain(sent).dtype) if whole else own


class RecordViews(Filter):  # type: ignore[misc]
    """A site's last filter of results: it records a training task's model and result in the clear.

    It is for audited runs (``moretta audit --views``) with rows that an auditor may know.

    Args:
        folder: The folder for the views of all sites of one run.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self._model, self._round = folder, dict[str, Any](), 0

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Keep the model of each task, and its round, counted from one."""
        if event_type == EventType.BEFORE_TASK_EXECUTION and fl_ctx.get_prop(FLContextKey.TASK_NAME) == TASK:
            task = fl_ctx.get_prop(FLContextKey.TASK_DATA)
            self._model = from_shareable(task).data
            self._round = int(task.get_header(AppConstants.CURRENT_ROUND) or 0) + 1

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Record a readable result, and pass it on unchanged."""
        try:
            if shareable.get_return_code() == ReturnCode.OK:
                dxo, now = from_shareable(shareable), Stamp("flare", self._round, 0)
                dxo.data = {name: _as_sent(array, self._model.get(name, array)) for name, array in dxo.data.items()}
                result = TaskResult.of(dxo, self._model)
                base = {name: plain(array) for name, array in self._model.items()} if result.kind == "DIFF" else {}
                sums = {name: array + base[name] if base else array for name, array in result.weights.items()}
                weights = {WEIGHT + name: np.asarray(array) for name, array in sums.items()}
                own = PlainUpload.unasked(now, weights, result.weight)
                self.note(fl_ctx.get_identity_name(), AskSum(stamp=now, encoding={}), own)
        except MorettaError as error:  # the run continues without it
            log.error("this result is in no view: %s", error)
        return shareable

    def note(self, silo: str, asked: Message, answer: Message) -> None:
        """Record a question and its answer, with the model where a question is for a result."""
        seen = [("received", asked), ("sent", answer)]
        if isinstance(asked, AskSum):
            model = {WEIGHT + name: plain(array) for name, array in self._model.items()}
            seen.insert(0, ("received", PlainUpload.unasked(asked.stamp, model)))
        messages = [views.Seen(way, "server", CODEC.encode(message)) for way, message in seen]
        views.note(Path(self.folder) / "views", silo, self._round, messages)


class KeepResult(RecordViews):
    """The last filter of a site: a training task's result stays here, and the server learns only sums of it.

    Args:
        settings: [secure-aggregation] of the job, as TOML.
        folder: The folder for the site's view of sums, as in `RecordViews`; empty records nothing.
        most_weight: A bound of all sites' steps together; a site with more counts as that.
    """

    def __init__(self, settings: str, folder: str = "", most_weight: int = 2**24) -> None:
        super().__init__(folder)
        self.settings, self.most_weight = settings, most_weight
        self._lock, self._about = threading.Lock(), b""
        self._result: TaskResult | None = None
        self._sum: tuple[str, SumClient] | None = None
        self._file: SiloFile | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Read the site's silo.toml as the job starts, and keep the model of each task."""
        if event_type == EventType.START_RUN:
            self._file = self._site(fl_ctx)
            engine = fl_ctx.get_engine()
            guard_stream(engine.get_cell(), CellChannel.AUX_COMMUNICATION, TOPIC)  # else any site could ask for a sum
            engine.register_aux_message_handler(TOPIC, self._answer)
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.BEFORE_TASK_EXECUTION and fl_ctx.get_prop(FLContextKey.TASK_NAME) == TASK:
            self._about = secrets.token_bytes(32)  # a result of a task without a digest adds up with no other
            self._about = task_digest(fl_ctx.get_prop(FLContextKey.TASK_DATA))  # a script may write to its input

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Keep a result; return that it exists, or why not."""
        code = shareable.get_return_code()
        if code != ReturnCode.OK:
            return make_reply(code)
        meta: dict[str, Any] = {}
        with self._lock:
            self._result = None
            try:
                self._result = replace(TaskResult.of(from_shareable(shareable), self._model), about=self._about)
                meta = {KIND: self._result.kind, METRICS: sorted(self._result.metrics)}
            except MorettaError as error:
                meta = {SAID: disclosed(error, log)}
            except Exception:  # a script may return anything
                log.exception("a result cannot be read")
                meta = {SAID: PRIVATE}
        kept = DXO(DataKind.METRICS, data={}, meta=meta).to_shareable()
        kept.set_header(AppConstants.CURRENT_ROUND, shareable.get_header(AppConstants.CURRENT_ROUND))
        return kept

    def _answer(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        reply = make_reply(ReturnCode.OK)
        try:
            with self._lock:
                reply[DATA] = self._summed(request, silo := fl_ctx.get_identity_name())
                if self.folder:
                    self.note(silo, CODEC.decode(request[DATA]), CODEC.decode(reply[DATA]))
        except MorettaError as error:
            reply[SAID] = disclosed(error, log)
        return reply

    def _summed(self, request: Shareable, name: str) -> bytes:
        data = request.get(DATA)
        if not isinstance(data, bytes):
            raise PeerError("expected the bytes of a message")
        asks = CODEC.decode(data)
        run = asks.stamp.run
        if isinstance(asks, AskSum) and asks.encoding.get(MOST_WEIGHT) != self.most_weight:
            raise PeerError(f"expected an encoding for {self.most_weight} steps, as in the job")
        if self._sum is None or self._sum[0] != run:
            result, self._result = self._result, None
            if result is None:
                raise PeerError("this site has no result of a training task that is not summed yet")
            self._sum = run, self._begin(result, request, name)
        return self._sum[1].answer(data)

    def _begin(self, result: TaskResult, request: Shareable, name: str) -> SumClient:
        silos, metrics = request.get(SILOS), request.get(METRICS)
        for names in (silos, metrics):
            if not isinstance(names, list) or not all(isinstance(text, str) for text in names):
                raise PeerError("expected names of silos and of metrics")
        if request.get(KIND) != result.kind or not set(metrics) <= result.metrics.keys():
            raise PolicyError(f"expected to sum {result.kind} with metrics of {sorted(result.metrics)!r:.200}")
        if self.folder and result.kind != "FULL":
            raise PolicyError("record_views needs scripts that send whole weights, and this one sends differences")
        file = self._file or SiloFile(silo=SiloSection(name=name))
        if file.silo.name != name:
            raise PolicyError(
                f"this site's name is {name!r} in FLARE, but {file.silo.name!r} in its silo.toml; expected the same"
            )
        secure = permitted_sums(self.settings, Participation(tuple(silos), len(silos)), file)
        tensors = {WEIGHT + name_of_weight: array for name_of_weight, array in result.weights.items()}
        tensors |= {METRIC + metric: np.asarray(result.metrics[metric]) for metric in metrics}
        helped = None if self._file is None else self._file.helped.begin(begun=self._sum is not None).opened
        weight = min(result.weight, self.most_weight)  # a refusal would show the site's own to who tries bounds
        return SumClient(name, silos, tensors, weight, secure, helped, result.about)

    def _site(self, fl_ctx: FLContext) -> SiloFile | None:
        folder = Path(fl_ctx.get_engine().get_workspace().get_site_config_dir())
        if not (folder / SILO).is_file():
            log.warning("this site has no silo.toml (moretta kit patch), so no floors bind its secure sums")
            return None
        file = silo_file.load(Path(json.loads((folder / SILO).read_text())["silo"]), rows=False)
        take_turn(file.out, str(fl_ctx.get_job_id()), time.time())
        return file
