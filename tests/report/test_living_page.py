"""The living page in a browser: as a run goes, by keyboard, in light and dark, on wide and narrow screens."""

import pytest
from browser import BROWSER, CONTRAST, NO_BROWSER, browser

from moretta.engines.run_folder import RunFolder
from moretta.report.living import Status
from moretta.report.page_server import PageServer, address_of, listening

pytestmark = pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)

ROUNDS = 40
FOCUS = "document.activeElement.id || document.activeElement.textContent.trim() || document.activeElement.tagName"
LAST = '`${document.getElementById("done").textContent}`'
MARKUP = '<img src=x onerror="document.title=1">'


def line(number, **more):
    told = {"round": number, "attempt": number % 7 == 0, "loss": 1 / number, "epsilon": number / 20}
    told |= {"seconds": {"aggregation": 0.5, "local_forward": 0.25}, "seconds_total": 60.0}
    if number % 5 == 0:
        told |= {"test_loss": 1.1 / number, "test_accuracy": 1 - 1 / number}
    return told | {"bytes": {"up": 12_345.0, "down": 2_000.0, "secure_aggregation": 500.0}, "dropped": []} | more


def missing(number):
    return [{"round": number, "silo": "north-" + "x" * 50, "reason": f"late: {MARKUP}"}]


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.begin(f'[run]\nname = "wards {"y" * 60} {MARKUP[:8]}"\nrounds = {ROUNDS}\n\n[protocol]\nname = "fedsgd"\n')
    for number in range(1, 21):
        folder.append(line(number, **({"dropped": missing(number)} if number == 20 else {})))
    log = [f"2026-11-23 08:00:0{n},000 WARNING round {n}: silo `north` is missing, {'z' * 90}" for n in range(9)]
    (folder.path / "log.txt").write_text("\n".join(log) + "\n")
    return folder


@pytest.fixture
def server(run):
    made = PageServer(listening(0), "token", run.path, Status(has_command=True))
    with made.serving():
        yield made


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def page(server, chromium):
    chromium.size(1280)
    chromium.open(address_of(server.socket, "token"))
    chromium.wait(f"{LAST} == 'Round 20 of 40'")
    yield chromium
    chromium.open("about:blank")  # before its server ends, of which it would complain
    assert chromium.complaints == []


def text(page, name):
    return page.ask(f"document.getElementById('{name}').innerText")


def test_it_shows_a_run_as_it_goes_is_resumed_fails_and_ends(page, run, server):
    assert text(page, "word") == "Running"
    assert page.ask("document.title").startswith("20/40 Running: wards")
    assert "About 20 min" in text(page, "figures").title().replace("Min", "min")
    assert "Epsilon spent\n1" in text(page, "figures")
    assert "Rounds repeated\n2" in text(page, "figures")
    assert [
        one.split(" by ")[0] for one in page.ask("[...document.querySelectorAll('h3')].map((one) => one.innerText)")
    ] == [
        "Loss",
        "Accuracy",
        "Epsilon spent",
    ]
    assert MARKUP in text(page, "missed")  # as text
    assert page.ask("document.querySelectorAll('img').length") == 0
    assert "Aggregation\t10.0" in text(page, "phases")
    assert "12.3 kB" in text(page, "bytes")
    run.append(line(21))
    page.wait(f"{LAST} == 'Round 21 of 40'")
    assert text(page, "now") == "In the last round nobody was missing."
    run.history(up_to=10)
    page.wait(f"{LAST} == 'Round 10 of 40'")
    server.status = Status(note="waiting for north", has_command=True)
    page.wait("document.getElementById('sentence').textContent == 'waiting for north'")
    server.status = Status(failed="too few silos are left", has_command=True)
    page.wait("document.getElementById('word').textContent == 'Failed'")
    assert text(page, "state").split() == ["Failed", "too", "few", "silos", "are", "left"]
    server.status = Status(has_command=True)
    for number in range(11, ROUNDS + 1):
        run.append(line(number))
    test = {"loss": 0.03, "accuracy": 0.97, "metrics": {}}
    run.write_json(
        "result.json", {"rounds": ROUNDS, "test": test, "warnings": ["two partners"], "facts": {"delta": 1e-5}}
    )
    page.wait("document.getElementById('word').textContent == 'Ended'")
    assert "Test accuracy\n0.97" in text(page, "figures")
    assert "two partners" in text(page, "warned")


