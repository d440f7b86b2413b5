"""An audit on a report's page: its table, its pictures, runs side by side, and the evidence of sentences."""

import io
import json

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file
from test_report_page import BROWSER, opened

from moretta.errors import ParameterError
from moretta.report.audit import audit_lines, leak, side_by_side
from moretta.report.folder import read_run
from moretta.report.page import write_report
from moretta.report.statements import UNTESTABLE, privacy_statements, verdicts

RUN = "9f3c1a77b2d04e55"
ATTACKS = [
    ("gamma-least-squares", "silo", 0.997, 0.0, True, "works out <the> offset", "protocol"),
    ("canonical-form", "silo", 0.9, 0.8, True, "works out the true model", "protocol"),
    ("membership-inference", "silo", 0.51, 0.5, False, "tells whether a row was there", "members"),
    ("server-and-silos", "server and silos", 0.0, 0.0, False, "works out an upload", "protocol"),
]


def audited(folder, **replaced):
    came_to = [
        {
            "attack": name, "title": title, "severity": severity, "role": role,
            "view": "20 rounds", "knowledge": "nothing",
            "measure": "1 - relative error of it",
            "score": score, "chance": chance, "interval": [score - 0.1, score + 0.1], "succeeded": succeeded,
            "seconds": 1.5, "sentence": "It came to <that>.", "figures": {}, "source": "",
        }
        for name, role, score, chance, succeeded, title, severity in ATTACKS
    ]  # fmt: skip
    missed = {"attack": "slow-one", "title": "takes its time", "severity": "rows", "role": "outsider"}
    missed["because"] = "it is slow"
    whole = {"format": 1, "run": RUN, "views": [1, 2], "attacks": came_to, "not_run": [missed]}
    (folder / "audit.json").write_text(json.dumps(whole | replaced))
    return folder


def test_the_page_shows_what_succeeded_and_what_failed(make_run, tmp_path):
    folder = audited(make_run())
    text = write_report([folder], tmp_path / "a.html").read_text()
    assert text == write_report([folder], tmp_path / "b.html").read_text()
    for words in ("<h2>What attacks got", '<span class="verdict succeeded">succeeded</span>', "&lt;that&gt;",
                  '<span class="verdict failed">failed</span>', "slow-one", "it is slow",
                  "<strong>A silo works out &lt;the&gt; offset</strong> <small><code>(gamma-least-squares)",
                  "An outsider takes its",
                  "0.5 is guessing, 1 perfect, 0 an error as large as the value itself"):  # fmt: skip
        assert words in text
    assert "img-src" not in text
    assert "Defences side by side" not in text
    assert "<h2>What attacks got" not in write_report([make_run("fedsgd")], tmp_path / "c.html").read_text()


def test_what_is_no_evidence_is_said_to_be_none(make_run, tmp_path):
    folder = audited(make_run(), switched_off={"class-weights": ["silo-property", "labels-from-head"]})
    told = json.loads((folder / "audit.json").read_text())
    told["attacks"] = [told["attacks"][2] | {"interval": [0.0, 1.0], "constant": 0.8}]
    (folder / "audit.json").write_text(json.dumps(told))
    record = read_run(folder)
    text = " ".join(write_report([folder], tmp_path / "a.html").read_text().split())
    for words in (text, " ".join(rendered(record.audit).split())):
        assert "no evidence" in words
        assert "0 to 1, no evidence" in words
        assert "0.5 is guessing, 0.8 always naming the most frequent value, 1 perfect" in words
        assert "class-weights prevents 2 attacks of an audit: silo-property and labels-from-head." in words
        assert "> failed<" not in words
    assert "the one attempt to find out who is in the data gave no evidence" in verdicts([record])[0].sentences[2]
    assert leak(record.audit, ["silo"]).summary == "no attack succeeded, of 1; not shown safe"


def test_the_caption_says_of_how_many_rounds_and_with_which_rows(make_run, tmp_path):
    folder = audited(make_run(rounds=300), views=[0, *range(1, 21), 300, 301], background="rows <of> mine.npz")
    text = " ".join(write_report([folder], tmp_path / "a.html").read_text().split())
    assert "the audit, of 21 of 300 rounds; background knowledge is rows &lt;of&gt; mine.npz" in text
    audited(folder)
    assert "background knowledge is" not in write_report([folder], tmp_path / "a.html").read_text()


def test_runs_side_by_side_name_the_worst_of_each_role(make_run, tmp_path):
    folders = [audited(make_run()), make_run("fedsgd")]
    text = write_report(folders, tmp_path / "a.html").read_text()
    assert text.index("<h2>Comparison") < text.index("Defences side by side") < text.index("<h2>What attacks got")
    assert "Leak to colluders or outsiders" in text
    for words in (
        "0.997 (0 is guessing, 1 perfect)",
        '<strong class="leak">A silo works out &lt;the&gt; offset',
        "no attack succeeded, of 1; not shown safe",
        "no attack tried",
        "not audited",
    ):
        assert words in text
    first, second = side_by_side([read_run(folder) for folder in folders])
    assert first["silo"] == {
        "tried": 3, "succeeded": 2, "worst": {"attack": "gamma-least-squares", "score": 0.997, "chance": 0.0},
    }  # fmt: skip
    assert first["server"] == {"tried": 0, "succeeded": 0, "worst": None}
    assert (first["audited"], second["audited"]) == (True, False)


def illustrated(folder):
    told = json.loads((audited(folder) / "audit.json").read_text())
    told["attacks"][0]["pictures"] = [{"file": "audit/a-0.safetensors", "caption": "two <rows>"}]
    (folder / "audit.json").write_text(json.dumps(told))
    return folder


