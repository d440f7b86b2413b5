"""What a report says of what was hidden: by run, the words that must stand under a role, and those that must not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moretta.protocols.common.accountant import Accountant
from moretta.protocols.common.lattice import Privacy
from moretta.report.folder import RunRecord, read_run
from moretta.report.statements import UNTESTABLE, UNTESTED, privacy_statements, reading_notes

FORBIDDEN = ("encrypt", "semantically secure", "anonym", "cannot learn", "guarantee", "safe")
CLEAR = {"secure_aggregation": {"scheme": "none", "ring_bits": None}}
SUMMED = {"secure_aggregation": {"scheme": "pairwise", "ring_bits": 64}}
SHARES = {"secure_aggregation": {"scheme": "additive-shares", "ring_bits": 64}}
PAIR = {"silos": 2, "dropped": []}
EXPOSED = "fewer than three expose each other"
UNSHOWN = "which this run’s record does not show"
OF_COLUMNS = "the mean and standard deviation of each input column"
OF_TWO = "Can work out the other’s {} in rounds of fewer than three silos, from consecutive models and its own"
LATE = [{"round": 3, "silo": "silo-2", "reason": "late: expected an answer in 5 s, it took 9.0 s"}]
GONE = [{"round": 3, "silo": "silo-2", "reason": "disconnected: gone"}]
NOISED = {"epsilon": 2.0, "delta": 1e-5, "epsilon_to_silos": 4.5, "epsilon_leaves_out": "means of the columns"}
COUNTED = {"epsilon": 4.73, "delta": 1e-5, "releases": 28.0, "noise_silos": 8.0, "epsilon_to_silos": 5.1}
COUNTED |= {"epsilon_with_noise_of_4": 7.7, "epsilon_with_noise_of_1": "unbounded"}
STATED = Accountant(Privacy(1.0, 1.0, 1e-5, 3), 0.4).facts(5)
CONFINED = {"loss": 0.2, "accuracy": 0.9, "displacement": {"loss": 0.05, "accuracy": 0.95}}
SPAN = "the silos’ gradient along the directions, which it knows: K numbers a round"
LABELS = "the balance of the other silos’ labels, where the last layer has a bias that plain gradient steps move"


def settings(protocol: Any = None, **sections: Any) -> dict[str, Any]:
    """Return what replaces a run's settings. protocol: that section; sections: the others, `_` for `-`."""
    named = {name.replace("_", "-"): keys for name, keys in sections.items()}
    return {"settings": {"engine": {"name": "in-process"}, "protocol": protocol or {}, **named}}


def sums(*of: int) -> dict[str, Any]:
    """Return that a run records sums of so many silos in round 1."""
    return {"sums": [{"of": "round", "silos": [f"silo-{one}" for one in range(n)], "rounds": [1]} for n in of]}


def said(record: RunRecord, role: str) -> str:
    return " ".join(one.text for one in privacy_statements(record) if one.role == role)


