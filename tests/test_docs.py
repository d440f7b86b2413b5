"""The pages under docs/ say what the code does: their tables are its own, their examples load, their links lead on."""

from __future__ import annotations

import doctest
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import graph_risks
import pytest
import tomli_w

from moretta.config import run_files, silo_file
from moretta.deployment import shared_settings as told
from moretta.engines.settings import Faults
from moretta.secure_aggregation.graph import Plan, plan
from moretta.secure_aggregation.identity import Identity, public_line
from moretta.secure_aggregation.settings import SecureAggregation


@pytest.fixture
def docs(request: pytest.FixtureRequest) -> Path:
    return request.config.rootpath / "docs"


@pytest.fixture
def secure(docs: Path) -> str:
    return "".join((docs / f"{name}.md").read_text() for name in ("secure-aggregation", "one-sum", "deviations"))


def test_the_graphs_in_the_docs_are_those_of_the_code(secure: str) -> None:
    head, rows = re.search(r"(\| silos \|.*)\n\|[-|]+\n((?:\|.*\n)+)", secure).groups()  # type: ignore[union-attr]
    rates = [(int(c) / 100, int(d) / 100) for c, d in re.findall(r"(\d+)% corrupt, (\d+)% vanish", head)]
    found = set()
    for row in rows.splitlines():
        silos, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for (corrupt, dropout), cell in zip(rates, cells, strict=True):
            degree, threshold = map(int, cell.split(", "))
            found.add((int(silos.replace(",", "")), corrupt, dropout, degree, threshold))
    assert found == set(graph_risks.table())
    assert len(found) == 24
    for silos, corrupt, dropout, degree, threshold in graph_risks.table():  # and are worth what the page says
        risks = graph_risks.risks(silos, Plan(degree, threshold), corrupt, dropout)
        assert max(risks.both, risks.split) <= 2.0**-40
        assert risks.retry <= 2.0**-20


def examples(text: str) -> list[dict[str, object]]:
    """The indented blocks of TOML on a page."""
    blocks = re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
    return [tomllib.loads(re.sub(r"^    ", "", block, flags=re.MULTILINE)) for block in blocks if "    [" in block]


def test_the_examples_of_secure_aggregation_load(secure: str) -> None:
    blocks = examples(secure)
    found = {name: table for block in blocks for name, table in block.items()}
    assert set(found) == {"secure-aggregation", "silo", "server", "engine", "privacy"}
    floors = silo_file.Floors.model_validate(found["privacy"])
    assert {name.replace("_", "-") for name in silo_file.Floors.model_fields} == set(found["privacy"])  # type: ignore[call-overload]
    assert floors.apart == 2
    assert set(found["server"]) == {"key"}  # type: ignore[call-overload]
    few, many = (block["secure-aggregation"] for block in blocks if "secure-aggregation" in block)
    assert {*few, *many} == {  # type: ignore[misc]
        key.replace("_", "-") for key in SecureAggregation.model_fields if key != "limit"
    }
    small, large = SecureAggregation.model_validate(few), SecureAggregation.model_validate(many)
    assert Plan(None, small.threshold or 0) == plan(10)
    assert Plan(large.degree, large.threshold or 0) == plan(100, large.corrupt_rate, large.dropout_rate)
    assert Faults.model_validate(found["engine"]["faults"]).drop  # type: ignore[index]
    assert set(found["engine"]["faults"]) == {  # type: ignore[index]
        key.replace("_", "-") for key in Faults.model_fields
    }


def pages_of(docs: Path) -> list[Path]:
    """The pages, and those beside the folder."""
    return [*docs.rglob("*.md"), *(docs.parent / name for name in ("CONTRIBUTING.md", "README.md", "SECURITY.md"))]


def test_links_lead_somewhere(docs: Path) -> None:
    for page in pages_of(docs):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_links_lead_to_headings_and_entries_that_are_there(docs: Path) -> None:
    """As MyST names headings, which is as GitHub does; the entries of references have names of their own."""

    def places(page: Path) -> set[str]:
        text = re.sub(r"(?ms)^ *```.*?^ *```", "", page.read_text())
        heads = [re.sub(r"\]\([^)]*\)", "", head).lower() for head in re.findall(r"(?m)^#+ (.*)$", text)]
        return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in heads} | {
            *re.findall('id="(.*?)"', text)
        }

    for page in pages_of(docs):
        for link, place in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text()):
            there = page.parent / link if link else page
            assert place in places(there), f"{page.name}: {link}#{place}"


def test_the_security_page_is_one_page_and_each_statement_has_its_tests(docs: Path) -> None:
    text = (docs.parent / "SECURITY.md").read_text()
    assert len(text.splitlines()) <= 150
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []
    protected = text.partition("## Protected\n")[2].partition("\n## ")[0].strip().splitlines()[2:]
    assert protected
    for row in protected:
        paths = re.findall(r"`(tests/[\w./]+)`", row.strip("|").split("|")[-1])
        assert paths, row
        for path in paths:
            found = docs.parent / path
            files = sorted(found.rglob("test_*.py")) if found.is_dir() else [found]
            assert files, path
            assert all("def test_" in file.read_text() for file in files), path


