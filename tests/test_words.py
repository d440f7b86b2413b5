"""What people read is in plain words: pages, docstrings, messages and names, by a short list of patterns.

`WORDS` has each pattern with the better word; `tests/words.txt` counts what is not yet rewritten. A count never rises,
and one that has fallen is written down:

    python tests/test_words.py              lowers the counts
    python tests/test_words.py PLACE ..     also prints each line that is counted there, such as docs/choose.md
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from functools import cache
from inspect import cleandoc
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))
from blocks import blocks  # noqa: E402

KEPT = ROOT / "tests" / "words.txt"
HOUSE = ROOT / "src" / "moretta"
LONGEST = 40
"""Words of a sentence; STYLE asks for 25, and the rest is for lists within a sentence."""
LONGEST_PAGE = 2400
"""Words of prose that are read in 10 minutes."""

WORDS = {
    r"(?:is|are|was|were) none": 'the noun: "X is not a directory", "X is empty"',
    r"(?:has|have) it, and": "say what requires what",
    r"and \w+ (?:has|have) not": "say what lacks what",
    r"expected (?:is|are)": '"expected a file, got a directory"',
    r"whoever": '"anyone who", or the role',
    r"mend(?:s|ed|ing)?": '"fix"',
    r"(?:come|comes|came) (?:to nothing|to|of)": '"equal", "end in"',
    r"(?:is|are|was|were|be|been) told(?! apart)": '"receive"',
    r"(?:is|are|was|were) had": '"is available"',
    r"(?:take|takes|took|taken|taking) up": '"resume"',
    r"what is (?:no|asked)": '"malformed", "the request"',
    r"measured against": '"the baseline"',
    r"right to (?:it|them)": '"grant permission"',
    r"rightly": '"correctly"',
    r"by itself the": '"each B\'s C for every A"',
    r"(?:ten|eleven|twelve|thirteen|fifteen|sixteen|twenty|thirty|forty|fifty|sixty|ninety)": "digits from ten on",
    r"(?:play|plays|played|playing)(?!s? (?:a|the|all|every|both|its|one)\b)": '"run", "carry out"',
}
STARTS = r"whoever|of what|what is|by which"
NAMES = {"told", "said", "found", "one", "here", "given", "wanted", "so_far", "apart"}
MODULES = {"given", "looking", "loaded", "finished", "held", "wiring", "helpers", "utils", "util", "manager"}
"""Names of variables and of modules in whose place a noun of the field exists."""

ANY = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
FIRST = re.compile(rf"(?:\A|(?<=[.!?] ))(?:{STARTS})\b", re.IGNORECASE)
ENTRY = re.compile(r"^(?: {4}[\w, ]+: |(?:Args|Returns|Raises|Source):$)", re.MULTILINE)
"""An argument of a docstring in Google's form, or the title above."""
MADE = re.compile(r"<!-- (\w+)(?:: ?| )(?:begin )?[\w-]+ -->.*?<!-- (?:\1:)?end(?: of [\w-]+)? -->", re.DOTALL)


# -- what people read --------------------------------------------------------------------------------------------------


def paragraphs(page: str) -> Iterator[str]:
    """Yield a page's paragraphs, items and cells, without code, comments and what is made from elsewhere."""
    lines = MADE.sub("", page).splitlines()
    for block in blocks("\n".join(lines)):
        lines[block.first : block.last + 1] = [""] * (block.last + 1 - block.first)
    text = re.sub(r"<!--.*?-->", "", "\n".join(lines), flags=re.DOTALL)
    text = re.sub(r"(?m)^(?:```\{.*?^```)$", "", text, flags=re.DOTALL)
    text = re.sub(r"(?m)^\s*(?:[-*]|\d+\.|#+|:|>) ", "\n\n", text)  # each item by itself
    text = re.sub(r"(?m)^\|.*$", lambda row: "\n\n" + row[0].strip("|").replace("|", "\n\n"), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    yield from (" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip())


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a paragraph."""
    for sentence in re.split(r"(?<=[.!?])[)\"'*]* (?=[A-Z`\"(*])", text):
        yield sentence.strip()


def texts_and_names(path: Path) -> tuple[list[str], list[str]]:
    """Return what a module says, paragraphs of docstrings and other texts with a space, and the names that it gives."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    bodies = [node.body for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    of_docs = {id(node.value) for body in bodies for node in body if isinstance(node, ast.Expr)}
    parts = [part for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values]
    skipped = {id(part) for part in parts}
    texts, names = list[str](), list[str]()
    for node in nodes:
        match node:
            case ast.JoinedStr(values=values):
                texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in values))
            case ast.Constant(value=str(text)) if id(node) in of_docs:
                texts += paragraphs(ENTRY.sub("\n\n", cleandoc(text)))
            case ast.Constant(value=str(text)) if " " in text and id(node) not in skipped:
                texts += paragraphs(text) if "\n" in text else [text]
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                names.append(name)
    return [" ".join(text.split()) for text in texts], names


