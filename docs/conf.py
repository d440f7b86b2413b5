"""The site of pages: `make docs` builds it into site/, where every warning is an error."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "experiments")]

import blocks  # noqa: E402
import reference  # noqa: E402
import reproduction  # noqa: E402

import moretta  # noqa: E402

project = "Moretta"
version = release = moretta.__version__
copyright = "the authors of Moretta, Apache-2.0"  # Sphinx's name for it
extensions = ["myst_nb"]
exclude_patterns: list[str] = []
language = "en"

smartquotes = False
html_theme = "furo"
html_title = "Moretta"
html_static_path = ["static"]
html_css_files = ["moretta.css"]
html_copy_source = False
html_show_sphinx = False

myst_enable_extensions = ["deflist", "attrs_inline", "dollarmath"]
myst_heading_anchors = 4
myst_dmath_allow_labels = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads of networks as small as notebooks' wait for each other
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True

highlight_language = "none"
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r".*")]  # no page links to a class; MyST's own links are all looked at

# Pages of the repository's root, and where they stand in the site.
ROOT = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
INCLUDE = re.compile(r"<!-- include: (\S+) -->")
CURVES = re.compile(r"<!-- curves: (\S+) -->")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def page_text(app: Any, name: str, source: list[str]) -> None:
    """Fill in what is made from records, colour indented blocks, and lead links to where pages are in the site."""
    path = DOCS / f"{name}.md"
    if not path.exists():
        return
    text = INCLUDE.sub(lambda mark: (DOCS.parent / mark[1]).read_text(encoding="utf-8"), source[0])
    included = text != source[0]
    text = CURVES.sub(lambda mark: curves(DOCS.parent / "experiments" / mark[1]), text)
    if name == "decisions/README":
        text += "\n```{toctree}\n:hidden:\n:glob:\n[0-9]*\n```\n"
    home = DOCS.parent if included else path.parent
    text = text if "file_format: mystnb" in text else one_title(blocks.fenced(text))
    text = reference.ITEM.sub(r"[\2]{#\1}\n: ", text)
    source[0] = LINK.sub(lambda link: led(link, home, path.parent), text)


def curves(record: Path) -> str:
    """Return the curves of an experiment's record as a figure of the page."""
    drawn = reproduction.drawn(json.loads(record.read_text(encoding="utf-8")))
    return f"```{{raw}} html\n<figure>{drawn[drawn.index('<svg') :].strip()}</figure>\n```"


def one_title(text: str) -> str:
    """Return a page whose headings from a second title on stand a level lower, so that contents list it once."""
    lines, titles = text.splitlines(), 0
    code = {at for block in blocks.blocks(text) for at in range(block.first, block.last + 1)}
    for at, line in enumerate(lines):
        if at not in code:
            titles += line.startswith("# ")
            lines[at] = f"#{line}" if titles > 1 and re.match(r"#+ ", line) else line
    return "\n".join(lines) + "\n"


def led(link: re.Match[str], home: Path, here: Path) -> str:
    """Return a link as it is in the site; of a file that is no page only its words."""
    words, target, anchor = link[1], link[2], link[3] or ""
    if re.match(r"https?:|mailto:", target):
        return link[0]
    file = (home / target).resolve()
    if file.parent == DOCS.parent and file.name in ROOT:
        file = DOCS / ROOT[file.name]
    if file == DOCS.parent / "README.md":
        file = DOCS / "index.md"
    if not file.is_relative_to(DOCS):
        return words if "`" in words else f"`{words}`"
    inside = "/".join([".."] * len(here.relative_to(DOCS).parts) + [str(file.relative_to(DOCS))])
    return f"[{words}]({inside}{anchor})"


def apart(app: Any, environment: Any, names: list[str]) -> None:
    """Have notebooks, which are run, read first and in processes of their own: under -j each reads some 20 pages."""
    notebooks = [name for name in names if name.startswith("notebooks/")]
    names[:] = [name for name in names if name not in notebooks]
    for number, name in enumerate(notebooks):
        names.insert(30 * number, name)


def setup(app: Any) -> None:
    """Have Sphinx call the above."""
    app.connect("env-before-read-docs", apart)
    app.connect("source-read", page_text)
