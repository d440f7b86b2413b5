import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import pytest

import moretta.report
from moretta.errors import MissingExtra, ParameterError
from moretta.report.page import template, write_report
from moretta.report.plots import colour

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
EVERY = ("pbpfl", "fedsgd", "fedavg", "fedprox", "local", "centralised")


class Reader(HTMLParser):
    """Collects what stands on a page: tags with attributes, ids, and that what is opened is closed."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def count(self, tag):
        return sum(found == tag for found, _ in self.tags)


def test_a_page_of_four_runs_is_whole_and_self_contained(make_run, tmp_path):
    folders = [make_run(protocol) for protocol in EVERY]
    out = write_report(folders, tmp_path / "new" / "report.html", {"pbpfl": 3.2e-7})
    text = out.read_text()
    page = Reader(text)
    assert not re.search(r"https?://|//\w+\.\w|@import|url\((?!#)", text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)]
    assert page.count("svg") == 4
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = [(a.get("href") or "").removeprefix("#") for tag, a in page.tags if tag == "use"]
    used += re.findall(r"url\(#([^)]+)\)", text)
    used += [name for tag, a in page.tags if tag == "svg" for name in (a["aria-labelledby"] or "").split()]
    assert set(used) <= set(ids)
    assert page.count("details") == len(EVERY) + 1  # what scores mean
    for words in (
        "3.2 × 10<sup>−7</sup>",
        "silo-3 has fewer rows",
        "refused: its rows are gone",
        "parameter values are obf",
    ):
        assert words in text
    for protocol in ("pbpfl", "fedsgd", "fedavg", "local"):
        assert colour(protocol) in text
    assert "not yet tested by an attack on this run" in text
    assert "Insecure" not in text
    assert str(tmp_path) not in text


def test_the_same_runs_give_the_same_bytes(make_run, tmp_path):
    folder = make_run()
    first, second = (write_report([folder], tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_all_text_of_a_run_is_escaped(make_run, tmp_path):
    evil = "<script>alert(1)</script>&\"'$x$"
    folder = make_run(
        "fedsgd",
        folder="<b>evil $y$",
        name=evil,
        run=evil,
        test={"loss": 0.1, "accuracy": 0.9, "metrics": {evil: 0.5}, "per_silo": {evil: {"rows": 3, "loss": 0.1}}},
        seconds={"total": 1.0, evil: 0.5},
        dropped=[{"round": 1, "silo": evil, "reason": evil}],
        versions={evil: evil},
        secure_aggregation={"scheme": evil, "ring_bits": 64},
        facts={evil: evil},
        warnings=[evil],
        settings={evil: {evil: evil}},
    )
    other = make_run(evil, folder="other")
    text = write_report([folder, folder, other], tmp_path / "report.html").read_text()
    assert Reader(text).count("script") == 0
    assert "<b>" not in text
    assert "&lt;script&gt;" in text


def test_templates_escape_everything():
    templates = sorted((Path(moretta.report.__file__).parent / "templates").iterdir())
    assert len(templates) > 5
    for file in templates:
        assert not re.search(r"\|\s*(safe|tojson|xmlattr)|autoescape|Markup", file.read_text().partition("#}")[2])
    with pytest.raises(jinja2.UndefinedError):
        template("page.html.j2").render()
    assert template("page.html.j2").environment.autoescape is True


def test_a_fixed_secret_seed_is_shouted_about(make_run, tmp_path):
    text = write_report([make_run(insecure_secret_seed=True)], tmp_path / "report.html").read_text()
    assert re.search(r'<p class="banner" role="alert"><strong>Insecure: nothing was hidden', text)


def test_a_run_with_little_to_show(make_run, tmp_path):
    nothing = {"warnings": [], "facts": {}, "settings": {}, "dropped": [], "secure_aggregation": None}
    folder = make_run("local", test={"loss": float("inf"), "accuracy": 0.5}, seconds={"total": 0.0}, **nothing)
    (folder / "history.jsonl").write_text("")
    text = write_report([folder], tmp_path / "report.html").read_text()
    assert Reader(text).count("svg") == 2
    assert "No training loss was recorded" in text
    assert "No silo missed an answer" in text
    (folder / "history.jsonl").write_text('{"round": 1, "loss": NaN}\n{"round": 2, "loss": Infinity}\n{"round": 3}\n')
    assert Reader(write_report([folder], tmp_path / "report.html").read_text()).count("svg") == 3


def test_a_run_without_test_rows(make_run, tmp_path):
    folder = make_run(test={"per_silo": {"silo-1": {"loss": 0.1, "accuracy": 0.9}}})
    text = write_report([folder], tmp_path / "report.html").read_text()
    assert "There were no test rows, so nothing measures how good the model is." in text
    assert "On the test rows" not in text
    two = write_report([folder, make_run("fedsgd")], tmp_path / "report.html").read_text()
    assert "0.9737" in two
    assert "they reach" not in two


def test_a_report_is_written_whole_or_not_at_all(make_run, tmp_path, monkeypatch):
    out = tmp_path / "report.html"
    out.write_text("before")
    with pytest.raises(ParameterError, match="at least one run folder"):
        write_report([], out)
    with pytest.raises(ParameterError, match="no such directory"):
        write_report([make_run(), tmp_path / "nowhere"], out)
    folder = make_run("fedsgd")
    for extra in ("matplotlib", "jinja2"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, extra, None)
            with pytest.raises(MissingExtra, match=rf'(?i){extra}: pip install "moretta\[torch\]"'):
                write_report([folder], out)
    assert out.read_text() == "before"
    (tmp_path / "taken.html").mkdir()
    with pytest.raises(ParameterError, match=r"cannot be written to .*taken\.html: Is a directory"):
        write_report([make_run("local")], tmp_path / "taken.html")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
@pytest.mark.parametrize("protocols", [("pbpfl",), EVERY])
def test_a_browser_shows_it_without_complaint(make_run, tmp_path, protocols):
    out = write_report([make_run(protocol) for protocol in protocols], tmp_path / "report.html")
    dom, complaints = opened(out, tmp_path / "profile")
    assert complaints == []
    assert len(re.findall(r"<svg\b", dom)) == 4
    assert len(re.findall(r"<svg\b[^>]*>\s*<title\b", dom)) == 4
    assert len(re.findall(r"<h2\b", dom)) == len(re.findall(r"<h2\b", out.read_text()))
    assert "What was hidden from whom" in dom


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
def test_the_browser_test_would_see_a_complaint(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text("<!DOCTYPE html><title>bad</title><script>undefinedFunction()</script>")
    assert opened(page, tmp_path / "profile")[1]


def opened(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page's DOM after loading, and what the browser's console said."""
    assert BROWSER is not None
    options = (
        "--headless --no-sandbox --hide-scrollbars --disable-gpu --disable-quic --no-first-run "
        "--disable-background-networking --disable-component-update --disable-sync "
        "--enable-logging=stderr --v=0 --dump-dom"
    )
    done = subprocess.run(
        [BROWSER, *options.split(), f"--user-data-dir={profile}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
