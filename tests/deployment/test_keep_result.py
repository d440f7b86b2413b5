"""The site's end of FLARE's recipe: what leaves it, what it refuses, and that a result is summed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

pytest.importorskip("nvflare", reason="the engine for many machines needs nvflare")

from nvflare.apis.dxo import DXO, DataKind, MetaKey
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy

from moretta.config import silo_file
from moretta.deployment.recipe.site import DATA, KIND, METRIC, METRICS, SAID, SILOS, TASK, WEIGHT, KeepResult
from moretta.errors import PeerError, RunFailed
from moretta.secure_aggregation.secure_sum import secure_sum
from moretta.secure_aggregation.settings import SecureAggregation

NAMES = ["east", "north", "south", "west"]
MOST = 2**10 - 1  # of all sites' steps together
MODEL: dict[str, Any] = {"w": np.zeros((2, 3), np.float32), "count": np.zeros((), np.int64)}
SECURE = SecureAggregation()
TEXT = tomli_w.dumps(SECURE.model_dump(mode="json", by_alias=True, exclude_none=True))


def context(name: str, **props: Any) -> FLContext:
    found = FLContext()
    found.set_prop(ReservedKey.IDENTITY_NAME, name, private=False, sticky=False)
    for key, value in props.items():
        found.set_prop(key, value, private=True, sticky=False)
    return found


def result(weights: Mapping[str, Any], steps: Any = 5, metrics: Any = None, kind: str = DataKind.WEIGHTS) -> Shareable:
    meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: steps} | ({} if metrics is None else {MetaKey.INITIAL_METRICS: metrics})
    found: Shareable = DXO(kind, data=dict(weights), meta=meta).to_shareable()
    return found


def asked(model: Mapping[str, Any] = MODEL, meta: dict[str, Any] | None = None, number: int = 0) -> Shareable:
    """Return a training task. number: of its round, from 0."""
    task: Shareable = DXO(DataKind.WEIGHTS, data=dict(model), meta=meta or {}).to_shareable()
    task.set_header(AppConstants.CURRENT_ROUND, number)
    return task


def site(
    name: str, given: Shareable | None = None, settings: str = TEXT, task: Shareable | None = None
) -> tuple[KeepResult, Shareable]:
    """Return a site that was sent the model and came to a result, and what left it."""
    kept, task = KeepResult(settings, most_weight=MOST + 1), task or asked()
    told = {FLContextKey.TASK_NAME: TASK, FLContextKey.TASK_DATA: task}
    kept.handle_event(EventType.BEFORE_TASK_EXECUTION, context(name, **told))
    return kept, kept.process(result(own(name)) if given is None else given, context(name))


def own(name: str) -> dict[str, Any]:
    number = NAMES.index(name) + 1
    return {"w": np.full((2, 3), number / 8, np.float32), "count": np.asarray(number)}


def delivers(kept: KeepResult, name: str, **other: Any) -> Callable[[bytes], bytes]:
    def deliver(data: bytes) -> bytes:
        told = {SILOS: NAMES, KIND: "FULL", METRICS: [], DATA: data} | other
        reply = kept._answer("", Shareable(told), context(name))
        if SAID in reply:
            raise PeerError(reply[SAID])
        found: bytes = reply[DATA]
        return found

    return deliver


SHAPES = {WEIGHT + name: one.shape for name, one in MODEL.items()}


def test_nothing_but_masked_numbers_leaves_a_site_and_each_result_is_summed_once() -> None:
    sites = {name: site(name) for name in NAMES}
    for _, left in sites.values():
        assert not [one for one in _values(left) if isinstance(one, np.ndarray)]
    sent: list[bytes] = []

    def heard(deliver: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        def kept(data: bytes) -> bytes:
            sent.append(deliver(data))
            return sent[-1]

        return kept

    total = secure_sum({n: heard(delivers(k, n)) for n, (k, _) in sites.items()}, SHAPES, SECURE, most_weight=MOST)
    np.testing.assert_allclose(total.means[WEIGHT + "w"], 2.5 / 8, atol=1e-12)
    np.testing.assert_allclose(total.means[WEIGHT + "count"], 2.5, atol=1e-12)
    assert total.weight == 20
    assert not [
        one for one in sent if own("north")["w"].tobytes() in one or own("north")["w"].astype(float).tobytes() in one
    ]
    with pytest.raises(RunFailed, match="no result of a training task that is not summed yet"):
        secure_sum({name: delivers(kept, name) for name, (kept, _) in sites.items()}, SHAPES, SECURE)


@pytest.mark.parametrize(
    "others", [asked({**MODEL, "w": np.ones((2, 3), np.float32)}), asked(meta={"rate": 0.0}), asked(number=9)]
)
def test_results_of_another_task_do_not_add_up(others: Shareable) -> None:
    """A server that sends all others a task with a known result had one site's own weights as the sum."""
    sites = {name: site(name, task=others if name != "north" else None)[0] for name in NAMES}
    total = secure_sum({n: delivers(kept, n) for n, kept in sites.items()}, SHAPES, SECURE, most_weight=MOST)
    assert list(total.silos) == ["east", "south", "west"]


