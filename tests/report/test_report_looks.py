"""How pages look: contrast in both colour schemes, and that nothing is cut on a narrow screen."""

import html
import json
import re
from itertools import product
from pathlib import Path

import pytest
from test_report_audit import audited, draw, illustrated
from test_report_page import BROWSER, EVERY, opened

import moretta.report
from moretta.report.page import write_report

TEMPLATES = Path(moretta.report.__file__).parent / "templates"
CSS = "".join((TEMPLATES / name).read_text() for name in ("style.css.j2", "dossier.css.j2"))
LEAST = 4.5
"""The contrast that WCAG 2.2 asks of text at level AA."""


def colours(scheme):
    """The page's variables in a scheme, by name."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", one)) for one in re.findall(r":root \{(.*?)\}", CSS, re.S)
    )
    assert set(light) == set(dark)
    return light if scheme == "light" else dark


def luminance(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(first, second):
    bright, dull = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dull + 0.05)


def pairs():
    """Every colour of text with each background that it can stand on, as the rules have them."""
    found = set()
    for rule in re.findall(r"\{([^{}]*)\}", CSS):
        text = re.search(r"(?<![\w-])color: var\(--([\w-]+)\)", rule)
        under = re.search(r"background: var\(--([\w-]+)\)", rule)
        if text and under:
            found.add((text[1], under[1]))
        elif text:
            found |= set(product([text[1]], ["paper", "soft"]))
    return found | set(product(["ink", "faint"], ["paper", "soft"]))  # figures' text has these


def test_contrast_is_computed_as_the_standard_has_it():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(scheme):
    found = colours(scheme)
    assert {("ink", "paper"), ("quiet", "paper"), ("alarm", "alarm-paper"), ("paper", "alarm")} <= pairs()
    dull = {pair: contrast(*(found[name] for name in pair)) for pair in pairs()}
    assert not {pair: value for pair, value in dull.items() if value < LEAST}
    assert "opacity" not in CSS  # it would make text paler than its colour


def widths(page: Path, folder: Path, width: int = 390) -> tuple[int, list[str]]:
    """How wide a page is on a screen of `width` pixels, and what sticks out of it and of every box that scrolls."""
    script = """f.onload = () => {
      const d = f.contentDocument, out = [];
      for (const e of d.body.querySelectorAll("*")) {
        const box = e.getBoundingClientRect();
        if (!e.closest(".wide, pre, svg") && box.width && (box.right > WIDTH + 0.5 || box.left < -0.5))
          out.push(e.outerHTML.slice(0, 120));
        if (e.matches(".wide, pre") && getComputedStyle(e).overflowX != "auto") out.push("does not scroll");
      }
      document.body.dataset.found = JSON.stringify([d.documentElement.scrollWidth, out]);
    }"""
    style = f"width:{width}px;height:800px;border:0"
    frame = f'<iframe id="f" style="{style}" srcdoc="{html.escape(page.read_text())}"></iframe>'
    harness = folder / "harness.html"
    harness.write_text(f"<!DOCTYPE html><body>{frame}<script>{script.replace('WIDTH', str(width))}</script>")
    dom, complaints = opened(harness, folder / "profile")
    assert complaints == []
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found
    wide, out = json.loads(html.unescape(found[1]))
    return wide, out


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
def test_nothing_is_cut_on_a_narrow_screen(make_run, tmp_path):
    noised = {"epsilon": 4.73, "delta": 1e-5}
    folders = [illustrated(make_run(warnings=["w" * 60])), *(make_run(name) for name in EVERY[1:])]
    folders.append(audited(make_run("fedsgd", folder="a-folder-of-quite-some-length-" * 3, facts=noised)))
    draw(folders[0])
    for name, some in (("one", folders[:1]), ("many", folders)):
        page = write_report(some, tmp_path / f"{name}.html")
        page.write_text(page.read_text().replace("<details>", "<details open>"))
        assert widths(page, tmp_path) == (390, [])


@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome is installed")
def test_the_narrow_test_would_see_what_sticks_out(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<!DOCTYPE html><title>bad</title><body style="margin:0"><p style="width:500px">wide</p>')
    wide, out = widths(page, tmp_path)
    assert wide == 500
    assert len(out) == 1