def test_it_survives_a_reload_and_says_when_the_command_has_ended(page, run, server):
    page.reload()
    page.wait(f"{LAST} == 'Round 20 of 40'")
    server.ended.set()
    page.wait("document.getElementById('contact').textContent.startsWith('The command has ended')")
    assert f"moretta watch {run.path}" in text(page, "contact")
    assert text(page, "done") == "Round 20 of 40"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_and_can_be_read(page, width, dark):
    page.size(width, dark=dark)
    page.ask("for (const one of document.querySelectorAll('details')) one.open = true")
    page.wait("document.querySelectorAll('#rounds tbody tr').length > 0")
    page.wait(f"document.querySelector('figure svg').viewBox.baseVal.width < {width}")
    assert page.ask("document.documentElement.scrollWidth") <= width
    found = page.ask(CONTRAST)
    assert found["ratio"] >= 4.5, found
    assert found["texts"] > 100
    kinds = "figure, p, dl, h1, li, #missed, .pair table"
    cut = f"[...document.querySelectorAll('{kinds}')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
    assert page.ask(f"{cut}.map((one) => one.outerHTML.slice(0, 80))") == []


def test_the_contrast_test_would_see_pale_text(page):
    page.ask("document.styleSheets[0].insertRule('#name { color: #999; }', 0)")
    assert page.ask(CONTRAST)["ratio"] < 4.5


def test_all_of_it_can_be_done_by_keyboard(page):
    found = []
    for _ in range(9):
        page.press("Tab")
        found.append(page.ask(FOCUS))
        outline = page.ask("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", found
    assert found[:2] == ["Skip to the curves", "pause"]
    assert found[2:7] == ["Curves", "Missing silos", "Warnings", "Time", "Traffic"]
    assert found[7] == "The curves’ numbers"
    page.press("Tab", shift=True)
    page.press("Enter")
    page.wait("document.querySelectorAll('#rounds tbody tr').length > 0")
    assert page.ask("document.querySelector('#rounds thead').innerText").split("\t")[0] == "Round"
    page.press("Tab")
    assert page.ask("document.activeElement.getAttribute('aria-label')") == "The curves’ numbers"
    page.ask("document.activeElement.blur()")
    page.ask("document.querySelector('.skip').focus()")
    page.press("Enter")
    assert page.ask(FOCUS) == "curves"


def test_what_is_no_number_is_said(page, run):
    run.append(line(21, loss=float("nan"), epsilon=float("inf")))
    page.wait(f"{LAST} == 'Round 21 of 40'")
    assert "Epsilon spent\nunbounded" in text(page, "figures")
    assert "no number for: training loss" in text(page, "warned")


def test_it_stands_still_while_it_is_paused(page, run):
    page.ask("document.getElementById('pause').focus()")
    page.press(" ")
    assert page.ask("document.activeElement.getAttribute('aria-pressed')") == "true"
    run.append(line(21))
    page.ask("new Promise((resolve) => setTimeout(resolve, 1500))")
    page.wait("run.rounds.length == 21")  # it has heard
    assert text(page, "done") == "Round 20 of 40"
    page.press(" ")
    page.wait(f"{LAST} == 'Round 21 of 40'")


def test_a_long_run_is_drawn_with_few_points_and_rows(page, run):
    run.history(up_to=0)
    for number in range(1, 3001):
        run.append(line(number))
    page.wait("run.rounds.length == 3000")
    page.ask("document.getElementById('numbers').open = true")
    page.wait("document.querySelectorAll('#rounds tbody tr').length == 100")
    assert page.ask("document.querySelector('path.l1').getAttribute('d').split('L').length") <= 800
    assert page.ask("document.querySelectorAll('circle').length") < 100
