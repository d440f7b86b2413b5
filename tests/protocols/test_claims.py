"""Claims are data that holds: their attacks are there, their conditions decide, their sentences can be said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from moretta.audit.auditor import all_attacks
from moretta.protocols.common.claims import PAST, SHARED, Record
from moretta.protocols.registry import claims_of

NAMES = ("pbpfl", "fedsgd", "fedavg", "fedprox", "local", "centralised", "cgd", "baffle")
EVERY = [(name, claim) for name in NAMES for claim in claims_of(name)]
FORBIDDEN = ("encrypt", "semantically secure", "anonym", "cannot learn", "guarantee", "safe")


def record(
    silos: int = 3,
    secure: Any = None,
    warnings: Sequence[str] = (),
    facts: Any = None,
    dropped: Any = (),
    **settings: Any,
) -> Record:
    """Return a run's record with what claims depend on. settings: sections of the run file."""
    return {
        "protocol": "?",
        "task": "classification",
        "rounds": 10,
        "silos": silos,
        "dropped": dropped,
        "warnings": warnings,
        "facts": facts or {},
        "secure_aggregation": secure or {"scheme": "pairwise", "ring_bits": 64},
        "settings": settings,
        "test": {},
    }


LATE = [{"round": 3, "silo": "silo-2", "reason": "late: expected an answer in 5 s"}]
NOISE = {"epsilon": 2.0, "delta": 1e-5, "releases": 28.0, "noise_silos": 8.0, "epsilon_with_noise_of_4": 7.7}

OF_SUMS: dict[str, Any] = {"secure-aggregation": {"weights": "public", "roster": "roster.toml"}}

RECORDS = [
    record(),
    record(silos=1),
    record(silos=2, data={"standardise": False, "batch-size": 0}),
    record(secure={"scheme": "none", "ring_bits": None}),
    {"protocol": "?", "task": "regression", "rounds": 1, "silos": 2, "test": {}},  # what an older run may lack
    record(dropped=LATE, run={"participation": 0.5, "seed": 7}, engine={"name": "in-process"}),
    record(run={"seed": 7}, engine={"name": "flare"}, data={"score-at-silos": True, "test": "test.npz", "look": True}),
    record(engine={"name": "fused"}, protocol={"momentum": 0.9, "loss": "cross-entropy"}),
    record(facts=NOISE, **OF_SUMS),
    record(facts=NOISE | {"unit": "group"}, **OF_SUMS),
    record(facts={"free_scales": 0.0, "forced_to_one": 3.0}, protocol={"scales": "powers-of-two", "variant": "paper"}),
    record(facts={"free_scales": 6.0, "frozen": 2.0}, protocol={"scales": "powers-of-two", "partitions": 2}),
    record(protocol={"blind": False, "local-epochs": 1}),
    record(warnings=["layer 1 is shared by a and b and nobody else"], data={"grid": [2, 2]}),
    record(data={"grid": [2, 2]}, protocol={"vertical": "independent"}),
    record(data={"grid": [2, 2]}, protocol={"align": True, "hidden-bias": "shared", "weight-decay": 1e-6}),
    record(silos=2, facts={"free_scales": 0.0}),
    record(silos=2, facts={"free_scales": 6.0}, protocol={"scales": "powers-of-two"}),
    record(protocol={"loss": "cross-entropy", "variant": "paper"}),
    record(protocol={"loss": "cross-entropy", "variant": "paper", "exchange": "ratios"}, facts={"outputs": 2.0}),
    record(data={"score-at-silos": "classes"}, protocol={"blind": False}),
    record(dropped=LATE, protocol={"blind": False, "local-epochs": 1}),
    record(facts=NOISE, protocol={"local-epochs": 1}),
    record(silos=2, protocol={"local-epochs": 1}),
    record(protocol={"local-epochs": 1, "fit": "ours:fit"}),
    record(secure={"scheme": "none"}, protocol={"local-epochs": 1}),
    record(data={"missing": "mean"}),
    record(silos=2, data={"standardise-targets": True}),
    record(data={"source": "sites", "validation-fraction": 0.2}),
    record(columns={"age": {"kind": "number", "blanks": "median", "range": [0, 120]}, "ward": {"kind": "category"}}),
    record(protocol={"local-epochs": 1}, **OF_SUMS),
    record(dropped=LATE, protocol={"directions": "own", "batch-statistics": True}),
    record(protocol={"directions": "own"}, **OF_SUMS),
    record(silos=2, secure={"scheme": "none"}, protocol={"directions": "own", "batch-statistics": True}),
    record(protocol={"perturb": "blocks"}),
    record(protocol={"perturb": "blocks", "linear": "activations"}),
    record(silos=2, secure={"scheme": "none"}, protocol={"perturb": "blocks", "linear": "activations"}),
]


