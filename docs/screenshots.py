"""Take the pictures of pages that the documentation shows, in a headless Chromium at 1280 and 390 pixels, light.

    make demo && moretta audit runs/demo/pbpfl && python docs/screenshots.py runs/demo

Each is of what `moretta compare`, `report` and `dossier` write for those runs, down to a height at which its first part
has ended; with --whole of the whole pages, into a folder, for whoever looks them over.
"""

from __future__ import annotations

import io
import sys
import tempfile
from argparse import ArgumentParser
from pathlib import Path

from PIL import Image

from moretta.report.dossier.page import write_dossier
from moretta.report.page import write_report

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "report"))

from browser import Page, browser  # noqa: E402  # tests drive pages by it too

COLOURS = 48  # of a palette: pages are black on white
MOST = 150_000  # bytes of a picture
HEIGHTS = {1280: 1250, 390: 1500}


def main() -> None:
    """Take all pictures of the pages of a folder of runs."""
    options = ArgumentParser(description=__doc__)
    options.add_argument("runs", type=Path, help="a folder of runs, as make demo leaves it")
    options.add_argument("--run", default="pbpfl", help="the run whose own report and dossier are shown")
    options.add_argument("--whole", type=Path, help="a folder for pictures of whole pages, in the place of docs/static")
    given = options.parse_args()
    out = given.whole or HERE / "static"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, browser(Path(scratch) / "profile") as page:
        for name, path in pages(given.runs, given.run, Path(scratch)).items():
            for width, height in HEIGHTS.items():
                picture(page, path, width, 0 if given.whole else height, out / f"{name}-{width}.png")


def pages(runs: Path, run: str, scratch: Path) -> dict[str, Path]:
    """Write the pages, and return them by the names of their pictures."""
    compared = sorted(path.parent for path in runs.glob("*/result.json"))
    comparison = write_report(compared, scratch / "comparison.html")
    report = write_report([runs / run], scratch / "report.html")
    dossier = write_dossier(runs / run, scratch / "dossier.html", None).files.page
    return {"comparison": comparison, "report": report, "dossier": dossier}


def picture(page: Page, path: Path, width: int, height: int, out: Path) -> None:
    """Take a picture of a page down to a height, 0 for all of it, in few colours."""
    page.size(width, 900)
    page.open(path.as_uri())
    page.size(width, height or int(page.ask("document.documentElement.scrollHeight")))
    taken = out.with_suffix(".taken.png")
    page.picture(taken)
    image = Image.open(io.BytesIO(taken.read_bytes())).convert("RGB")
    taken.unlink()
    image.crop((0, 0, width, height or image.height)).quantize(COLOURS, dither=Image.Dither.NONE).save(
        out, optimize=True
    )
    size = out.stat().st_size
    print(f"{out}: {size:,} bytes{' (too large)' * (size > MOST and bool(height))}")


if __name__ == "__main__":
    main()
