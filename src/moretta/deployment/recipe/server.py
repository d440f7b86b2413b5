"""The server's end: FLARE's FedAvg whose results are summed in secret, and the recipe that makes such a job."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

from moretta.config import run_files
from moretta.deployment.recipe.site import (
    DATA,
    KIND,
    METRIC,
    METRICS,
    SAID,
    SILOS,
    TASK,
    TOPIC,
    WEIGHT,
    KeepResult,
    plain,
)
from moretta.deployment.shared_settings import shared_sums
from moretta.errors import Disconnected, ParameterError, PeerError, RunFailed
from moretta.secure_aggregation.secure_sum import secure_sum
from moretta.secure_aggregation.settings import SecureAggregation
from moretta.secure_aggregation.sums import Sum, as_summed

MOST_LOST = 3  # rounds in a row
ELSEWHERE = ("aggregator", "aggregation_weights", "exclude_vars")  # FLARE's arguments for servers that see each result

log = logging.getLogger("moretta")


class SecureFedAvg(FedAvg):  # type: ignore[misc]
    """FLARE's FedAvg that sees only weighted means of results.

    Args:
        args, kwargs: FLARE's own, which finds them by name.
        settings: [secure-aggregation], as TOML.
        roster: The file of all sites' keys; empty without one.
        most_weight: A bound of all sites' steps together.
        train_timeout: Seconds for a task; 0 waits without limit.
        answer_timeout: Seconds for a message.
    """

    def __init__(
        self,
        *args: Any,
        settings: str = "",
        roster: str = "",
        most_weight: int = 2**24,
        train_timeout: int = 0,
        answer_timeout: float = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **{"ignore_result_error": True, **kwargs})  # a failing site is left out
        self.settings, self.roster, self.most_weight = settings, roster, most_weight
        self.train_timeout, self.answer_timeout = train_timeout, answer_timeout
        self._asked: list[str] = []
        self._kept: dict[str, Mapping[str, Any]] = {}
        self._lost = self._opened = 0  # sums: lost in a row, and opened

    def run(self) -> None:
        """Carry out all rounds. Raises `moretta.errors.RunFailed` if all are lost: such a job must not succeed."""
        super().run()
        if not self._opened and not self.abort_signal.triggered:
            raise RunFailed("all rounds are lost, and the model is unchanged; see the server's log")

    def send_model(self, *args: Any, data: FLModel, targets: list[str], **options: Any) -> None:
        """Send the round's model, and record it."""
        self._sent, self._kept = data, {}
        self._asked = sorted(str(getattr(target, "name", target)) for target in targets)
        super().send_model(*args, data=data, targets=targets, timeout=self.train_timeout, **options)

    def _aggregate_one_result(self, result: FLModel) -> bool:
        """Record that a site has a result, or why not."""
        name, meta = str(result.meta.get("client_name")), result.meta
        if result.params is not None or not isinstance(meta.get(KIND), str):
            log.warning("site `%s` is left out: %s", name, str(meta.get(SAID, "it sent no result to sum"))[:1000])
            return False
        self._kept[name] = meta
        return True

    def _get_aggregated_result(self) -> FLModel:
        """Sum the results that sites keep; return the old model if too few sites are left."""
        try:
            total, kind = self._summed()
        except RunFailed as error:
            self._lost += 1
            if self._lost >= MOST_LOST:
                raise
            log.warning("round %d is lost, and the model stays as it was: %s", self.current_round, error)
            return FLModel(
                params=dict(self._sent.params), params_type=ParamsType.FULL, current_round=self.current_round
            )
        self._lost, self._opened = 0, self._opened + 1
        params = {name: _like(array, total.means[WEIGHT + name]) for name, array in self._sent.params.items()}
        metrics = {n.removeprefix(METRIC): float(mean) for n, mean in total.means.items() if n.startswith(METRIC)}
        meta = {"nr_aggregated": len(total.silos), "current_round": self.current_round}
        return FLModel(
            params=params, params_type=kind, metrics=metrics or None, current_round=self.current_round, meta=meta
        )

    def _summed(self) -> tuple[Sum, str]:
        if not self._kept:
            raise RunFailed("no site has a result to sum")
        kind = Counter(str(meta[KIND]) for meta in self._kept.values()).most_common(1)[0][0]
        metrics = sorted(set.intersection(*(set(meta[METRICS]) for meta in self._kept.values())))
        shapes = {WEIGHT + name: plain(array).shape for name, array in self._sent.params.items()}
        shapes |= {METRIC + name: () for name in metrics}
        tables = run_files.parse_toml(self.settings, Path("run.toml"))
        secure = run_files.section("secure-aggregation", SecureAggregation, tables)
        secure = secure.model_copy(update={"roster": Path(self.roster) if self.roster else None})
        request = {SILOS: self._asked, KIND: kind, METRICS: metrics}
        deliver = {name: self._deliver(name, request) for name in self._asked}
        return secure_sum(deliver, shapes, secure, most_weight=self.most_weight - 1), kind

    def _deliver(self, name: str, request: Mapping[str, Any]) -> Callable[[bytes], bytes]:
        def deliver(data: bytes) -> bytes:
            if name not in self._kept:
                raise Disconnected("has no result of this round")
            with self.engine.new_context() as fl_ctx:
                options = {"topic": TOPIC, "timeout": self.answer_timeout, "fl_ctx": fl_ctx, "optional": True}
                replies = self.engine.send_aux_request([name], request=Shareable({**request, DATA: data}), **options)
            reply = replies.get(name)
            if reply is None or reply.get_return_code() != ReturnCode.OK:
                raise Disconnected("has not answered" if reply is None else str(reply.get_return_code()))
            if SAID in reply:
                raise PeerError(str(reply[SAID])[:1000])
            return bytes(reply[DATA])

        return deliver