def test_the_plan_of_the_house_names_every_room_and_what_it_names_is_there(docs: Path) -> None:
    package, plan = docs.parent / "src" / "moretta", (docs / "architecture.md").read_text()
    for path in package.iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            assert re.search(rf"\b{path.name}\b", plan), path.name
    assert len(plan.splitlines()) <= 120  # one page
    for page in ("architecture.md", "rounds.md", "run-folder.md"):
        for name in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", (docs / page).read_text()):
            places = [*package.glob(name), docs.parent / name, docs / name]
            assert any(place.exists() for place in places) or page == "run-folder.md", f"{page}: {name}"


def test_every_decision_has_its_number_date_and_status(docs: Path) -> None:
    found = sorted((docs / "decisions").glob("[0-9]*.md"))
    listed = re.findall(r"\((\d{4}-[\w-]+\.md)\)", (docs / "decisions" / "README.md").read_text())
    assert listed == [path.name for path in found]
    for number, path in enumerate(found, 1):
        title, _, status, _, *text = path.read_text().splitlines()
        assert path.name.startswith(f"{number:04}-"), path.name
        assert title.startswith(f"# {number}. ")
        assert re.fullmatch(r"2\d{3}-\d\d-\d\d, (accepted|superseded by \[\d{4}\]\([\w-]+\.md\))", status), path.name
        assert text


def whole_examples(text: str) -> list[dict[str, object]]:
    """The same where a block goes on over empty lines."""
    return examples(re.sub(r"\n\n(?=    \[)", "\n", text))


def test_the_examples_of_deploying_load(docs: Path, tmp_path: Path) -> None:
    page = (docs / "deploy.md").read_text() + (docs / "trust.md").read_text()
    run, *silos = whole_examples(page)
    (tmp_path / "schema.toml").write_text(
        page.partition("```toml\n[columns")[2].partition("```")[0].join(("[columns", ""))
    )
    (tmp_path / "run.toml").write_text(tomli_w.dumps(run))
    run_file = run_files.load(tmp_path / "run.toml")
    assert run_file.engine.sites == ("north", "south", "west")
    assert [silo["silo"]["name"] for silo in silos] == ["north"] * 3  # type: ignore[index]
    line = public_line(Identity.fresh().public_key)
    assert silos[1]["silo"]["server-key"] == "moretta-public-1 ..."  # type: ignore[index]
    whole = {"data": {"source": "rows.npz"}, "silo": {**silos[2]["silo"], "server-key": line}}  # type: ignore[dict-item]
    (tmp_path / "silo.toml").write_text(tomli_w.dumps(whole))
    assert silo_file.load(tmp_path / "silo.toml").silo.roster == Path("roster.toml")


def test_what_the_script_deals_out_is_what_the_page_shows(docs: Path, tmp_path: Path) -> None:
    script = docs.parent / "examples" / "many_machines" / "deal.py"
    subprocess.run([sys.executable, script, tmp_path], check=True, capture_output=True)
    shown, *_ = whole_examples((docs / "deploy.md").read_text())
    assert tomllib.loads((tmp_path / "server" / "run.toml").read_text()) == shown
    run_file = run_files.load(tmp_path / "server" / "run.toml")
    for number, name in enumerate(run_file.engine.sites):
        federation = told.site_side(run_file, silo_file.load(tmp_path / name / "silo.toml"))
        mine = federation.silos[number]
        assert (len(mine.x) > 100, mine.held_out is not None) == (True, True)
        assert [len(silo.x) > 0 for silo in federation.silos] == [one == name for one in run_file.engine.sites]
    assert told.server_side(run_file, tmp_path / "out").test is not None


def test_the_example_of_contributing_runs(docs: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (docs.parent / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 2  # the code, and its test
    made: dict[str, Any] = {"__name__": "contributing"}
    for block in blocks:
        exec(compile(block, "CONTRIBUTING.md", "exec"), made)  # noqa: S102  # our own file
    made["test_inner_frees_the_scales_of_both_hidden_layers"]()


def test_contributing_names_every_file_of_its_example(docs: Path) -> None:
    page, example = (docs.parent / "CONTRIBUTING.md").read_text(), docs.parent / "tests" / "sixth_protocol"
    section = page.partition("## Add a protocol")[2].partition("## Add a layer's rule")[0]
    for path in (*example.glob("package/*.toml"), *example.glob("package/fedsam/*.py"), *example.glob("cases_of_*.py")):
        assert f"`{path.name.replace('_fedsam', '_NAME')}`" in section


ROOMS_WITHOUT_TORCH = ("contract", "secure_aggregation", "data", "config")


def test_the_examples_in_docstrings_are_true(docs: Path) -> None:
    package, tried = docs.parent / "src" / "moretta", 0
    for path in (path for room in ROOMS_WITHOUT_TORCH for path in sorted((package / room).glob("[a-z]*.py"))):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        found = doctest.testmod(importlib.import_module(name))
        assert not found.failed, name
        tried += found.attempted
    assert tried >= 14


def test_the_list_of_the_papers_names_files_that_are_there(docs: Path) -> None:
    text = (docs / "coverage.md").read_text(encoding="utf-8")
    rows = text.split("# Every algorithm, option and variant")[1].split("\n| ")[1:]
    assert len(rows) > 100
    missing = set()
    for row in rows:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row.split("\n")[0])]
        for cell, home in ((cells[2], "src/moretta"), (cells[3], "tests")):
            for path in re.findall(r"`([^`]+)`", cell):
                inside = Path() if path.startswith("experiments/") else Path(home)
                missing |= set() if (docs.parent / inside / path).exists() else {path}
    assert not missing
