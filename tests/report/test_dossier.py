"""Dossiers of small real runs: each sentence has its source, and nothing but sentences of the JSON is on the page."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_cli import call, patients

from moretta.config import run_files
from moretta.errors import ParameterError
from moretta.protocols.common.accountant import MECHANISM, NEIGHBOURS, THEOREM, TRUST, Accountant
from moretta.protocols.common.lattice import Privacy
from moretta.protocols.common.severity import EFFECTS, MEANING, SEVERITIES
from moretta.protocols.registry import ENTRIES, claims_of
from moretta.report.dossier import description, document, questions, risks
from moretta.report.dossier import page as of_sections
from moretta.report.dossier.page import Written, write_dossier
from moretta.run.assembly import federation_of
from moretta.secure_aggregation.identity import Identity, Roster, public_line

ROOT = Path(__file__).parents[2]
FORBIDDEN = re.compile(r"\b(compliant|complian\w+|safe|safely|gdpr-proof)\b", re.IGNORECASE)

WDBC = """
[run]
name = "clinics"
rounds = 2
seed = 5
{run}
[data]
source = "wdbc"
batch-size = 32
{data}
[model]
source = "mlp"
hidden = [4]
[protocol]
loss = "cross-entropy"
{protocol}
"""
SCHEMA = """
[columns.age]
kind = "number"
unit = "years"
[columns.ward]
kind = "category"
categories = ["east", "north", "west"]
[columns.pressure]
kind = "number"
[columns.ill]
kind = "target"
classes = ["0", "1"]
"""
RUNS: Mapping[str, Mapping[str, str]] = {
    **{name: {"protocol": f'name = "{name}"\nlearning-rate = 0.1'} for name in ENTRIES},
    "recorded": {"protocol": 'name = "fedsgd"\nlearning-rate = 0.1', "run": "record-views = true"},
    "dp": {"protocol": 'name = "fedsgd"\nlearning-rate = 0.1\ndp-noise = 1.0\ndp-clip = 1.0'},
    "clipped": {"protocol": 'name = "fedsgd"\nlearning-rate = 0.1\ndp-noise = 0.0\ndp-clip = 1.0'},
}
KINDS = ("audited", *RUNS, "schema", "from-python", "unfinished")


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """kept(kind): a run folder that no test may change, trained when it is first wanted."""
    home, made = tmp_path_factory.mktemp("dossiers"), dict[str, Path]()

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = _made(kind, home / kind, of)
        return made[kind]

    return of


def _made(kind: str, home: Path, of: Callable[[str], Path]) -> Path:
    home.mkdir()
    if kind in RUNS:
        keys = {"run": "", "data": "", **RUNS[kind]}
        return _trained(home, WDBC.format(**keys))
    if kind == "schema":
        (home / "rows.csv").write_text(patients())
        (home / "schema.toml").write_text(SCHEMA)
        text = WDBC.format(run="", data='schema = "schema.toml"', protocol='name = "fedsgd"\nlearning-rate = 0.1')
        return _trained(home, text.replace('"wdbc"', '"rows.csv"'))
    source = {"audited": "recorded", "unfinished": "fedsgd", "from-python": "fedsgd"}[kind]
    folder = Path(shutil.copytree(of(source), home / "out"))
    if kind == "audited":
        (folder / "audit.json").write_text(json.dumps(audit_of(folder)))
    elif kind == "unfinished":
        for name in ("result.json", "inputs.json", "model.safetensors", "released.safetensors"):
            (folder / name).unlink()
        lines = (folder / "history.jsonl").read_text().splitlines(keepends=True)
        (folder / "history.jsonl").write_text(lines[0])
    else:
        (folder / "run.toml").unlink()
    return folder


def _trained(home: Path, text: str) -> Path:
    (home / "run.toml").write_text(text)
    run_file = run_files.load(home / "run.toml")
    federation_of(run_file, home / "out").train(run_file.run.rounds, run_file.run.seed)
    return home / "out"


def audit_of(folder: Path) -> dict[str, Any]:
    """An audit as `moretta audit` writes it: an attack of each severity, of which every other one succeeded."""
    result = json.loads((folder / "result.json").read_text())

    def line(place: int, severity: str) -> dict[str, Any]:
        won = place % 2 == 0
        return {
            "attack": f"attack-{place}", "title": f"works out things of kind {place}", "severity": severity,
            "role": ("server", "silo", "server and silos")[place % 3], "view": "its view",
            "knowledge": "nothing", "measure": "a share", "score": 0.9 if won else 0.4, "chance": 0.5,
            "interval": [0.8 if won else 0.2, 1.0], "succeeded": won, "seconds": 1.0,
            "sentence": f"It found {place} things. Then it rested.", "figures": {}, "source": "",
        }  # fmt: skip

    severities = ("protocol", "rows", "members", "labels", "rows")
    attacks = [line(place, severity) for place, severity in enumerate(severities)]
    attacks[0]["attack"] = "gradient-inversion"  # which tests a claim
    missed = {
        "attack": "slow-one",
        "title": "takes its time",
        "severity": "rows",
        "role": "silo",
        "because": "it is slow",
    }
    return {
        "format": 1, "run": result["run"], "index": result["views"], "protocol": result["protocol"], "thorough": False,
        "background": "test rows", "confined_by": "python", "views": [1, 2], "attacks": attacks, "not_run": [missed],
    }  # fmt: skip


@pytest.fixture
def run(kept: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """run(kind): a copy of a run folder."""
    return lambda kind: Path(shutil.copytree(kept(kind), tmp_path / kind))


def every(told: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for section in told["sections"]:
        for one in section["sentences"]:
            yield {"section": section["number"], **one}


def texts(written: Written, section: str) -> list[str]:
    return [one["text"] for one in every(written.content) if one["section"] == section and one["origin"] != "open"]


class Texts(HTMLParser):
    """The texts of a page: of elements with an id, and all others."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.by_id, self.others, self._open = dict[str, str](), list[str](), list[str]()
        self.tags = list[str]()
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            name = dict(attrs).get("id") or ""
            self._open.append("" if name.startswith("section-") else name)

    def handle_endtag(self, tag: str) -> None:
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if data.strip() and self.tags[-1] != "style":
            if self._open[-1]:
                assert self._open[-1] not in self.by_id
                self.by_id[self._open[-1]] = data
            else:
                self.others.append(data.strip())


