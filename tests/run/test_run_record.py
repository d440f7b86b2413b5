"""The record of a run follows from its plan and its end alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moretta import PBPFL, FedSGD
from moretta.contract.roles import Outcome
from moretta.data.settings import Data
from moretta.engines.driver import DroppedSilo
from moretta.engines.settings import Engine, Faults, Run
from moretta.protocols.common.specification import Specification
from moretta.run.record import PlayedRun, facts_of, record_of, ring_facts, warnings_of
from moretta.run.result import Result

BYTES = {"up": 8.0, "down": 4.0, "secure_aggregation": 2.0, "set_up": 1.0}
LEFT = {"round": 2, "silo": "north", "reason": "left"}
GONE = DroppedSilo(2, "south", "late: ..")


def round_line(number: int, **more: Any) -> dict[str, Any]:
    return {"round": number, "bytes": BYTES, "seconds": {}, "seconds_total": 1.0, "dropped": [], **more}


SPEC = Specification(Run(rounds=3, name="a run"), Data(source="python"), FedSGD(learning_rate=0.5))
RUN = PlayedRun(
    SPEC, rounds=3, silos=["north", "south"], parameters=12, scheme="pairwise", has_test_rows=True, doubts=(),
    run="0123", sessions=2, history=[round_line(1), round_line(2, dropped=[LEFT])],
    outcome=Outcome({"w": np.array([-2.0, 1.0], np.float32)}), dropped=[GONE], scores={"loss": 0.25},
    has_scores_of_silos=False, best_round=None, views="", warnings=(),
)  # fmt: skip


def test_a_record_says_what_was_planned_and_what_happened() -> None:
    record = record_of(RUN, {"python": "3"})
    assert {key: record[key] for key in ("name", "run", "protocol", "rounds", "silos", "sessions", "test")} == {
        "name": "a run", "run": "0123", "protocol": "fedsgd", "rounds": 2, "silos": 2, "sessions": 2,
        "test": {"loss": 0.25},
    }  # fmt: skip
    assert record["dropped"] == [LEFT, {"round": 2, "silo": "south", "reason": "late: .."}]
    assert record["secure_aggregation"] == {"scheme": "pairwise", "ring_bits": SPEC.secure_aggregation.ring_bits}
    assert record["settings"] == SPEC.settings
    assert (record["facts"], record["versions"]) == ({}, {"python": "3"})
    (exposed,) = record["warnings"]
    assert exposed.startswith("a silo: can work out the other’s gradient in rounds of fewer than three silos, from")
    assert record_of(replace(RUN, silos=list("abcde")), {})["warnings"] == []
    assert record == record_of(RUN, {"python": "3"})


def test_without_masks_there_is_no_ring() -> None:
    assert record_of(replace(RUN, scheme="none"), {})["secure_aggregation"] == {
        "scheme": "none",
        "ring_bits": None,
    }


def test_facts_are_the_protocols_the_rings_the_best_round_and_the_most_memory() -> None:
    history = [round_line(1, ring_step=0.25, edge_peak_mib=60.0), round_line(2, ring_step=0.5, edge_peak_mib=64.0)]
    outcome = replace(RUN.outcome, facts={"epsilon": 1.5})
    assert facts_of(replace(RUN, history=history, outcome=outcome, best_round=1)) == {
        "epsilon": 1.5, "ring_gradient_error": 0.5, "ring_weight_error": 0.375,
        "ring_relative_weight_error": 0.375 / math.sqrt(2.5), "best_round": 1.0, "edge_peak_mib": 64.0,
    }  # fmt: skip


def test_the_rings_error_is_stated_as_far_as_it_is_known() -> None:
    steps, weights = [round_line(1, ring_step=0.25)], RUN.outcome.parameters
    assert ring_facts([round_line(1)], SPEC.protocol, weights, 1) == {}
    assert ring_facts([round_line(1, ring_step=0.0)], SPEC.protocol, weights, 1) == {}
    assert ring_facts(steps, FedSGD(optimizer="adam"), weights, 1) == {"ring_gradient_error": 0.25}
    assert ring_facts(steps, SPEC.protocol, {}, 1) == {"ring_gradient_error": 0.25}
    assert "ring_relative_weight_error" not in ring_facts(steps, SPEC.protocol, {"w": np.zeros(2)}, 1)


def test_how_far_weights_moved_is_of_all_of_them() -> None:
    steps = [round_line(1, ring_step=0.25)]
    one, idle, tiny = (
        ring_facts(steps, SPEC.protocol, tensors, 1)["ring_relative_weight_error"]
        for tensors in ({"w": np.full(4, 2.0)}, {"w": np.full(4, 2.0), "b": np.zeros(0), "count": np.array(7)},
                        {"w": np.full(4, 2.0), "b": np.full(4, 1e-9)})
    )  # fmt: skip
    assert one == idle  # what is empty or no float counts for nothing
    assert tiny == pytest.approx(one * np.sqrt(2))


def test_momentum_lets_a_gradient_move_a_weight_further() -> None:
    facts = ring_facts([round_line(1, ring_step=0.25)], FedSGD(learning_rate=0.5, momentum=0.5), {"w": np.ones(1)}, 1)
    assert facts["ring_weight_error"] == 0.25


FAULTS = Engine(faults=Faults(drop_probability=0.5))
INSECURE = Run(rounds=3, name="a run", insecure_secret_seed=0)
BLIND = replace(RUN, spec=replace(SPEC, data=Data(source="python", score_at_silos=True)))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (replace(RUN, warnings=["of the roles"]), ["of the roles"]),
        (replace(RUN, outcome=Outcome({}, facts={"free_scales": 0.0})), ["no scale of this model is free"]),
        (replace(RUN, spec=replace(SPEC, run=INSECURE)), ["insecure-secret-seed; it hides nothing"]),
        (replace(RUN, spec=replace(SPEC, engine=FAULTS)), ["faults were injected"]),
        (replace(RUN, history=[round_line(1, clipped=1.0), round_line(4, clipped_buffers=1.0)]), ["1, 4,"]),
        (replace(RUN, history=[round_line(n, clipped=1.0) for n in range(30)]), ["18, 19 .., being"]),
        (
            replace(
                RUN, spec=replace(SPEC, protocol=PBPFL(rho=3.0)),
                history=[round_line(1, rho=3.0), round_line(2, rho=1.5), round_line(3, rho=2.0)],
            ),
            ["rho was lowered in 2 rounds, to 1.5 at the lowest"],
        ),
        (
            replace(RUN, history=[round_line(1, ring_step=4.0)], outcome=Outcome({"w": np.ones(1)}, facts={})),
            ["fixed point has errors of up to 4 in gradients, which may have moved weights by"],
        ),
        (BLIND, ["the participants alone know"]),
        (replace(BLIND, has_scores_of_silos=True), []),
        (replace(RUN, has_test_rows=False), ["no test rows were given"]),
        (replace(BLIND, has_test_rows=False), ["the participants alone know"]),
    ],
)  # fmt: skip
def test_warnings_say_what_a_reader_should_know(run: PlayedRun, said: list[str]) -> None:
    found = warnings_of(run)
    assert len(found) == len(said)
    assert all(part in sentence for part, sentence in zip(said, found, strict=True))


def test_warnings_stand_in_one_order() -> None:
    run = replace(
        RUN, spec=replace(SPEC, run=INSECURE, engine=FAULTS), has_test_rows=False,
        warnings=["of the roles"], history=[round_line(1, clipped=1.0)],
    )  # fmt: skip
    starts = ["of the roles", "every secret", "faults", "the silos' sum", "no test rows"]
    assert [said.startswith(start) for said, start in zip(warnings_of(run), starts, strict=True)] == [True] * 5


def test_a_result_is_printed_in_few_lines_that_quote_nothing_of_a_page() -> None:
    scores = {"rows": 30, "accuracy": 0.9, "loss": 0.25, "metrics": {"auc": 0.96, "f1": 0.9}}
    name = "<b>run</b>"
    spec = replace(SPEC, run=SPEC.run.model_copy(update={"name": name}))
    result = Result(record_of(replace(RUN, spec=spec, scores=scores, best_round=1), {}), [], None, None, {})
    lines = str(result).splitlines()
    assert lines[:3] == [
        "run: <b>run</b>: fedsgd, 2 silos, 2 rounds",
        "best round: 1",
        "test, 30 rows: accuracy 0.9, loss 0.25, auc 0.96",
    ]
    assert "silos that were missing: north, south" in lines
    assert len(lines) <= 10
    assert name not in result._repr_html_()
    assert "<td>1</td>" in result._repr_html_()
    assert "<svg" not in result._repr_html_()
    rounds = [round_line(number, loss=1 / number, validation_loss=2 / number) for number in (1, 2, 3)]
    page = replace(result, history=rounds)._repr_html_()
    assert page.count("<svg") == 2
    assert "Loss on validation rows" in page
    assert "Test accuracy" not in page
    assert name not in page
    assert "var(--ink)" in page
    assert "--ink:" in page


def test_a_silo_that_was_missing_in_most_rounds_is_said() -> None:
    """A silo whose loop failed in each round was in the history alone."""
    said = "silo `north` was missing in 2 of 3 rounds, so the model knows little or nothing of its rows"
    twice = [round_line(1), round_line(2, dropped=[LEFT, LEFT]), round_line(3, dropped=[LEFT])]
    assert said in " ".join(warnings_of(replace(RUN, history=twice)))
    assert "was missing" not in " ".join(warnings_of(RUN))


def test_a_loss_that_stays_the_same_is_said() -> None:
    def warned(*losses: float, key: str = "loss") -> bool:
        lines = [round_line(number, **{key: loss}) for number, loss in enumerate(losses, start=1)]
        return "learned nothing" in " ".join(warnings_of(replace(RUN, history=lines)))

    assert warned(0.7, 0.7, 0.7000001)
    assert warned(0.7, 0.7, key="scaled_loss")
    assert not any(
        [warned(0.7), warned(0.7, 0.6999), warned(0.0, 0.0), warned(0.7, math.nan), warned(math.inf, math.inf)]
    )