def _like(sent: Any, mean: Any) -> Any:
    array = as_summed(mean, plain(sent).dtype)
    if not hasattr(sent, "detach"):
        return array
    import torch

    return torch.from_numpy(array)


class SecureFedAvgRecipe(FedAvgRecipe):  # type: ignore[misc]
    """FLARE's FedAvgRecipe of PyTorch, whose server learns weighted means of weights and metrics, and no site's own.

    Args:
        secure: how sums are made, with `roster` the server's file of all sites' keys; None is `SecureAggregation()`.
        most_weight: a bound of all sites' NUM_STEPS_CURRENT_ROUND together. A close one leaves finer steps in 32 bits.
        train_timeout: seconds that a site may train in a round; 0 for any number.
        answer_timeout: seconds that it may take for a message of the sum.
        record_views: a folder for all sites' views of sums and models, for `moretta audit --views`; of scripts that
            send whole weights.
        options: as of FLARE's recipe.

    Raises:
        moretta.errors.ParameterError: settings that no secure sum has, or that need each site's own result.
    """

    def __init__(
        self,
        *,
        secure: SecureAggregation | None = None,
        most_weight: int = 2**24,
        train_timeout: int = 0,
        answer_timeout: float = 60.0,
        record_views: str | Path | None = None,
        **options: Any,  # of FLARE's class, which has others in another version
    ) -> None:
        self._views = "" if record_views is None else str(Path(record_views).absolute())
        secure = secure or SecureAggregation()
        if wrong := [name for name in ELSEWHERE if options.get(name) is not None]:
            raise ParameterError(f"{wrong[0]} needs each site's own result, which the server never sees; remove it")
        self._sums: dict[str, Any] = {
            "settings": shared_sums(secure, type(self).__name__),
            "roster": "" if secure.roster is None else str(secure.roster.absolute()),
            **{"most_weight": most_weight, "train_timeout": train_timeout, "answer_timeout": answer_timeout},
        }
        self._keeps = False
        super().__init__(**options)
        self._job.job.set_app_packages(["moretta"])  # it is installed everywhere, and not part of a job

    def _create_controller(self, persistor_id: str, model_params: Any, model_aggregator: Any) -> FedAvg:
        return SecureFedAvg(
            num_clients=self.min_clients,
            num_rounds=self.num_rounds,
            persistor_id=persistor_id,
            model=model_params,
            save_filename=self.save_filename,
            stop_cond=self.stop_cond,
            patience=self.patience,
            task_name=TASK,
            memory_gc_rounds=self.server_memory_gc_rounds,
            enable_tensor_disk_offload=self.enable_tensor_disk_offload,
            **self._sums,
        )

    def _prepare_client_apps(self) -> None:
        """Give the script's executor the one task whose result is kept."""
        sites = self.per_site_config or {}
        for site, config in sites.items():
            self._job.to(self._create_client_runner(config), site, tasks=[TASK])
        if not sites:
            self._job.to_clients(self._create_client_runner({}), tasks=[TASK])

    def finalize(self) -> None:
        """Add the filter that keeps results, after all others."""
        if not self._keeps:
            keep = KeepResult(self._sums["settings"], self._views, self._sums["most_weight"])
            self.add_client_output_filter(keep, tasks=[TASK])
            self._keeps = True