def resolved(folder: Path, source: str) -> object:
    """Return what a source points to; KeyError where it points nowhere."""
    if source.startswith("clause:"):
        return questions.CLAUSES[source.removeprefix("clause:")]
    if source.startswith("word:"):
        return description.WORDS[int(source.removeprefix("word:"))]
    if source.startswith("claim:"):
        _, protocol, place = source.split(":")
        return claims_of(protocol)[int(place)]
    name, hash_mark, keys = source.partition("#")
    file = folder / name
    if not hash_mark:
        return file.stat()
    found: Any = tomllib.loads(file.read_text()) if file.suffix == ".toml" else json.loads(file.read_text())
    for key in keys.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_page_and_json_have_the_same_sentences_and_each_has_a_source(run, kind):
    folder = run(kind)
    written = write_dossier(folder)
    data, html = written.files.data.read_text(), written.files.page.read_text()
    told = json.loads(data)
    assert told == written.content
    page = Texts(html)
    assert [found for text in (data, html) if (found := FORBIDDEN.search(text))] == []
    assert not re.search(r"https?://|@import|url\(", html)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    sentences = {one["id"]: one for one in every(told)}
    assert page.by_id == {name: one["text"] for name, one in sentences.items()}
    headings = {told["title"], told["digest"], "SHA-256 of the content:"}
    for section in told["sections"]:
        headings |= {section["number"], section["title"]}
    for one in sentences.values():
        headings |= {*one["sources"], one.get("group", ""), one.get("name", "")}
        assert one["text"][-1] in ".?!"
    for clause in told["clauses"].values():
        headings |= {clause["document"], clause["clause"]}
    assert set(page.others) <= headings
    for one in sentences.values():
        assert one["sources"], one
        for source in one["sources"]:
            if one["origin"] == "open" and source.startswith("dossier.toml#/"):
                assert source.removeprefix("dossier.toml#/") in {question.key for question in questions.QUESTIONS}
            else:
                resolved(folder, source)