def draw(folder):
    (folder / "audit").mkdir()
    images = np.random.default_rng(0).random((2, 1, 4, 4), dtype=np.float32)
    save_file({"true": images, "found": images * np.nan}, folder / "audit" / "a-0.safetensors")


def rendered(audit):
    stream = io.StringIO()
    Console(file=stream, width=400).print(audit_lines(audit))
    return stream.getvalue()


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
def test_a_browser_shows_an_audit_without_complaint(make_run, tmp_path):
    folders = [illustrated(make_run()), audited(make_run("fedsgd"))]
    draw(folders[0])
    dom, complaints = opened(write_report(folders, tmp_path / "a.html"), tmp_path / "profile")
    assert complaints == []
    assert dom.count("data:image/png;base64,") == 2
    assert "Defences side by side" in dom


def test_it_is_said_where_the_kernel_did_not_confine_attackers(make_run, tmp_path):
    said = "Only Python confined the attackers"
    folder = make_run()
    for by, there in (("python", True), ("kernel", False)):
        audited(folder, confined_by=by)
        assert (said in write_report([folder], tmp_path / "a.html").read_text()) == there
        assert (said in rendered(read_run(folder).audit)) == there


def test_pictures_stand_in_the_page_with_a_warning(make_run, tmp_path):
    folder = illustrated(make_run())
    text = " ".join(write_report([folder], tmp_path / "a.html").read_text().split())
    assert (
        "Pictures that are gone; audit again to see them: A silo works out &lt;the&gt; offset (two &lt;rows&gt;)."
        in text
    )
    assert "img-src" not in text
    draw(folder)
    (folder / "audit" / "a-0.safetensors").rename(tmp_path / "kept")
    (folder / "audit" / "a-0.safetensors").write_bytes(b"?")
    with pytest.raises(ParameterError, match=r"a-0\.safetensors holds no pictures"):
        write_report([folder], tmp_path / "a.html")
    (tmp_path / "kept").replace(folder / "audit" / "a-0.safetensors")
    text = " ".join(write_report([folder], tmp_path / "a.html").read_text().split())
    assert text.count("data:image/png;base64,") == 2
    assert "Pictures that are gone" not in text
    for words in ("; img-src data:", "two &lt;rows&gt;", "must stay with the silos", "true rows above"):
        assert words in text


@pytest.mark.parametrize(("replaced", "says"), [
    ({"format": 2}, "is of format 2"),
    ({"attacks": [{"attack": "a", "title": "does"}]}, r"audit\.json lacks the key attacks\.0\.severity"),
    ({"attacks": "none"}, r"audit\.json is broken at attacks"),
])  # fmt: skip
def test_a_bad_audit_is_one_sentence(make_run, replaced, says):
    with pytest.raises(ParameterError, match=says):
        read_run(audited(make_run(), **replaced))


def test_an_audit_of_another_run_is_left_out_and_said(make_run):
    record = read_run(audited(make_run(), run="another"))
    assert record.audit is None
    assert any("audit.json is of another run" in warning for warning in record.warnings)


def test_a_history_that_was_cut_is_said(make_run):
    folder = make_run()
    lines = (folder / "history.jsonl").read_text().splitlines(keepends=True)
    assert not any("history.jsonl" in warning for warning in read_run(folder).warnings)
    (folder / "history.jsonl").write_text("".join(lines[:-2]))
    said = f"history.jsonl ends with round {len(lines) - 2} of {len(lines)}, so curves"
    assert any(said in warning for warning in read_run(folder).warnings)


def test_sentences_have_their_attacks_for_evidence(make_run):
    said = {one.text: one.evidence for one in privacy_statements(read_run(audited(make_run())))}
    evidence = next(told for text, told in said.items() if "least squares" in text)
    won = "it succeeded, 99.7 % of the way from guessing to perfect"
    assert evidence == f"tested on this run: A silo works out <the> offset (gamma-least-squares): {won}"
    server = next(told for text, told in said.items() if "if all others collude with it" in text)
    assert server.endswith("The server with silos works out an upload (server-and-silos): this attack failed")
    assert (
        "canonical-form"
        in said["Gets a released model that predicts as the true model does, because it computes the same function."]
    )
    assert said["Holds the true model."] == UNTESTABLE


def test_an_attack_is_evidence_for_what_it_tests_alone(make_run):
    def evidence(protocol, *names):
        folder = make_run(protocol)
        audited(folder)
        told = json.loads((folder / "audit.json").read_text())
        told["attacks"] = [told["attacks"][0] | {"attack": name} for name in names]
        (folder / "audit.json").write_text(json.dumps(told))
        return {one.text: one.evidence for one in privacy_statements(read_run(folder)) if one.role == "A silo"}

    of = evidence("pbpfl", "silo-property", "membership-inference")
    assert [text for text, told in of.items() if "silo-property" in told] == [
        "Can estimate the balance of the other silos’ labels, where the last layer has a bias that plain gradient "
        "steps move."
    ]
    assert (
        "membership-inference"
        in of["Gets a released model that predicts as the true model does, because it computes the same function."]
    )
    of = evidence("cgd", "confined-inversion", "two-party-exposure")
    assert of["Holds a confined model that no other participant sees."] == UNTESTABLE
    (of_sum,) = (told for text, told in of.items() if "not another’s rows" in text)
    assert "confined-inversion" in of_sum
    assert "two-party-exposure" in of_sum