ENTROPY = {"loss": "cross-entropy"}
POWERS = {"loss": "mse", "scales": "powers-of-two"}
CASES: Sequence[tuple[str, dict[str, Any], str, Sequence[str], Sequence[str]]] = (
    ("pbpfl", {"dropped": []}, "Server",
     ["sums wrap at 2⁶⁴", "Holds the true model", "of all inputs together and of the targets, over all silos"],
     ["softmax"]),
    ("pbpfl", {"dropped": []}, "A silo",
     ["parameter values are obfuscated by 64 secret scales", "scaling and permutation", "here m = 2", "least squares",
      "the same function", "true model of round 1"],
     ["softmax", "no free scale", "three", "mantissa", "without labels"]),
    ("pbpfl", settings(ENTROPY), "Server",
     ["prediction (softmax) for each single training row", "alpha"], []),
    ("pbpfl", settings(ENTROPY), "A silo", ["Receives the true softmax", "whole offset where m is below"],
     ["once its batch has at least m samples"]),
    ("pbpfl", settings({**ENTROPY, "variant": "paper"}), "A silo",
     ["once its batch has at least m samples", "whole offset where m is below"], ["Receives the true softmax"]),
    ("pbpfl", {"facts": {"free_scales": 0.0, "forced_to_one": 3.0}}, "A silo",
     ["true parameter values", "up to the order of their channels",
      "3 weight and bias tensors that have no free scale", ", at most in another order, except"],
     ["obfuscated", "signs"]),
    ("pbpfl", {"facts": {"free_scales": 0.0, "free_signs": 8.0}}, "A silo",
     ["at most in another order and with other signs, except", "up to the order and signs of their channels"], []),
    ("pbpfl", {"facts": {"free_scales": 6.0, "forced_to_one": 1.0}}, "A silo",
     ["1 weight or bias tensor that has no free scale"], []),
    ("pbpfl", {"facts": {}}, "A silo", ["the run does not say where"], []),
    ("pbpfl", {**settings(POWERS), "facts": {"free_scales": 6.0}, **PAIR}, "A silo",
     ["the sign and the mantissa of each parameter value", "only the exponents are obfuscated by 6 secret",
      "the true exponents as averages over rounds", "up to powers of two",
      "from two consecutive rounds, without labels, the offset of the last layer",
      "the other’s gradient (at the last layer approximately)"],
     ["permutation", "only by the perturbation of the model"]),
    ("pbpfl", {**settings(POWERS), "facts": {"free_scales": 0.0}, **PAIR}, "A silo",
     ["the true parameter values except for the offset of the last layer", "Sees the hidden layers as they are",
      OF_TWO.format("gradient below the last layer")], ["without labels"]),  # nothing tells r from W
    ("pbpfl", settings({"warm-start": "start.pt"}, run={"seed": 7}), "A silo", ["obfuscated"], ["round 1"]),
    ("pbpfl", settings(), "A silo", ["obfuscated"], ["round 1"]),  # from Python: the seed makes no weights
    ("pbpfl", PAIR, "A silo", ["obfuscated only by the perturbation of the model"], []),
    ("pbpfl", {"facts": {"free_scales": 0.0, "forced_to_one": 3.0}, **PAIR}, "A silo",
     [OF_TWO.format("gradient below the last layer")], []),
    ("local", settings(data={"standardise": False}), "Server",
     ["loss and number of rows in every round and, at the end, its whole model"], []),
    ("local", settings(data={"standardise": False}), "A silo", ["at most its name and public key"], []),
    ("local", {"silos": 2}, "A silo", ["the other’s means and deviations of input columns"], [EXPOSED]),
    ("fedsgd", {"silos": 2}, "A silo", [OF_TWO.format("gradient")], []),
    ("fedavg", {"silos": 2}, "A silo", [OF_TWO.format("weight change")], ["plain gradient steps"]),
    ("fedsgd", {}, "A silo", ["Receives the model itself"],
     [EXPOSED, "drawn from the training seed", "number of rows of all silos"]),
    ("fedsgd", {"silos": 1}, "A silo", [], [EXPOSED]),
    ("fedsgd", {"dropped": LATE}, "A silo", [f"fewer than three silos, if there were any, {UNSHOWN}"], []),
    ("fedsgd", sums(2, 3), "A silo", [OF_TWO.format("gradient")], [UNSHOWN]),
    ("fedsgd", {"dropped": LATE, **sums(3)}, "A silo", [], [EXPOSED]),
    ("fedsgd", {"dropped": [LATE[0] | {"round": 81}]}, "A silo", [], [EXPOSED]),  # at the release
    ("fedsgd", {"silos": 4, **settings(run={"participation": 0.5})}, "A silo", [EXPOSED], []),
    ("fedsgd", settings(run={"participation": 0.5}, data={"batch-size": 0}), "A silo",
     ["drawn from the training seed", "number of rows of all silos together"], []),
    ("fedsgd", settings(run={"participation": 0.5}), "Server",
     ["by differences of totals, as not all sums are over the same silos"], []),
    ("fedsgd", {}, "Server", ["sums wrap at 2⁶⁴", "as no roster is set"],
     ["differences of totals", "differentially private", "given up as late"]),
    ("fedsgd", CLEAR, "Server", ["gradient of each silo by itself"], ["only sums", "roster"]),
    ("fedsgd", {"secure_aggregation": None}, "Server", ["gradient of each silo by itself"], ["only sums"]),
    *(("fedsgd", {"dropped": LATE, **scheme}, "Server", ["given up as late", UNSHOWN], [])
      for scheme in (SUMMED, SHARES)),
    *(("fedsgd", {"dropped": GONE, **scheme}, "Server", [], ["given up as late"]) for scheme in (SUMMED, SHARES)),
    *(("fedavg", {**scheme, **settings(secure_aggregation=keys)}, "Server", words, without)
      for scheme in (SUMMED, SHARES)
      for keys, words, without in (
          ({"weights": "hidden"}, ["only sums of the silos’ weight changes", "as no roster is set",
                                   "can read each silo’s update"], ["weights are public", "given up as late"]),
          ({"roster": "r.toml", "identity": "k"}, ["signed with its identity in the roster"], ["no roster is set"]),
          ({"weights": "public"}, ["Sees each silo’s weight in the sum: weights are public."], []))),
    ("fedsgd", {"facts": NOISED, **SUMMED}, "Server",
     ["ε = 2 and δ = 1e-05", "with ε = 4.5", "Not counted: means of the columns."], []),
    ("fedsgd", {"facts": COUNTED, **SUMMED}, "Server",
     ["That counts 28 noised sums that may have been opened, and assumes that the observer does not know the noise of "
      "8 silos, less those who are lost; with the noise of 4 alone ε = 7.7, of 1 alone ε = unbounded."], []),
    ("fedsgd", {"facts": {**COUNTED, "noise_silos": 1.0}, **SUMMED}, "Server",
     ["That counts 28 noised sums that may have been opened; each silo adds all of the noise."], []),
    ("fedsgd", {"facts": STATED, **SUMMED}, "Server",
     ["A round includes each example with a chance of at most 0.4, independently and in secret.",
      "It is trusted that each silo adds its share of the noise", "The theorem: discrete Gaussian noise hides"], []),
    ("swarm", {}, "Server", ["no sentence about the protocol swarm"], []),
    ("fedavg", {"secure_aggregation": {"scheme": "odd", "ring_bits": 64}}, "Server",
     ["no sentence about the aggregation scheme odd"], []),
    *((protocol, settings(steps, **more), "A silo", [LABELS] * holds, [LABELS] * (not holds))
      for protocol in ("fedsgd", "pbpfl", "baffle", "cgd")
      for steps, more, holds in (({"optimizer": "sgd", "momentum": 0.0}, {}, True), ({"optimizer": "adam"}, {}, False),
                                 ({"momentum": 0.9}, {}, False))),
    ("fedsgd", {"silos": 1, **settings()}, "A silo", [], [LABELS]),
    ("cgd", settings(data={"grid": [2, 2]}), "A silo", [], [LABELS]),
    ("fedsgd", {"regression": True}, "A silo", ["the mean of the other silos’ targets, where the last"], [LABELS]),
    ("cgd", {**settings(), "test": CONFINED}, "Server",
     ["sums that it cannot read", "as no roster is set", "who takes part in what"], []),
    ("cgd", {**settings(), "test": CONFINED}, "A silo",
     ["which by itself is a model", "95.0 %, the worst confined model 90.0 %"], ["raw features"]),
    ("cgd", settings({"blind": False}), "Server", ["Sees D, the sum of all steps"], ["cannot read"]),
    ("cgd", settings({"vertical": "joint"}, data={"grid": [3, 3]}), "A silo",
     ["Silos together can work out raw features", "group its rows by label"], ["Holds the labels of its rows"]),
    ("cgd", settings({"vertical": "independent"}, data={"grid": [3, 3]}), "A silo", ["Holds the labels of its rows"],
     ["raw features"]),
    *(("cgd", settings(engine={"name": "fused"}), role, ["Sees everything"], ["keys"])
      for role in ("Server", "A silo")),
    ("baffle", settings(data={"standardise": True, "batch-size": 32}), "Server",
     ["only sums of the silos’ loss-difference vectors", SPAN, "Holds the true model.",
      f"the number of rows that a round uses and {OF_COLUMNS}, over all silos"], ["private"]),
    ("baffle", settings(data={"batch-size": 32}), "A silo",
     ["Receives the model itself in every round, runs it forward only, and knows all directions."],
     [EXPOSED, "number of rows of all silos together"]),
    ("baffle", settings(data={"batch-size": 0}), "A silo", ["number of rows of all silos together"], []),
    ("baffle", settings({"local-epochs": 2}), "Server", ["of the silos’ weight changes"],
     ["loss-diff", "along the directions"]),
    ("baffle", settings({"directions": "own"}), "Server",
     ["of the silos’ gradient estimates", "Is not given the directions"], ["along the directions"]),
    ("baffle", settings({"directions": "own"}), "A silo", ["knows its own directions alone"], []),
    ("baffle", {**settings(), "facts": NOISED}, "Server", ["ε = 2 and δ = 1e-05", SPAN], []),
    *(("baffle", {**settings(keys), **more}, role, [words.format(upload)], without)
      for keys, upload in (({}, "loss-difference vector"), ({"local-epochs": 1}, "weight change"),
                           ({"directions": "own"}, "gradient estimate"))
      for more, role, words, without in ((CLEAR, "Server", "{} of each silo by itself", ["only sums"]),
                                         (PAIR, "A silo", OF_TWO, []))),
    ("pbpfl", {}, "An eavesdropper", ["no message leaves the machine"], []),
    ("pbpfl", settings(run={"seed": 7}, engine={"name": "flare"}), "An eavesdropper",
     ["NVIDIA FLARE carries messages over TLS with a certificate on either side"], []),
    ("pbpfl", settings(run={"seed": 7}, engine={"name": "flare"}), "A silo", [], ["round 1"]),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{place}-{case[0]}" for place, case in enumerate(CASES)])
def test_a_run_says_under_each_role_what_holds_of_it(make_run: Any, case: Any) -> None:
    protocol, replaced, role, words, without = case
    text = said(read_run(make_run(protocol, **replaced)), role)
    assert [one for one in words if one not in text] == []
    assert [one for one in without if one in text] == []


@pytest.mark.parametrize("protocol", ["pbpfl", "fedsgd", "fedavg", "fedprox", "local", "centralised", "cgd", "baffle"])
def test_every_role_has_a_sentence_none_is_tested_none_promises_more_than_the_design(
    make_run: Any, protocol: str
) -> None:
    record = read_run(make_run(protocol))
    statements, notes = privacy_statements(record), reading_notes(record)
    assert {one.role for one in statements} == {"Server", "A silo", "An eavesdropper"}
    assert all(one.evidence in (UNTESTED, UNTESTABLE) for one in statements)
    text = " ".join([one.text for one in statements] + list(notes)).lower()
    assert not [word for word in FORBIDDEN if word in text]
    assert "one process ran all roles" in text
    far = record.model_copy(update={"settings": {**record.settings, "engine": {"name": "flare"}}})
    assert "one process ran all roles" not in " ".join(reading_notes(far)).lower()


@pytest.mark.parametrize("protocol", ["pbpfl", "fedsgd", "fedavg", "fedprox", "local"])
def test_the_common_statistics_are_named_where_inputs_are_standardised(make_run: Any, protocol: str) -> None:
    for standardise in (True, None, False):
        data = {} if standardise is None else {"standardise": standardise}
        record = read_run(make_run(protocol, folder=str(standardise), **settings(data=data), **SUMMED))
        for role in ("Server", "A silo"):
            assert (OF_COLUMNS in said(record, role)) == (standardise is not False)
            assert ("if inputs are standardised" in said(record, role)) == (standardise is None)
    plain = read_run(make_run(protocol, folder="plain", **settings(data={"standardise": True}), **CLEAR))
    assert f"{OF_COLUMNS}, of each silo by itself" in said(plain, "Server")