def test_every_attack_that_a_claim_names_exists_and_every_attack_tests_a_claim() -> None:
    named = {name for _, claim in EVERY for name in claim.attacks}
    assert named == {attack.name for attack in all_attacks()}


def test_a_claim_that_rests_on_tests_names_what_is_there(request: pytest.FixtureRequest) -> None:
    paths = {path for _, claim in EVERY for path in claim.rests_on.split("`")[1::2]}
    assert paths
    assert not [path for path in paths if not (request.config.rootpath / path).exists()]


CONDITIONS = {condition.says: condition for _, claim in EVERY for condition in claim.where}


@pytest.mark.parametrize("says", CONDITIONS)
def test_a_condition_can_be_true_and_false(says: str) -> None:
    assert {CONDITIONS[says](run) for run in RECORDS} == {True, False}


def test_conditions_of_one_wording_are_one() -> None:
    assert len(CONDITIONS) == len({condition for _, claim in EVERY for condition in claim.where})


@pytest.mark.parametrize("run", RECORDS)
def test_every_claim_that_holds_can_be_said(run: Record) -> None:
    for name, claim in EVERY:
        if claim.holds(run):
            said, head = (say({**run, "protocol": name}) for say in (claim.sentence, claim.headline))
            assert said[0].isupper()
            assert said.endswith(".")
            assert not said.endswith("..")
            assert not [sign for sign in ("{", "|") if sign in said + head]
            assert bool(head) == ("|" in claim.text)
            assert not head.endswith(".")
            if head and claim.role != "reader":
                assert head.split()[0] in PAST.values()


def test_each_sentence_is_said_of_some_run() -> None:
    assert not [claim.text for _, claim in EVERY if not any(claim.holds(run) for run in RECORDS)]


def test_no_claim_promises_more_than_its_audit() -> None:
    for _, claim in EVERY:
        assert not [word for word in FORBIDDEN if word in claim.text.lower()], claim


def test_what_has_no_attack_and_all_protocols_share_is_in_the_list_of_all() -> None:
    for claim in (*claims_of("fedsgd"), *claims_of("pbpfl"), *claims_of("baffle")):
        if not claim.attacks and claim.role == "eavesdropper":
            assert claim in SHARED


def test_claims_of_a_package_are_those_of_the_protocol() -> None:
    assert not claims_of("swarm")
    assert any("gradient of each silo" in claim.text for claim in claims_of("fedsgd"))
    assert not any("gradient of each silo" in claim.text for claim in claims_of("fedavg"))
    assert all(claim.role in ("silo", "server", "eavesdropper", "reader") for claim in claims_of("local"))


def test_claims_need_neither_torch_nor_pydantic() -> None:
    modules = ", ".join(f"moretta.protocols.{name}.claims" for name in ("pbpfl", "fedsgd", "cgd", "baffle"))
    script = f"import sys, {modules}; sys.exit(any(one in sys.modules for one in ('torch', 'pydantic')))"
    subprocess.run([sys.executable, "-c", script], check=True)