def test_no_text_that_a_dossier_may_have_judges():
    fixed = [*EFFECTS.values(), *MEANING.values(), *questions.DOCUMENTS.values(), *description.WORDS]
    fixed += [text for clause in questions.CLAUSES.values() for text in vars(clause).values()]
    fixed += [question.asks for question in questions.QUESTIONS] + [one.text for one in risks.ASSUMPTIONS]
    fixed += [text for name in ENTRIES for one in claims_of(name) for text in (one.text, one.assumes)]
    assert not [text for text in fixed if FORBIDDEN.search(text)]


def test_the_same_folder_gives_the_same_bytes(run):
    folder = run("audited")
    first = [file.read_bytes() for file in (write_dossier(folder).files.data, folder / "dossier.html")]
    second = write_dossier(folder).files
    assert [second.data.read_bytes(), second.page.read_bytes()] == first


def test_columns_are_named_by_the_schema_and_no_cell_is(run):
    folder = run("schema")
    written = write_dossier(folder)
    said = texts(written, "1.1.a")
    assert "Column age: a number, in years." in said
    assert "Column ward: one of some words without an order, of 3 words." in said
    assert "Column ill: what the model learns to predict, of 2 words." in said
    cells = {cell for line in patients().splitlines()[1:] for cell in line.split(",") if len(cell) > 1}
    assert {"east", "north", "west"} <= cells
    for text in (written.files.data.read_text(), written.files.page.read_text()):
        assert not [cell for cell in cells if re.search(rf"(?<![\w.]){re.escape(cell)}(?![\w.])", text)]


def test_without_a_schema_people_have_to_describe_the_data(run):
    said = texts(write_dossier(run("recorded")), "1.1.a")
    assert said[0].startswith("No schema says what the columns mean")
    assert "A sample has 30 numbers." in said


def test_what_was_recorded_is_counted_and_what_was_not_is_not(run):
    recorded = " ".join(texts(write_dossier(run("recorded")), "2.2.a"))
    assert re.search(r"it received \d+ messages of [\d.]+ kB in all", recorded)
    assert "one silo received at most" in recorded
    assert "recorded" not in " ".join(texts(write_dossier(run("pbpfl")), "2.2.a"))


def test_changed_views_are_refused(run):
    folder = run("recorded")
    changed = sorted((folder / "views" / "server").iterdir())[0]
    *most, last = changed.read_bytes()
    changed.write_bytes(bytes([*most, last ^ 1]))
    with pytest.raises(ParameterError, match="is not as it was recorded"):
        write_dossier(folder)


def test_columns_that_the_run_did_not_write_are_refused(run):
    folder = run("pbpfl")
    told = json.loads((folder / "inputs.json").read_text())
    (folder / "inputs.json").write_text(json.dumps(told | {"classes": ["other", "names"]}))
    with pytest.raises(ParameterError, match=r"inputs\.json is not what the run wrote"):
        write_dossier(folder)


def test_attacks_stand_by_severity_the_gravest_first(run):
    written = write_dossier(run("audited"))
    found = [one for one in every(written.content) if one["section"] == "4.1.c" and one["origin"] == "stated"]
    groups = list(dict.fromkeys(one["group"] for one in found))
    assert groups == [EFFECTS[one][0].upper() + EFFECTS[one][1:] for one in SEVERITIES]
    rows = [one for one in found if one["group"] == "Recovers rows"]
    assert rows[0]["text"] == MEANING["rows"]
    assert rows[1]["text"] == "1 of 2 attacks of this kind succeeded."
    assert rows[2]["text"] == (
        "A silo works out things of kind 4: this attack succeeded, with a score of 0.9 (95 %: 0.8 to 1), where "
        "guessing scores 0.5."
    )
    assert [one["text"] for one in rows[3:5]] == ["It found 4 things.", "Then it rested."]
    assert rows[2]["name"] == "attack-4"
    assert "this attack failed" in rows[6]["text"]
    brief = texts(written, "0")
    assert brief[1:5] == [
        "1 of 2 attempts to recover rows succeeded.",
        "The one attempt to recover labels or properties failed.",
        "The one attempt to find out who is in the data succeeded.",
        "The one attempt to reveal what the protocol gives anyway succeeded.",
    ]


