"""Build the API pages from the docstrings: python docs/build_api.py OUT. Any warning of pdoc's is a failure."""

from __future__ import annotations

import pkgutil
import sys
import warnings
from pathlib import Path

import pdoc

import moretta


def main(out: Path) -> None:
    """Write one page a module."""
    warnings.simplefilter("error")
    # A message's inherited field is annotated in its parent's module, where pdoc does not look.
    warnings.filterwarnings("ignore", message="Error parsing type annotation")
    for name in moretta.__all__:  # pdoc does not see names that are imported on first use
        setattr(moretta, name, getattr(moretta, name))
    rooms = [found.name for found in pkgutil.iter_modules(moretta.__path__, "moretta.")]  # pdoc walks what is in them
    pdoc.render.configure(docformat="markdown", math=True)
    pdoc.pdoc("moretta", *rooms, output_directory=out)
    print(f"{len(list(out.rglob('*.html')))} API pages: {out / 'index.html'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
