"""The site of pages: links, anchors, figures that come from other pages, and, in `make test-all`, the site itself."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from blocks import Block, blocks, fenced

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

PAGES = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for block in blocks("\n".join(lines)):
        lines[block.first : block.last + 1] = [""] * (block.last + 1 - block.first)
    return re.sub(r"`[^`\n]*`", "", "\n".join(lines))


@functools.cache
def anchors(path: Path) -> set[str]:
    """What a page can be linked to at: its headings, as sites call them, and its marks."""
    text, found = path.read_text(encoding="utf-8"), set()
    for include in re.findall(r"<!-- include: (\S+) -->", text):
        text = (ROOT / include).read_text(encoding="utf-8")
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower().strip()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found | {one or other for one, other in re.findall(r'\{#([\w-]+)\}|<a id="([\w-]+)">', text)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_pages_and_headings_that_are_there(path: Path) -> None:
    for link in LINK.findall(prose(path)):
        if re.match(r"https?:", link):
            continue
        target, _, anchor = link.partition("#")
        page = (path.parent / target).resolve() if target else path
        assert page.exists(), link
        assert not anchor or anchor in anchors(page), link


def test_every_page_is_in_the_list_of_contents() -> None:
    listed = set(re.findall(r"<([\w/-]+)>$|^([\w/-]+)$", (DOCS / "index.md").read_text(), re.MULTILINE))
    names = {one or other for one, other in listed}
    for path in DOCS.rglob("*.md"):
        name = str(path.relative_to(DOCS).with_suffix(""))
        assert name in names or name == "index" or re.match(r"decisions/\d", name), name


def test_the_figures_of_choosing_are_those_of_the_pages_that_it_names() -> None:
    text = (DOCS / "choose.md").read_text()
    rows = text.partition("## What to expect of larger ones")[2].partition("\n\nFigures")[0].splitlines()[4:]
    assert len(rows) == 8
    for row in rows:
        (page,) = re.findall(r"\]\(([\w-]+\.md)#", row)
        source = (DOCS / page).read_text().replace(",", "")
        for figure in re.findall(r"\d+\.\d+|\d{2,}(?:,\d{3})*", row.rpartition("|")[0].split("|")[2]):
            assert re.search(rf"(?<![\d.]){re.escape(figure.replace(',', ''))}(?![\d.]*\d)", source), (page, figure)
    costs = re.findall(r"^\| `.*$", text.partition("## What they cost")[2].partition("\n## ")[0], re.MULTILINE)
    measured = (DOCS / "threat-models.md").read_text().partition("## Defences side by side")[2]
    assert len(costs) == 8
    for line in costs:
        assert "| " + " | ".join(line.strip("| ").split(" | ")[1:4]) + " |" in measured, line


def test_blocks_are_told_from_lists_and_by_their_looks() -> None:
    page = "A:\n\n    [run]\n    rounds = 3\n\n    seed = 1\n\n- item\n\n    more of it\n\n```sh\nmoretta look x\n```\n"
    toml, sh = blocks(page)
    assert toml == Block("toml", "[run]\nrounds = 3\n\nseed = 1\n", 2, 5, False)
    assert sh == Block("sh", "moretta look x\n", 11, 13, True)
    assert "```toml\n[run]" in fenced(page)
    assert next(iter(blocks(fenced(page)))).text == toml.text
    assert not list(blocks("```{toctree}\nstart\n```\n"))


class Hrefs(HTMLParser):
    """The links of a page of the site, and what can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name in ("src", "href")):
                self.links.add(value)
            if value and name == "id":
                self.ids.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it; its notebooks are run."""
    pytest.importorskip("sphinx", reason="Sphinx is of the extra [dev]")
    (line,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if " -m sphinx " in line]
    out = tmp_path_factory.mktemp("site")
    words = line.strip().replace("$(BIN)/python", sys.executable).replace("build/doctrees", str(out / "doctrees"))
    done = subprocess.run(
        words.removesuffix("site") + str(out / "site"), shell=True, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return out / "site"


def test_the_site_builds_and_its_links_lead_somewhere(site: Path) -> None:
    pages = {}
    for path in site.rglob("*.html"):
        pages[path] = Hrefs()
        pages[path].feed(path.read_text(encoding="utf-8"))
    assert len(pages) > 90
    for path, page in pages.items():
        for link in page.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert file.exists(), f"{path.name}: {link}"
            assert not anchor or file not in pages or anchor in pages[file].ids, f"{path.name}: {link}"
    for name in ("tables", "images"):
        text = (site / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
        assert text.count('class="cell_output') >= 6
        assert text.count(".png") >= 3
        assert "Traceback" not in text


def test_a_page_of_the_site_asks_no_other_site_for_anything(site: Path) -> None:
    for path in (site / "index.html", site / "notebooks" / "tables.html"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"https?:", text)


@pytest.mark.skipif("MORETTA_OUTER_LINKS" not in os.environ, reason="asks other sites; set MORETTA_OUTER_LINKS=1")
def test_links_to_other_sites_lead_somewhere() -> None:
    links = {link for path in PAGES for link in LINK.findall(prose(path)) if link.startswith("https://")}
    for link in sorted(links):
        request = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0"})  # https alone
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.status == 200, link
