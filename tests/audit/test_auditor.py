"""What becomes of attacks: run or not and why, in order, their pictures, and what goes wrong in one of them."""

import dataclasses
import json
import stat
from pathlib import Path

import numpy as np
import pytest
from recorded import recorded, run_file_of

from moretta.audit import auditor
from moretta.audit.evidence.attack import Attack, AttackResult, Given, Reconstruction, always
from moretta.config import run_files
from moretta.contract.wording import enumerated
from moretta.errors import ParameterError
from moretta.run.assembly import federation_of
from moretta.run.preview import missing_in_audit


def nothing(case):
    """Claim nothing."""
    return {}


def given(truth):
    return Given({}, {"x": np.zeros(1)}, "nothing", "nothing")


def finding(claim, truth):
    return AttackResult("of a test", 0.7, 0.5, (0.6, 0.8), "It is found", {"more": 2.0})


def attack(name, **changed):
    made = Attack(
        name, "is a test", "protocol", "server", "a test", frozenset({"fedsgd"}), always, given, nothing, finding
    )
    return dataclasses.replace(made, **changed)


def broken(*_):
    raise ParameterError("there is no such thing")


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("run"), run={"rounds": 2})


@pytest.fixture
def audited(truth, monkeypatch):
    """Audit with attacks whose claims are made here: their process has a test file of its own."""
    monkeypatch.setattr(auditor, "claim_of", lambda attack, case, seconds, origin: attack.attack(case))

    def run(*chosen, **more):
        return auditor.audit(truth.folder, truth.federation, 2, 5, chosen=chosen, **more)

    return run