def test_a_site_with_more_steps_than_the_bound_counts_as_that() -> None:
    """A site that refused showed by one bound a round how many steps it takes, and so how many rows it has."""
    sites = {name: site(name, result(own(name), steps=5000 if name == "north" else 5))[0] for name in NAMES}
    with pytest.raises(RunFailed, match="together are 1024 or more, expected fewer"):  # no site is missing
        secure_sum({n: delivers(kept, n) for n, kept in sites.items()}, SHAPES, SECURE, most_weight=MOST)
    with pytest.raises(RunFailed, match="expected an encoding for 1024 steps"):
        secure_sum({n: delivers(site(n)[0], n) for n in NAMES}, SHAPES, SECURE, most_weight=2**9)


def _values(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [found for one in value.values() for found in _values(one)]
    return [found for one in value for found in _values(one)] if isinstance(value, list | tuple) else [value]


def test_metrics_are_summed_as_well() -> None:
    made = {name: site(name, result(own(name), metrics={"loss": float(len(name)), "said": "x"})) for name in NAMES}
    assert all(_meta(left)[METRICS] == ["loss"] for _, left in made.values())
    deliver = {name: delivers(kept, name, **{METRICS: ["loss"]}) for name, (kept, _) in made.items()}
    total = secure_sum(deliver, {**SHAPES, METRIC + "loss": ()}, SECURE, most_weight=MOST)
    assert float(total.means[METRIC + "loss"]) == pytest.approx(np.mean([len(name) for name in NAMES]))


def _meta(left: Shareable) -> Mapping[str, Any]:
    from nvflare.apis.dxo import from_shareable

    found: Mapping[str, Any] = from_shareable(left).meta
    return found


def test_what_a_filter_of_flares_has_changed_is_what_is_summed() -> None:
    privacy, kept = PercentilePrivacy(percentile=0, gamma=0.05), {}
    for name in NAMES:
        changed = privacy.process(result(own(name), kind=DataKind.WEIGHT_DIFF), context(name))
        kept[name], left = site(name, changed)
        assert SAID not in _meta(left)
    deliver = {name: delivers(one, name, **{KIND: "DIFF"}) for name, one in kept.items()}
    total = secure_sum(deliver, SHAPES, SECURE, most_weight=MOST)
    np.testing.assert_allclose(total.means[WEIGHT + "w"], np.mean([1 / 8, 2 / 8, 2 / 8, 2 / 8]), atol=1e-9)


PRIVATE = "this site cannot take part in this sum; its own log says why"
WRONG = {
    "not finite": (result({**own("north"), "w": np.full((2, 3), np.nan, np.float32)}), PRIVATE),
    "another shape": (result({**own("north"), "w": np.zeros((3, 2), np.float32)}), "expected float32 [2, 3], got"),
    "an array less": (result({"count": np.asarray(1)}), "expected the arrays of the model; ['w'] differ"),
    "integers": (result({**own("north"), "w": np.zeros((2, 3), np.int8)}), "expected float32 [2, 3], got int8 [2, 3]"),
    "half a step": (result(own("north"), steps=2.5), PRIVATE),
    "no step": (result(own("north"), steps=0), PRIVATE),
    "metrics alone": (result({"accuracy": 1.0}, kind=DataKind.METRICS), "expected weights or their difference, got"),
    "no result": (Shareable({"rows": [4711]}), PRIVATE),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_summed_stays_and_is_not_told(name: str) -> None:
    given, said = WRONG[name]
    kept, left = site("north", given)
    assert said in _meta(left)[SAID]
    assert "4711" not in str(left)
    with pytest.raises(PeerError, match="no result of a training task"):
        delivers(kept, "north")(_first_ask())


def test_a_task_that_failed_says_no_more_than_that() -> None:
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    failed["why"] = "row 4711"
    _, left = site("north", failed)
    assert left.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert "4711" not in str(left)


def _first_ask() -> bytes:
    asked: list[bytes] = []

    def deliver(data: bytes) -> bytes:
        asked.append(data)
        raise OSError

    with pytest.raises(RunFailed):
        secure_sum(dict.fromkeys(NAMES, deliver), SHAPES, SECURE)
    return asked[0]


ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "a sum of two": ({SILOS: ["north", "west"]}, "fewest-silos"),
    "without itself": (
        {SILOS: ["east", "south", "west"]},
        "expected each silo of the run once, and 'north' among them",
    ),
    "one twice": ({SILOS: [*NAMES, "north"]}, "expected each silo of the run once"),
    "no names": ({SILOS: "north"}, "expected names of silos and of metrics"),
    "another kind": ({KIND: "DIFF"}, "expected to sum FULL with metrics of"),
    "a metric that is none": ({METRICS: ["loss"]}, "expected to sum FULL with metrics of"),
    "no bytes": ({DATA: "text"}, "expected the bytes of a message"),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_a_server_may_not_ask_is_refused(name: str, tmp_path: Path) -> None:
    other, said = ASKED[name]
    kept, _ = site("north")
    kept._file = _silo(tmp_path, "[privacy]\nfewest-silos = 3")
    with pytest.raises(PeerError, match=said):
        delivers(kept, "north", **other)(_first_ask())


def _silo(folder: Path, floors: str, name: str = "north") -> silo_file.SiloFile:
    (folder / "silo.toml").write_text(f'[silo]\nname = "{name}"\nout = "kept"\n{floors}\n')
    return silo_file.load(folder / "silo.toml", rows=False)


FLOORS = {
    "threshold": ("[privacy]\nthreshold = 4", TEXT, "threshold = 4 in this site's silo.toml"),
    "roster": ("[privacy]\nroster = true", TEXT, "roster = true in this site's silo.toml"),
    "dp-noise": ("[privacy]\ndp-noise = 1.0", TEXT, "dp-noise = 1.0 in this site's silo.toml"),
    "scheme": ("", 'scheme = "none"', 'expected "pairwise", in which masks hide'),
}


@pytest.mark.parametrize("name", FLOORS)
def test_floors_of_silo_toml_hold(name: str, tmp_path: Path) -> None:
    floors, settings, said = FLOORS[name]
    kept, _ = site("north", settings=settings)
    kept._file = _silo(tmp_path, floors)
    with pytest.raises(PeerError, match=said):
        delivers(kept, "north")(_first_ask())


def test_what_a_site_has_helped_to_open_is_kept_for_its_next_sums(tmp_path: Path) -> None:
    """With apart = 2 no two sums differ by one silo; the record outlives the job's process."""

    def summed(names: list[str]) -> Any:
        sites = {name: site(name)[0] for name in names}
        sites["north"]._file = _silo(tmp_path, "[privacy]\napart = 2")
        deliver = {name: delivers(kept, name, **{SILOS: names}) for name, kept in sites.items()}
        return secure_sum(deliver, SHAPES, SECURE, most_weight=MOST)

    assert [list(summed(NAMES).silos) for _ in range(2)] == [NAMES] * 2
    with pytest.raises(RunFailed, match="apart = 2"):
        summed(NAMES[:3])


def test_a_record_that_is_lost_during_a_job_is_missed(tmp_path: Path) -> None:
    """A site whose folder was cleared went on with an empty record, so apart = 2 bound it no more."""
    sites = {name: site(name)[0] for name in NAMES}
    sites["north"]._file = _silo(tmp_path, "[privacy]\napart = 2")

    def summed(names: list[str]) -> Any:
        deliver = {name: delivers(sites[name], name, **{SILOS: names}) for name in names}
        return secure_sum(deliver, SHAPES, SECURE, most_weight=MOST)

    summed(NAMES)
    for name, kept in sites.items():
        kept.process(result(own(name)), context(name))
    (tmp_path / "kept" / "helped.jsonl").unlink()
    with pytest.raises(RunFailed, match=r"north: refused, .*its own log says why"):
        summed(NAMES[:3])