def test_an_attack_that_gave_no_evidence_is_not_said_to_have_failed(run):
    folder = run("audited")
    told = json.loads((folder / "audit.json").read_text())
    for place in (1, 3):  # of the rows, and alone of the labels
        told["attacks"][place]["interval"] = [0.0, 1.0]
    (folder / "audit.json").write_text(json.dumps(told))
    found = [one for one in every(write_dossier(folder).content) if one["section"] == "4.1.c"]
    said = [one["text"] for one in found]
    assert "1 of 2 attacks of this kind succeeded, and 1 gave no evidence." in said
    assert "The one attack of this kind gave no evidence." in said
    silent = [one for one in found if one.get("name") in ("attack-1", "attack-3")]
    assert len(silent) == 2
    for one in silent:
        assert "this attack gave no evidence, with a score of 0.4 (95 %: 0 to 1, no evidence)" in one["text"]
        assert "verdict" not in one


def test_clipping_without_noise_has_an_unbounded_epsilon(run):
    """It ended with a ValueError, "could not convert string to float"."""
    written = write_dossier(run("clipped"))
    assert "Epsilon is unbounded for one row of one silo." in texts(written, "0")
    assert "The epsilon of this run is unbounded at a delta of 1e-05." in texts(written, "2.3.d")


def test_what_no_attack_tested_remains(run):
    audited, other = write_dossier(run("audited")), write_dossier(run("recorded"))
    server = [" ".join(texts(one, "4.2.b")) for one in (audited, other)]
    counts = [re.search(r"The server: no attack on this run tested (\d+) of (\d+) statements", text) for text in server]
    assert counts[0] is not None
    assert counts[1] is not None
    assert int(counts[0][1]) < int(counts[0][2]) == int(counts[1][1]) == int(counts[1][2])
    assert "A silo takes its time: this attack was not run, because it is slow." in texts(audited, "4.2.b")


def test_a_run_without_an_audit_says_so_and_what_would_do(run):
    for kind, how in (("recorded", "moretta audit can attack them"), ("cgd", "only a new run with record-views")):
        written = write_dossier(run(kind))
        assert [text for text in texts(written, "0") if how in text]
        assert texts(written, "4.1.c") == ["Without an audit there is no measured risk to list."]


def test_an_unfinished_run_states_what_was_planned_and_no_more(run):
    written = write_dossier(run("unfinished"))
    assert any("1 of 2 rounds are in its history" in text for text in texts(written, "0.5"))
    assert texts(written, "2.2.a")[0].startswith("What each role received is not stated")
    assert [one for one in every(written.content) if any(s.startswith("result.json") for s in one["sources"])] == []


NOISED = {"epsilon": 4.73, "delta": 1e-5, "releases": 5.0, "noise_silos": 3.0}


def test_epsilon_comes_with_what_it_protects(run, make_run):
    said = texts(write_dossier(make_run("fedsgd", facts=NOISED)), "2.3.d")
    assert any(text.startswith("Its unit of privacy is one row of one silo") for text in said)
    assert "The epsilon of this run is 4.73 at a delta of 1e-05." in said
    assert any("no epsilon" in text for text in texts(write_dossier(run("fedsgd")), "2.3.d"))


@pytest.mark.parametrize(
    ("unit", "hides"),
    [("row", "one row of one silo; for a person with several rows, or with rows"),
     ("group", "all rows of one group, such as a patient, of one silo; for a person with rows"),
     ("silo", "all that one silo uploads; for a person with rows")],
)  # fmt: skip
def test_what_epsilon_rests_on_is_stated(make_run, unit, hides):
    facts = Accountant(Privacy(1.0, 1.0, 1e-5, 3, unit=unit), 0.4, "the means").facts(5)
    said = texts(write_dossier(make_run("fedsgd", facts=facts)), "2.3.d")
    assert any(text.startswith(f"Its unit of privacy is {hides} at several silos") for text in said)
    for words in (NEIGHBOURS[unit], MECHANISM[unit], "is 0.4.", TRUST, THEOREM, "does not count the means."):
        assert any(words in text for text in said), words


