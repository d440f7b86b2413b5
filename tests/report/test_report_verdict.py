"""What a page says first: three sentences a run, and words for the ends of every scale."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from test_report_audit import audited

import moretta.audit.attacks
from moretta.protocols.registry import ENTRIES
from moretta.report import plots
from moretta.report.audit import by_severity, who_does
from moretta.report.folder import ClassScore, ClassTables, read_run
from moretta.report.page import write_report
from moretta.report.statements import HEADINGS, epsilon_note, remarks, verdict_text, verdicts
from moretta.report.table import SCALES, SCORED, UNKNOWN, ZEROS, OverSeeds, Row, comparison, ends, meanings, way

PROTOCOLS = tuple(ENTRIES)
NEVER = ("safe", "secure ", "compliant", "anonym", "cannot learn", "guarantee", "no risk", "protected")
IN_PROCESS = "One process ran all roles, so the owner of its machine saw everything. In separate roles: "


def sentences(record, *others):
    return verdicts([record, *others])[0].sentences


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("tried", [False, True])
def test_every_run_has_three_sentences_and_none_promises(make_run, protocol, tried):
    folder = make_run(protocol)
    (verdict,) = verdicts([read_run(audited(folder) if tried else folder)])
    good, hidden, attacks = verdict.sentences
    for said in verdict.sentences:
        assert re.fullmatch(r"[A-Z].*\.", said)
        assert not re.search(r"[.?!] +[a-z]|\(\)|  |;;|\.\.", said)
        assert not [word for word in NEVER if word in said.lower()]
    assert "97.4 %" in good
    assert "100 % is perfect" in good
    assert hidden.startswith(f"{IN_PROCESS}the server ")
    assert "; a silo " in hidden
    assert attacks.startswith("No audit ran, so what attacks would get is not known" if not tried else "With the mess")
    assert ("a silo works out <the> offset (gamma-least-squares), 99.7 % of the way" in attacks) == tried
    assert [line.partition(": ")[0] for line in verdict_text(verdict).plain.splitlines()] == list(HEADINGS)


def test_a_page_begins_with_them_and_sets_attacks_names_small(make_run, tmp_path):
    folders = [audited(make_run("pbpfl")), make_run("fedsgd")]
    text = " ".join(write_report(folders, tmp_path / "a.html").read_text().split())
    assert text.count("<dt>What attacks got</dt>") == 2
    assert text.index("What was hidden</dt>") < text.index("What attacks got</dt>") < text.index("<h2>Comparison")
    assert "a silo works out &lt;the&gt; offset <small><code>(gamma-least-squares)</code></small>, 99.7 %" in text
    assert "<section><h2>PBPFL</h2>" in text
    assert "No audit ran, so what attacks would get is not known" in text


def test_runs_on_one_page_say_once_what_holds_of_all(make_run, tmp_path):
    folders = [audited(make_run("pbpfl")), make_run("fedsgd"), make_run("local")]
    text = " ".join(write_report(folders, tmp_path / "a.html").read_text().split())
    shared = (
        "100 % is perfect; always guessing the most frequent class scores that class’s part of the rows. "
        "One process ran all roles, so the owner of its machine saw everything. The sentences on what was "
        "hidden are about separate roles. "
        "That an attack failed does not show that none can succeed."
    )
    head = text[: text.index("<h2>Comparison")]
    assert " ".join(remarks([read_run(folder) for folder in folders])) == shared
    assert shared in head
    assert head.count("100 % is perfect") == head.count("One process ran") == 1
    assert head.count("the model reaches an accuracy of 97.4 %") == 2
    insecure = make_run("fedavg", insecure_secret_seed=True)
    assert not any("One process" in one for one in remarks([read_run(one) for one in (folders[0], insecure)]))


def test_the_sentences_of_one_run(make_run):
    folder = audited(make_run("fedsgd", views="a", rounds=80), views=[0, 1, 2, 80, 81])
    assert sentences(read_run(folder)) == (
        "On the test rows the model reaches an accuracy of 97.4 %. Scale: 100 % is perfect; always guessing the most "
        "frequent class scores that class’s part of the rows.",
        f"{IN_PROCESS}the server saw only sums of the silos’ gradients and what follows from them, was "
        "trusted to pass on the silos’ keys unchanged and held the true model; a silo received the model itself in "
        "every round.",
        "With the messages of 3 of 80 rounds: the one attempt to find out who is in the data failed; 2 of 3 attempts "
        "to reveal what the protocol gives anyway succeeded, of which this one got furthest: a silo works out <the> "
        "offset (gamma-least-squares), 99.7 % of the way from guessing to perfect. That an attack failed does not "
        "show that none can succeed.",
    )


def test_what_the_commonest_class_gets_is_a_number_where_rows_of_classes_are_counted(make_run):
    record = read_run(make_run("fedsgd"))
    counts = (("no", 30), ("yes", 10))
    each = tuple(ClassScore.model_validate({"class": name, "rows": n, "predicted": n}) for name, n in counts)
    test = record.test.model_copy(update={"classes": ClassTables(by_class=each)})
    counted = record.model_copy(update={"test": test})
    always = "always guessing the most frequent class scores 0.5, 0.5 and 75.0 %, in this order"
    assert sentences(counted)[0] == (
        "On the test rows the model reaches a ranking score (AUC) of 0.996, a balanced accuracy (each class counts the "
        f"same) of 0.969 and an accuracy of 97.4 %. Scale: 1 is perfect; {always}."
    )
    scale, *_ = remarks([read_run(make_run("local")), counted])  # which has no tables, and the same rows
    assert scale == f"1 is perfect; {always}."
    assert sum("most frequent" in one for one in remarks([read_run(make_run("pbpfl")), counted])) == 1
    sure = counted.model_copy(update={"test": test.model_copy(update={"intervals": {"auc": (0.9, 1.0)}})})
    (scale,) = (one for one in remarks([counted, sure]) if "most frequent" in one)  # one sentence, the longer
    assert scale.endswith("intervals are in square brackets.")


def surely(make_run, uneven, folder="", accuracy=0.9, **more):
    """A run whose figures have intervals, of 100 test rows about 50 people."""
    counts = (("no", 80 if uneven else 55), ("yes", 20 if uneven else 45))
    by_class = [{"class": name, "rows": n, "predicted": n} for name, n in counts]
    bins = [{"from": 0.5, "to": 0.6, "rows": 100, "probability": 0.55, "accuracy": 0.9}]
    metrics = {"auc": 0.8, "balanced_accuracy": 0.7, "average_precision": 0.6}
    sure = {key: [value - 0.05, value + 0.05] for key, value in {"accuracy": accuracy, **metrics}.items()}
    curve = [0.0, 0.5, 1.0]
    test = {
        "rows": 100, "units": 50, "loss": 0.3, "accuracy": accuracy, "metrics": metrics, "intervals": sure,
        "baseline": counts[0][1] / 100, "classes": {"by_class": by_class, "reliability": bins},
        "curves": {"roc": curve, "precision_recall": curve},
    }  # fmt: skip
    return read_run(make_run("fedsgd", folder=folder or f"uneven-{uneven}", test=test, **more))


def test_where_classes_are_uneven_the_verdict_leads_with_what_the_commonest_does_not_carry(make_run):
    uneven, even = (sentences(surely(make_run, one))[0] for one in (True, False))
    assert uneven == (
        "On 100 test rows about 50 people or things the model reaches a ranking score (AUC) of 0.8 [0.75 to 0.85], a "
        "balanced accuracy (each class counts the same) of 0.7 [0.65 to 0.75], an average precision of 0.6 "
        "[0.55 to 0.65] and an accuracy of 90.0 % [85.0 % to 95.0 %]. Scale: 1 is perfect; always guessing the most "
        "frequent class scores 0.5, 0.5, 0.2 and 80.0 %, in this order; 95 % intervals are in square brackets."
    )
    assert even.startswith("On 100 test rows about 50 people or things the model reaches an accuracy of 90.0 % [85.0")
    assert "class scores 55.0 %; 95 %" in even
    table = comparison([surely(make_run, True, "one")])
    assert table.heads[2:] == ("95 % interval", "Guessing")
    first = [(row.measure, row.cells[1:]) for row in table.rows[:4]]
    assert first == [
        ("AUC", ("0.7500 to 0.8500", "0.5000")),
        ("Balanced accuracy", ("0.6500 to 0.7500", "0.5000")),
        ("Average precision", ("0.5500 to 0.6500", "0.2000")),
        ("Accuracy", ("0.8500 to 0.9500", "0.8000")),
    ]


def test_a_classifier_s_squared_error_is_not_beside_an_accuracy(make_run):
    """Two classes under the squared error have both, and what always naming the commonest gets is an accuracy."""
    record = surely(make_run, True)
    both = record.test.model_copy(update={"mse": 0.2, "classes": None})
    assert (both.guessed("accuracy"), both.guessed("mse")) == (0.8, None)
    assert both.model_copy(update={"accuracy": None}).guessed("mse") == 0.8


def test_the_verdict_is_over_all_seeds(make_run):
    records = tuple(surely(make_run, False, f"seed-{n}", one) for n, one in enumerate((0.9, 0.7)))
    (verdict,) = verdicts(records[:1], spreads=[OverSeeds("FedSGD", (0, 1), records)])
    assert verdict.good.startswith(
        "On 100 test rows about 50 people or things, on average over 2 seeds, the model reaches an accuracy of 80.0 % "
        "[70.0 % to 90.0 %]. Scale: 100 % is perfect; always guessing the most frequent class scores 55.0 %; the least "
        "and the most over seeds are in square brackets."
    )


def test_where_only_a_loss_is_measured_it_is_the_verdict(make_run):
    """Probabilities as targets under cross-entropy have no accuracy and no mse, and their loss is not 0 at best."""
    tests = [{"rows": 10, "loss": loss, "mean": {"loss": 1.0}} for loss in (1.25, 1.75)]
    records = tuple(
        read_run(make_run("cgd", folder=f"seed-{n}", task="regression", test=test)) for n, test in enumerate(tests)
    )
    beside = "beside a loss of 1 as the mean of the silos’ models. Scale: less is better"
    assert sentences(records[0])[0] == (
        f"On 10 test rows the worst of the silos’ models reaches a loss of 1.25, {beside}."
    )
    (verdict,) = verdicts(records[:1], spreads=[OverSeeds("CGD", (0, 1), records)])
    assert f"reaches a loss of 1.5 [1.25 to 1.75], {beside}; the least and the most over seeds" in verdict.good


def test_curves_stand_above_all_seconds_and_noise_is_not_magnified(make_run, tmp_path):
    record = surely(make_run, True, facts={"best_round": 20.0})
    lines = [
        json.loads(line) | {"validation_loss": 0.4}
        for line in (record.folder / "history.jsonl").read_text().splitlines()
    ]
    (record.folder / "history.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = write_report([record.folder], tmp_path / "a.html").read_text()
    titles = re.findall(r"<svg[^>]*><title[^>]*>(.*?)</title>", text)
    assert [title.removesuffix(" over rounds") for title in titles] == [
        "Training loss", "Test accuracy", "Loss on validation rows", "ROC curve", "Precision and recall", "Calibration",
        "Seconds by phase", "Bytes per silo and round",
    ]  # fmt: skip
    above = text[: text.rindex("Precision and recall")]
    assert not re.search(r"\d s\b|[Ss]econds|Total \(s\)", re.sub(r"<style>.*?</style>", "", above, flags=re.S))
    assert 'id="validated-best-20"' in text
    assert "which choose the best round; a vertical line marks it." in text
    result = json.loads((record.folder / "result.json").read_text())
    (record.folder / "result.json").write_text(json.dumps(result | {"facts": {}}))
    assert "Loss on the validation rows.\n" in write_report([record.folder], tmp_path / "a.html").read_text()
    assert "The dashed line is the score of always predicting the most frequent class" in text
    for measure, values, ends_of in (
        ("test_accuracy", [0.97, 0.98], (0.75, 1.02)),  # from below what the commonest class gets
        ("test_accuracy", [0.2, 0.98], (0.15, 1.02)),
        ("validation_loss", [0.31, 0.3], (0.0, 0.3255)),
    ):
        axes = Figure().add_subplot()
        plots._span(axes, [record], measure, values)
        assert axes.get_ylim() == pytest.approx(ends_of)


def test_it_is_said_what_an_audit_would_need(make_run):
    assert "were not recorded, so only a new run" in sentences(read_run(make_run("local")))[2]
    assert "so moretta audit can attack them" in sentences(read_run(make_run("fedsgd", views="a")))[2]
    empty = sentences(read_run(audited(make_run("pbpfl"), attacks=[])))[2]
    assert empty.startswith("An audit ran, but none of its attacks gave a score")


def test_baselines_stand_beside_a_run_that_is_alike(make_run):
    run, alone, pooled = (read_run(make_run(name)) for name in ("pbpfl", "local", "centralised"))
    beside = "an accuracy of 97.4 %, beside 97.4 % where silos train alone and 97.4 % where all rows are in one place. "
    assert beside in sentences(run, alone, pooled)[0]
    assert "beside 97.4 % where all rows are in one place. " in sentences(alone, run, pooled)[0]
    assert "a silo’s own model, on average, reaches" in sentences(alone)[0]
    other = alone.model_copy(update={"name": "other"})
    later = alone.model_copy(update={"settings": {**alone.settings, "run": {"seed": 8}}})
    assert "beside" not in sentences(run, other, later)[0]


@pytest.mark.parametrize(
    ("own", "theirs", "alike"),
    [
        ({"rows": 284}, {"rows": 57}, False),
        ({"rows": 57}, {"rows": 57}, True),
        ({}, {"rows": 57}, True),  # of an earlier version
        ({"rows": 57, "digest": "a"}, {"rows": 57, "digest": "b"}, False),
        ({"rows": 57, "digest": "a"}, {"rows": 57, "digest": "a"}, True),
        ({"rows": 57, "digest": "a"}, {"rows": 57}, True),
        ({"rows": 57, "digest": "a", "by": "silos"}, {"rows": 57, "digest": "b", "by": "silos"}, False),
        ({"rows": 57, "by": "silos"}, {"rows": 57}, False),
    ],
)
def test_scores_on_other_rows_do_not_stand_beside_each_other(make_run, tmp_path, own, theirs, alike):
    """A run on 284 test rows stood beside a baseline on 57 others, whose table of classes it got too."""
    tables = {"by_class": [{"class": "no", "rows": 40, "predicted": 40}, {"class": "yes", "rows": 17, "predicted": 17}]}
    folders = []
    for protocol, told in (("fedsgd", own), ("local", theirs)):
        scores = {"loss": 0.1, "accuracy": 0.9, **{key: told[key] for key in ("rows", "by") if key in told}}
        folders.append(make_run(protocol, test=scores | ({"classes": tables} if protocol == "local" else {})))
        if "digest" in told:
            part = "the silos' parts for scores" if "by" in told else "the test part"
            (folders[-1] / "rows.json").write_text(json.dumps({"north": "c", part: told["digest"]}))
    records = [read_run(folder) for folder in folders]
    said = sentences(*records)[0]
    assert ("beside 90.0 % where silos train alone" in said) == alike
    assert ("scores 70.2 %" in said) == alike
    text = " ".join(write_report(folders, tmp_path / "a.html").read_text().split())
    assert ("These runs were scored on different rows (" in text) != alike
    counts = [row.cells for row in comparison(records).rows if row.measure == "Rows"]
    assert bool(counts) != alike


def test_a_folder_whose_digests_cannot_be_read_is_read(make_run):
    folder = make_run("fedsgd")
    for content in ("", "[]", '{"the test part": 3}'):
        (folder / "rows.json").write_text(content)
        assert read_run(folder).digests.test == ""


def test_what_else_the_first_sentence_says(make_run):
    none = read_run(make_run("fedavg", test={}))
    assert sentences(none)[0] == "There were no test rows, so nothing measures how good the model is."
    number = sentences(read_run(make_run("fedsgd", regression=True)))[0]
    assert number.startswith("On the test rows the model reaches a mean squared error of 0.0171. Scale: 0 is perfect; ")
    scores = {"loss": 0.2, "accuracy": 0.9, "mean": {"loss": 0.1, "accuracy": 0.92}, "by": "silos"}
    several = sentences(read_run(make_run("cgd", test=scores)))[0]
    assert several.startswith(
        "On the rows that silos hold back the worst of the silos’ models reaches an accuracy of 90.0 %"
    )
    assert "beside 92.0 % as the mean of the silos’ models" in several


def test_what_else_the_second_sentence_says(make_run):
    def hidden(folder, protocol="fedsgd", **replaced):
        return sentences(read_run(make_run(protocol, folder=folder, **replaced)))[1]

    assert hidden("seed", insecure_secret_seed=True).startswith(
        "Nothing was hidden, because insecure-secret-seed was set"
    )
    assert "no sentence on what odd hides" in hidden("odd", "odd", secure_aggregation=None)
    assert "the aggregation scheme odd hides" in hidden("scheme", secure_aggregation={"scheme": "odd"})
    clear = hidden("clear", secure_aggregation={"scheme": "none", "ring_bits": None})
    assert "the server saw the gradient of each silo by itself and held the true model" in clear
    assert "could work out the other’s gradient in rounds of fewer than three silos" in hidden("two", silos=2)
    noised = hidden("noise", facts={"epsilon": 2.0, "delta": 1e-5})
    assert (
        "could learn of one example at one silo, from all models of the run, no more than ε = 2 at δ = 1e-05 allows"
        in noised
    )
    assert not hidden("machines", settings={"engine": {"name": "flare"}}).startswith("One process")
    fused = hidden("fused", "cgd", settings={"engine": {"name": "fused"}})
    assert fused.startswith("The server saw everything, as one process ran all participants; a silo saw everything")
    grid = {"data": {"grid": [2, 2]}, "engine": {"name": "in-process"}}
    assert "; silos together could work out raw features" in hidden("grid", "cgd", settings=grid)


def test_the_gravest_stand_first(make_run):
    folder = audited(make_run())
    told = json.loads((folder / "audit.json").read_text())
    first, second, third, last = told["attacks"]
    told["attacks"] = [
        last | {"severity": "labels"},
        first,
        third | {"severity": "rows", "succeeded": True},
        second | {"role": "silos together"},
    ]
    (folder / "audit.json").write_text(json.dumps(told))
    record = read_run(folder)
    assert record.audit is not None
    kinds = [(name, [one.attack for one in some]) for name, _, some in by_severity(record.audit)]
    assert kinds == [
        ("Recovers rows", ["membership-inference"]),
        ("Recovers labels or properties", ["server-and-silos"]),
        ("Reveals what the protocol gives anyway", ["gamma-least-squares", "canonical-form"]),
    ]
    assert who_does(record.audit.attacks[0]) == "The server with silos works out an upload"
    assert who_does(record.audit.attacks[3]) == "A group of silos works out the true model"
    got = sentences(record)[2]
    assert got.index("the one attempt to recover rows succeeded: a silo") < got.index("2 of 2 attempts to reveal what")
    assert "the one attempt to recover labels or properties failed" in got


def test_a_single_attack_that_succeeded_needs_no_caution(make_run):
    folder = audited(make_run())
    told = json.loads((folder / "audit.json").read_text())
    (folder / "audit.json").write_text(json.dumps(told | {"attacks": told["attacks"][:1], "views": []}))
    got = sentences(read_run(folder))[2]
    assert got.startswith("In the audit: the one attempt to reveal what the protocol gives anyway succeeded: a silo ")
    assert got.endswith("to perfect.")


def test_an_attack_s_score_is_said_with_its_ends(make_run):
    audit = read_run(audited(make_run())).audit
    assert audit is not None
    first, second, *_ = audit.attacks
    assert ends(first) == "0 is guessing, 1 perfect"
    assert ends(second) == "0.8 is guessing, 1 perfect, 0 an error as large as the value itself"
    always = "always naming the most frequent value"
    assert ends(second.model_copy(update={"constant": 0.9})).startswith(f"0.8 is guessing, 0.9 {always}, 1 perfect")
    assert ends(second.model_copy(update={"constant": 0.8})).startswith(f"0.8 is guessing or {always}, 1 perfect")
    assert ends(first.model_copy(update={"chance": None})).startswith("guessing is not known, 1 perfect")
    assert way(first) == "99.7 % of the way from guessing to perfect"
    assert way(first.model_copy(update={"score": 0.99999})).startswith("99.999 %")
    assert way(first.model_copy(update={"score": 1.0})).startswith("100 %")


def test_every_measure_of_an_attack_has_words_for_0():
    files = Path(moretta.audit.attacks.__file__).parent.rglob("*.py")
    given = r'(?:\bmeasure=|AttackResult\(\s+)f?"([^"{]+)'
    measures = [said for file in files for said in re.findall(given, file.read_text())]
    assert len(measures) > 25
    assert not [said for said in measures if not said.startswith(tuple(ZEROS))]


def test_every_score_of_a_comparison_has_words_for_its_scale(make_run, tmp_path):
    metrics = {"auc": 0.9, "balanced_accuracy": 0.9, "brier": 0.1, "calibration_error": 0.1}
    scores = {"loss": 0.2, "accuracy": 0.9, "top5": 1.0, "metrics": metrics, "mean": {"loss": 0.1, "accuracy": 0.92}}
    folders = [make_run("cgd", test=scores), make_run("fedsgd", folder="number", regression=True)]
    found = meanings(comparison([read_run(folder) for folder in folders]).rows)
    assert UNKNOWN not in found.values()
    assert {"Accuracy", "Top-5 accuracy", "Balanced accuracy", "AUC", "Mean squared error", "Loss"} <= set(found)
    named = [Row(SCORED[0], name, "", ()) for name in ("F1, mean of classes", "F1 of the second class", "Sealing wax")]
    assert set(meanings(named).values()) == {
        SCALES["F1, mean of classes"],
        SCALES["F1"],
        UNKNOWN,
    }
    text = write_report(folders, tmp_path / "a.html").read_text()
    assert "How to read the scores" in text
    assert "0.5 is guessing" in text
    assert all(len(re.findall(r"\w+", said)) <= 16 and not re.search(r"\. |:", said) for said in SCALES.values())


def test_epsilon_and_warnings_are_on_the_page(make_run, tmp_path):
    facts = {"epsilon": 2.0, "delta": 1e-5, "epsilon_to_silos": 4.5, "epsilon_leaves_out": "means of the columns"}
    folder = make_run("fedsgd", facts=facts, warnings=["two silos <expose> each other"])
    text = " ".join(write_report([folder], tmp_path / "a.html").read_text().split())
    for words in ("Differential privacy:</strong> ε = 2 and δ = 1e-05 for one example", "with ε = 4.5",
                  "at most 7.39 times", "Not counted: means of the columns.",
                  "two silos &lt;expose&gt; each other"):  # fmt: skip
        assert words in text
    assert text.index("Differential privacy:") < text.index("<h2>Result")
    vast = read_run(make_run("fedsgd", folder="vast", facts=facts | {"epsilon": 5000.0}))
    assert "times as likely" not in epsilon_note(vast)
    assert epsilon_note(read_run(make_run("local"))) == ""


@pytest.mark.parametrize(("spent", "drawn"), [(1.5, True), ("unbounded", False), (None, False)])
def test_epsilon_over_rounds_is_drawn(make_run, tmp_path, spent, drawn):
    folder = make_run("fedsgd", facts={"epsilon": spent or 0.0, "delta": 1e-5})
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    at = {} if spent is None else {"epsilon": spent}
    told = [line | (at if spent == "unbounded" else {key: value * line["round"] / 80 for key, value in at.items()})
            for line in lines]  # fmt: skip
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    text = write_report([folder], tmp_path / "a.html").read_text()
    assert ("Epsilon spent over rounds" in text) == ("The accountant's epsilon of all" in text) == drawn
    if drawn:
        assert read_run(folder).history[-1].epsilon == 1.5
