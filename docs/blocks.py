"""The blocks of code of a page: fenced ones by their word, indented ones by what they look like.

A block of TOML is for one kind of file (`KINDS`), which its sections show or the line above it says:
<!-- toml: silo.toml -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

FENCE = re.compile(r"( *)(```+|~~~+)(.*)")
LOOKS = (
    ("toml", re.compile(r"\[[\w\[]|[\w-]+ = ")),
    ("sh", re.compile(r"(moretta|make|python|pip|nvflare|podman|ssh|OMP_NUM_THREADS=1|A\$ moretta) ")),
    ("python", re.compile(r"(from|import|class) |np\.")),
)
KINDS = {
    "run file": {"run", "model", "protocol", "engine", "secure-aggregation"},
    "silo.toml": {"silo", "limits", "privacy"},
    "schema": {"columns"},
    "roster": {"server"},
    "answers": set[str](),
    "experiment": set[str](),
}
"""The kinds of TOML files, and the sections that each alone has. A run file may have a schema in it."""
SAYS_KIND = re.compile(r"<!-- toml: ([\w. -]+) -->")


@dataclass(frozen=True)
class Block:
    """A block of code. word: its language, "text" for what is output or grammar. first, last: its lines, from 0."""

    word: str
    text: str
    first: int
    last: int
    fenced: bool


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page in their order; directives, whose word is in braces, are none."""
    lines, at = page.splitlines(), 0
    while at < len(lines):
        if mark := FENCE.fullmatch(lines[at]):
            end = at + 1
            while end < len(lines) and not re.fullmatch(rf" *{re.escape(mark[2])}`* *", lines[end]):
                end += 1
            inside = [line.removeprefix(mark[1]) for line in lines[at + 1 : end]]
            if not mark[3].startswith("{"):
                yield Block(mark[3].strip() or "text", "\n".join(inside) + "\n", at, end, True)
            at = end + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()) and not _in_list(lines, at):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or _goes_on(lines, end)):
                end += 1
            text = "\n".join(line[4:] for line in lines[at:end]) + "\n"
            yield Block(looks_like(text), text, at, end - 1, False)
            at = end
        else:
            at += 1


def kind_of(page: str, block: Block) -> str:
    """Return which of `KINDS` a block of TOML is for. Raises ValueError where neither it nor the page shows it."""
    above = [line for line in page.splitlines()[: block.first] if line.strip()]
    if above and (mark := SAYS_KIND.fullmatch(above[-1])):
        if mark[1] not in KINDS:
            raise ValueError(f"{mark[1]} is not one of {', '.join(KINDS)}")
        return mark[1]
    if re.search(r"^\[\[silo\]\]", block.text, re.MULTILINE):
        return "roster"
    names = set(re.findall(r"^\[\[?([\w-]+)", block.text, re.MULTILINE))
    found = [kind for kind, own in KINDS.items() if own & names]
    if not names:
        return "answers"
    if found[1:] or not found:
        raise ValueError(f"of {', '.join(found) or 'no file alone'}; say above it <!-- toml: KIND -->")
    return found[0]


def _goes_on(lines: list[str], at: int) -> bool:
    return not lines[at].strip() and at + 1 < len(lines) and lines[at + 1].startswith("    ")


def _in_list(lines: list[str], at: int) -> bool:
    before = next((line for line in reversed(lines[:at]) if line.strip() and not line.startswith("  ")), "")
    return re.match(r"([-*]|\d+\.) ", before) is not None


def looks_like(text: str) -> str:
    """Return the language of an indented block by its first line that is no comment."""
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    return next((word for word, look in LOOKS if look.match(first)), "text")


def fenced(page: str) -> str:
    """Return a page with indented blocks fenced, so that a site colours them."""
    lines = page.splitlines()
    for block in reversed([one for one in blocks(page) if not one.fenced]):
        lines[block.first : block.last + 1] = [f"```{block.word}", *block.text.splitlines(), "```"]
    return "\n".join(lines) + "\n"