@pytest.mark.parametrize(("kind", "says"), [
    ("centralised", "The rows of all silos were handed over to one party, which trained on them together."),
    ("local", "Each silo trained a model of its own from its own rows, and nothing was added up."),
    ("baffle", "The secure sum called pairwise added up the updates; section 2.2.a says who sees which part of it."),
])  # fmt: skip
def test_protocols_are_described_as_what_they_are(run, kind, says):
    assert says in texts(write_dossier(run(kind)), "1.2")


def test_a_blind_server_is_not_said_to_receive_sums(run):
    found = [one for one in every(write_dossier(run("cgd")).content) if one.get("group") == "The server"]
    received = [one["text"] for one in found if one["section"] == "2.2.a"]
    assert not [text for text in received if "sum" in text]
    assert [one for one in found if one["section"] == "2.3.d" and "cannot read" in one["text"]]


def test_a_roster_is_named_by_its_digest_where_it_can_be_read(make_run, tmp_path):
    settings = {"secure-aggregation": {"scheme": "pairwise", "roster": "roster.toml"}, "engine": {"name": "in-process"}}
    folder = make_run("fedsgd", settings=settings)
    (folder / "run.toml").write_text(f'[run]\nbase = "{tmp_path}"\n')
    assert any("could not be read here" in text for text in texts(write_dossier(folder), "A"))
    key = Identity.fresh().public_key
    (tmp_path / "roster.toml").write_text(f'[[silo]]\nname = "silo-1"\nkey = "{public_line(key)}"\n')
    written = write_dossier(folder)
    digest = Roster({"silo-1": key}).digest
    assert [text for text in texts(written, "A") if f"The roster of identities has the SHA-256 {digest}" in text]
    assert any("signed its keys" in text for text in texts(written, "2.3.e"))
    assert not [text for text in texts(written, "4.2.b") if "no roster" in text]
    assert str(tmp_path) not in written.files.data.read_text()


def test_a_run_over_many_machines_is_no_simulation(make_run):
    settings = {"engine": {"name": "flare"}, "secure-aggregation": {"scheme": "pairwise"}}
    written = write_dossier(make_run("fedsgd", settings=settings))
    assert "Messages were carried between machines by NVIDIA FLARE." in texts(written, "1.3")
    assert not [text for text in texts(written, "0.1") if "simulation" in text]
    assert [text for text in texts(written, "4.2.b") if "a key that it was given once" in text]
    alone = write_dossier(make_run("fedsgd", folder="alone"))
    assert [text for text in texts(alone, "0.1") if "simulation of separate parties" in text]


def test_a_protocol_of_another_version_is_not_described(make_run):
    written = write_dossier(make_run("later"))
    assert "This version states nothing about what roles receive under later." in texts(written, "2.2.a")


def test_an_insecure_seed_is_the_first_thing_said(run):
    folder = run("fedsgd")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"insecure_secret_seed": True}))
    assert texts(write_dossier(folder), "0")[0].startswith("Nothing was hidden in this run")


def test_answers_fill_what_is_open(run):
    folder = run("fedsgd")
    answers = 'purpose = "Predict relapse. Nothing else."\ncontrollers = ["Clinic A", "Clinic B"]\nplan = " "\n'
    (folder / "dossier.toml").write_text(answers)
    written = write_dossier(folder)
    found = {one["text"]: one for one in every(written.content) if one["origin"] == "answered"}
    assert list(found) == ["Clinic A.", "Clinic B.", "Predict relapse.", "Nothing else."]
    assert found["Nothing else."]["sources"] == ["dossier.toml#/purpose"]
    assert found["Clinic A."]["by"] == "the parties"
    assert written.count("open") == len(questions.QUESTIONS) - 2  # an empty answer is none
    assert f"{written.count('open')} are open" in texts(written, "0")[-1]


