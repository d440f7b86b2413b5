"""Blocks of pages that are made from the code: what stands between <!-- KIND:begin NAME --> and <!-- KIND:end -->."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path


def filled(page: str, kind: str, text_of: Callable[[str], str]) -> str:
    """Return a page with each block as the code has it, with straight apostrophes as pages do."""

    def fill(mark: re.Match[str]) -> str:
        text = text_of(mark[1]).replace("’", "'")
        return f"<!-- {kind}:begin {mark[1]} -->\n\n{text}\n\n<!-- {kind}:end -->"

    return re.sub(rf"<!-- {kind}:begin (\S+) -->.*?<!-- {kind}:end -->", fill, page, flags=re.DOTALL)


def write(root: Path, names: Sequence[str], kind: str, fill: Callable[[str], str], words: Sequence[str] | None) -> int:
    """Write the blocks of pages, or check them by --check; return 1 where one differs."""
    parser = argparse.ArgumentParser(description=f"Write the blocks of pages that docs/{kind}.py makes.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a block differs")
    check = parser.parse_args(words).check
    pages = {name: (root / name).read_text(encoding="utf-8") for name in names}
    stale = {name: text for name, old in pages.items() if (text := fill(old)) != old}
    for name, text in stale.items():
        if not check:
            (root / name).write_text(text, encoding="utf-8")
        print(f"{name}: {f'its blocks differ from the {kind}; run python docs/{kind}.py' if check else 'written'}")
    return int(check and bool(stale))