def places() -> Iterator[tuple[str, list[Path]]]:
    """Yield each place that is counted: a page, the decisions, or a room of the package."""
    yield from ((name, [ROOT / name]) for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"))
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if page.parent.name != "decisions":
            yield str(page.relative_to(ROOT)), [page]
    yield "docs/decisions", sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for room in sorted(HOUSE.iterdir()):
        files = sorted(room.rglob("*.py")) if room.is_dir() else [room] * (room.suffix == ".py")
        if files:
            yield str(room.relative_to(ROOT)), files


@cache
def matches(path: Path) -> Sequence[tuple[str, str]]:
    """Return what is not in plain words in a file: its kind, and a line about it."""
    if path.suffix == ".py":
        texts, names = texts_and_names(path)
    else:
        texts, names = list(paragraphs(path.read_text(encoding="utf-8"))), []
    lines = [("names", f"the name {name}") for name in names if name in NAMES]
    for text in texts:
        plain = re.sub(r"`+[^`]*`+", "`code`", text)
        for match in (*ANY.finditer(plain), *FIRST.finditer(plain)):
            betters = (better for pattern, better in WORDS.items() if re.match(pattern, match[0], re.IGNORECASE))
            better = next(betters, "the subject first") if match.re is ANY else "the subject first"
            around = plain[max(0, match.start() - 60) : match.end() + 40]
            lines.append(("words", f'"{match[0]}", better {better}: {around}'))
        long = (sentence for sentence in sentences(plain) if len(sentence.split()) > LONGEST)
        lines += (("long", f"{len(sentence.split())} words: {sentence[:140]}") for sentence in long)
    return lines


def counted() -> dict[str, Counter[str]]:
    """Return how much of each kind each place has."""
    return {place: Counter(kind for path in paths for kind, _ in matches(path)) for place, paths in places()}


def kept() -> dict[str, Counter[str]]:
    """Return the same as it was written down."""
    lines = (line.split() for line in KEPT.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {place: Counter(dict(zip(rest[1::2], map(int, rest[::2]), strict=True))) for place, *rest in lines}


# -- tests -------------------------------------------------------------------------------------------------------------


def test_no_place_has_more_than_is_written_down_nor_less() -> None:
    old, new = kept(), counted()
    more = [
        f"{place}: {path.name}: {line}"
        for place, paths in places()
        for path in paths
        for kind, line in matches(path)
        if new[place][kind] > old.get(place, Counter())[kind]
    ]
    assert not more, "plainer words, please; each place has more than tests/words.txt allows:\n" + "\n".join(more)
    less = [place for place in {*old, *new} if +new.get(place, Counter()) != +old.get(place, Counter())]
    assert not less, f"{sorted(less)} have less than tests/words.txt says: run python tests/test_words.py"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: str(path.stem))
def test_a_page_is_read_in_ten_minutes_and_begins_with_its_readers(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    prose = re.sub(r"(?m)^ *\|.*$", "", text)
    assert sum(len(part.split()) for part in paragraphs(prose)) <= LONGEST_PAGE
    if path.name != "index.md" and not text.startswith("<!-- include: "):
        assert re.match(r"For .+\. Afterwards ", " ".join(text.split("\n\n")[1].split()))


def test_modules_have_names_of_what_they_hold() -> None:
    assert not [str(path) for path in HOUSE.rglob("*.py") if path.stem in MODULES]


def test_spelling_is_that_of_codespell() -> None:
    codespell = pytest.importorskip("codespell_lib", reason="codespell is of the extra [dev]")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["codespell"]
    pages = [str(path) for place, paths in places() if not place.startswith("src") for path in paths]
    with redirect_stdout(io.StringIO()) as output:
        wrong = codespell.main("-L", settings["ignore-words-list"], "-S", settings["skip"], *pages, str(HOUSE))
    assert not wrong, output.getvalue()


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("The port is none. Whoever mends it is told.", ["words"] * 5),  # also as the beginning of a sentence
        ("Twelve silos play a role.", ["words"]),
        ("| a | was told, and is none |", ["words"] * 2),
        ("    moretta train whoever\n", []),
        ("`whoever` <!-- not played: hours --> is a name.", []),
        ("- " + "word " * 30 + "\n- " + "word " * 30, []),
        ("word " * 41 + ".", ["long"]),
        ("<!-- claims:begin x -->\n\nwhoever\n\n<!-- claims:end -->\n\nA page.", []),
    ],
)
def test_patterns_are_found_in_prose_alone(text: str, kinds: list[str], tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    assert [kind for kind, _ in matches(tmp_path / "page.md")] == kinds


def test_patterns_are_found_in_docstrings_messages_and_names(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        '"""Whoever reads this."""\ndef f(given):\n    found = 1\n    raise ValueError(f"{given} is none of these")\n'
    )
    kinds = Counter(kind for kind, _ in matches(tmp_path / "module.py"))
    assert kinds == {"words": 3, "names": 2}


def main(shown: list[str]) -> None:
    """Lower the counts that have fallen, and print what is counted in some places."""
    old, new, first = kept() if KEPT.exists() else None, counted(), KEPT.exists()
    head = "# What is not yet in plain words: counts by place, which only fall (tests/test_words.py).\n"
    lines = []
    for place, counts in new.items():
        allowed = old.get(place, Counter()) & counts if old is not None else counts
        if +allowed:
            lines.append(f"{place} {' '.join(f'{number} {kind}' for kind, number in sorted(allowed.items()))}\n")
        if first and counts - allowed:
            shown = [*shown, place]
    KEPT.write_text(head + "".join(lines), encoding="utf-8")
    for place, paths in places():
        for path in paths if place in shown else ():
            for kind, line in matches(path):
                print(f"{place}: {path.name}: {kind}: {line}")


if __name__ == "__main__":
    main(sys.argv[1:])