@pytest.mark.parametrize(("text", "says"), [
    ("purposes = 'x'", r"unknown question 'purposes'; did you mean \"purpose\"\?"),
    ("purpose = 3", "purpose: expected a text in quotes or a list of texts"),
    ("purpose = [[]]", "purpose: expected a text in quotes or a list of texts"),
    ("purpose = ", "this is not TOML"),
])  # fmt: skip
def test_answers_that_are_none_are_refused(run, text, says):
    folder = run("fedsgd")
    (folder / "dossier.toml").write_text(text)
    with pytest.raises(ParameterError, match=says):
        write_dossier(folder)
    assert not (folder / "dossier.html").exists()


def test_all_text_is_escaped(run):
    folder = run("audited")
    evil = "<script>alert(1)</script>&\"'"
    told = json.loads((folder / "audit.json").read_text())
    told["attacks"][1] |= {"title": evil, "sentence": evil, "attack": evil}
    (folder / "audit.json").write_text(json.dumps(told))
    (folder / "dossier.toml").write_text(f"purpose = '''{evil}'''")
    page = write_dossier(folder).files.page.read_text()
    assert "script" not in Texts(page).tags
    assert page.count("&lt;script&gt;") >= 3


def test_only_a_dossier_is_overwritten(run, tmp_path):
    folder = run("fedsgd")
    before = (folder / "result.json").read_bytes()
    with pytest.raises(ParameterError, match="exists already: expected the JSON of a dossier"):
        write_dossier(folder, folder / "result.html")
    assert (folder / "result.json").read_bytes() == before
    assert not (folder / "result.html").exists()
    with pytest.raises(ParameterError, match=r"ends in .html or .json, got .pdf"):
        write_dossier(folder, tmp_path / "dossier.pdf")
    with pytest.raises(ParameterError, match="no such directory"):
        write_dossier(tmp_path / "nowhere")
    with pytest.raises(ParameterError, match=r"neither result.json nor run.toml"):
        write_dossier(tmp_path)


def test_every_question_has_its_section_and_every_clause_its_use(run, make_run):
    numbers = [number for number, *_ in of_sections.SECTIONS]
    keys = [question.key for question in questions.QUESTIONS]
    assert len(set(numbers)) == len(numbers)
    assert len(set(keys)) == len(keys)
    assert {question.section for question in questions.QUESTIONS} <= set(numbers)
    used = set(write_dossier(run("audited")).content["clauses"]) | set(
        write_dossier(make_run(facts=NOISED)).content["clauses"]
    )
    assert used == set(questions.CLAUSES)
    assert {clause.document for clause in questions.CLAUSES.values()} == set(questions.DOCUMENTS)


def test_the_page_lists_the_questions():
    page = (ROOT / "docs" / "dossier.md").read_text()
    block = page.partition("<!-- questions:begin -->")[2].partition("<!-- questions:end -->")[0]
    rows = [f"| `{one.key}` | {one.section} | {one.by} | {one.asks} |" for one in questions.QUESTIONS]
    assert block.strip().splitlines()[2:] == rows


def test_assumptions_are_those_of_the_security_page():
    page = " ".join((ROOT / "SECURITY.md").read_text().partition("## Protected")[0].split())
    assert [one.phrase for one in risks.ASSUMPTIONS if one.phrase not in page] == []


def test_every_claim_says_what_it_is_about():
    for name in ENTRIES:
        for claim in claims_of(name):
            told_nothing = claim.role == "reader" or claim.text.startswith("hands its rows over")
            assert (claim.about is None) == told_nothing, claim.text


def test_pointers_name_keys_with_slashes():
    assert document.pointer("a.json", "x", "b/c~d") == "a.json#/x/b~1c~0d"


def test_the_command_writes_by_default(run):
    folder = run("fedsgd")
    done = call("dossier", folder)
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(
        rf"{re.escape(str(folder))}/dossier.html: \d+ sentences; \d+ questions are still open\n", done.out
    )
    told = call("dossier", folder, "--out", folder / "other.html", "--json").told
    assert told == {
        "format": 1,
        "dossier": str(folder / "other.html"),
        "data": str(folder / "other.json"),
        "sentences": told["sentences"],
        "open": len(questions.QUESTIONS),
    }
    assert call("dossier", "write", folder, "--json").code == 0
    refused = call("dossier", folder / "nowhere")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