def test_in_the_order_that_they_were_chosen(audited, truth):
    names = ["b", "d", "a", "c"]
    told = []
    found = audited(*map(attack, names), progress=lambda done, of, name: told.append((done, of, name)))
    assert [one["attack"] for one in found.attacks] == names
    assert [one[:2] for one in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {one[2] for one in told} == set(names)
    line = found.attacks[0]
    assert (line["score"], line["chance"], line["interval"], line["succeeded"]) == (0.7, 0.5, [0.6, 0.8], True)
    assert line["sentence"] == "It is found."
    content = json.loads((truth.folder / "audit.json").read_text())
    assert content["attacks"] == json.loads(json.dumps(found.record["attacks"]))


def test_why_attacks_did_not_run(audited):
    chosen = [
        attack("other", protocols=frozenset({"pbpfl"})),
        attack("unfit", fits=lambda run: "it does not fit"),
        attack("unknown", given=broken),
        attack("unmade", attack=lambda case: 1 / 0),
        attack("unscored", score=broken),
        attack("good"),
    ]
    found = audited(*chosen)
    assert [one["attack"] for one in found.attacks] == ["good"]
    why = {one["attack"]: one["because"] for one in found.record["not_run"]}
    assert list(why) == ["unfit", "unknown", "unmade", "unscored"]  # of another protocol nothing is said
    assert why["unfit"] == "it does not fit"
    assert why["unknown"] == why["unscored"] == "there is no such thing"
    assert why["unmade"] == "it ended with ZeroDivisionError: division by zero"


def test_slow_attacks_are_for_thorough_audits(audited):
    slow = attack("slow", slow=True)
    assert [one["because"] for one in audited(slow).record["not_run"]] == ["it is slow; ask for it by --thorough"]
    assert [one["attack"] for one in audited(slow, thorough=True).attacks] == ["slow"]


def test_a_failed_attack_says_so(audited):
    def failed(claim, truth):
        return dataclasses.replace(finding(claim, truth), interval=(0.4, 0.8))

    def unknown(claim, truth):
        return dataclasses.replace(finding(claim, truth), interval=(0.0, 1.0), constant=0.9)

    line, silent = audited(attack("failed", score=failed), attack("unknown", score=unknown)).attacks
    assert not line["succeeded"]
    assert line["sentence"] == "It is found: this attack failed."
    assert silent["sentence"] == "It is found: this is no evidence."
    assert (silent["constant"], "constant" in line) == (0.9, False)


WEIGHTED = {"protocol": {"loss": "cross-entropy", "class_weights": [1.0] * 9 + [2.0]}}
TAKEN = ["gradient-inversion", "gradient-inversion-of-sum", "labels-from-head", "silo-property", "server-and-silos"]


@pytest.mark.parametrize(("changed", "taken"), [
    (WEIGHTED, {"class-weights": TAKEN}),
    ({"data": {"augment": "none"}}, {}),
    ({"protocol": {"momentum": 0.5}}, {"momentum": ["silo-property"]}),
    ({"protocol": {"loss": "cross-entropy"}}, {}),
])  # fmt: skip
def test_what_a_setting_takes_from_an_audit_is_said_before_training(tmp_path, changed, taken):
    (tmp_path / "run.toml").write_text(run_file_of(changed))
    federation = federation_of(run_files.load(tmp_path / "run.toml"), None)
    said = missing_in_audit(federation)
    assert said == [
        f"{key} prevents {len(names)} attack{'s' * (len(names) > 1)} of an audit: {enumerated(names)}."
        for key, names in taken.items()
    ]
    (tmp_path / "run.toml").write_text(run_file_of({**changed, "run": {"record_views": False}}))
    assert missing_in_audit(federation_of(run_files.load(tmp_path / "run.toml"), None)) == []


def test_pictures_are_for_the_owner_alone(audited, truth):
    picture = Reconstruction("rows", np.zeros((20, 1, 2, 2)), np.ones((20, 1, 2, 2)))

    def shown(claim, truth):
        return dataclasses.replace(finding(claim, truth), pictures=[picture])

    (line,) = audited(attack("shown", score=shown)).attacks
    (again,) = audited(attack("shown", score=shown)).attacks
    assert [path.name for path in (truth.folder / "audit").iterdir()] == [Path(again["pictures"][0]["file"]).name]
    assert again["pictures"] != line["pictures"]
    line = again
    assert [one["caption"] for one in line["pictures"]] == ["rows"]
    file = truth.folder / line["pictures"][0]["file"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_an_audit_that_is_killed_leaves_an_earlier_one_whole(audited, truth, monkeypatch):
    def shown(claim, truth):
        picture = Reconstruction("rows", np.zeros((2, 1, 2, 2)), np.ones((2, 1, 2, 2)))
        return dataclasses.replace(finding(claim, truth), pictures=[picture])

    def killed(*_):
        raise KeyboardInterrupt

    (line,) = audited(attack("shown", score=shown)).attacks
    monkeypatch.setattr(auditor.RunFolder, "write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        audited(attack("without"))
    assert json.loads((truth.folder / "audit.json").read_text())["attacks"] == [line]
    assert (truth.folder / line["pictures"][0]["file"]).exists()


def test_what_attackers_had_for_background_is_recorded(audited):
    x, y = np.zeros((4, 64)), np.arange(4)
    assert audited(attack("one")).record["background"] == "test rows"
    assert audited(attack("one"), background=(x, y)).record["background"] == "rows given from Python"
    told = audited(attack("one"), background=(x, y), background_name="rows.npz")
    assert told.record["background"] == "rows.npz"


def test_scores_above_limits(audited):
    found = audited(attack("one"), attack("two"), attack("lost", score=broken))
    assert found.above({"one": 0.69}) == {"one": "one scores 0.7, above 0.69"}
    assert found.above({"one": 0.7}) == {}
    assert list(found.above({"lost": 2.0, "one": 0.7, "two": 0.1}).values()) == [
        "lost has no score: there is no such thing", "two scores 0.7, above 0.1",
    ]  # fmt: skip
    with pytest.raises(ParameterError, match="the attacks on this run are one, two"):
        found.above({"nothing-of-the-kind": 0.1})


def test_background_has_to_be_rows_of_the_same_kind(audited):
    for x, y, why in (
        (np.zeros((4, 3)), np.zeros(4), "rows of shape"),
        (np.full((4, 64), np.nan), np.zeros(4), r"finite numbers, got some that are not \(float64\)"),
        (np.zeros((4, 64), dtype=bool), np.zeros(4), "finite numbers, got bool"),
        (np.zeros((4, 64)), np.full(4, 99), "^background: expected classes 0 to 9"),
        (np.zeros((1, 64)), np.zeros(1), "at least two rows"),
        (np.zeros((4, 64)), np.zeros(3), "as many of x as of y"),
    ):
        with pytest.raises(ParameterError, match=why):
            audited(attack("one"), background=(x, y))
