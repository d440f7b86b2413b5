"""The display of a run's progress: a bar in a terminal or a notebook, else a line every few seconds.

The shell and Python share it. It writes to stderr or to the notebook's cell. The log has the lines too, at level INFO
(`moretta.run.loop`).
"""

import html
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from moretta.report.terminal import Screen, one_line

Progress = Callable[[int, int, Mapping[str, Any]], None]
"""Called after each round with its number, the number of rounds, and its line of the history."""

log = logging.getLogger("moretta")

EVERY = 5.0  # seconds between lines
REFRESH = 0.2  # seconds between pictures in a notebook


def round_line(number: int, rounds: int, line: Mapping[str, Any]) -> str:
    """Return one line about a round: its result, how long it took, and who was missing."""
    parts = [f"{name} {value:.4g}" for name, value in _figures(line).items()]
    parts = ["lost", *parts] if "lost" in line else parts
    parts += [f"{line['seconds_total']:.4g} s"] if "seconds_total" in line else []
    sums = [opened for opened in line.get("sums", ()) if opened["of"] != "set-up" and opened.get("used", True)]
    for gone in line["dropped"]:
        played = any(gone["silo"] in opened["silos"] for opened in sums)
        event = f"{gone['silo']} missed an answer" if played else f"without {gone['silo']}"
        parts.append(f"{event} ({gone['reason']})")
    return f"round {number} of {rounds}: {', '.join(parts)}"


def _figures(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores and epsilon of a round's line, by names for people."""
    names = {"loss": "loss", "scaled_loss": "loss of scaled targets", "test_accuracy": "test accuracy"}
    names |= {"test_mse": "test mse", "validation_loss": "validation loss", "epsilon": "epsilon"}
    if "test_accuracy" in line:
        del names["test_mse"]
    return {label: line[name] for name, label in names.items() if isinstance(line.get(name), float)}


def _events(line: Mapping[str, Any]) -> list[str]:
    """Return what a reader must not miss of a round: its missing silos, and that it was lost."""
    missed = [f"round {gone['round']}: {gone['silo']} {gone['reason']}" for gone in line["dropped"]]
    return [*missed, f"round {line['round']} is lost: the others are too few"] if "lost" in line else missed


class Rhythm:
    """Selects rounds to show: one in each interval of seconds, and the last."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last = seconds, time.monotonic()

    def due(self, *, last: bool) -> bool:
        """Return whether this round is shown; if it is, a new interval begins."""
        if not last and time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


class Display:
    """Show a run within a `with` block; it is called after each round. label: the text to show."""

    def __init__(self, label: str, rounds: int) -> None:
        self._label, self._rounds, self._stack = label, rounds, ExitStack()
        self._logged = {level: _is_logged(level) for level in (logging.INFO, logging.WARNING)}
        self._face: _Lines | _Bar | _Cell = _Lines(rounds)

    def __enter__(self) -> Self:
        """Begin to show the run."""
        self._stack.enter_context(_sentences_once())
        console = Screen(stderr=True)
        if (notebook := _notebook()) is not None:
            self._face = _Cell(notebook, self._label, self._rounds)
        elif console.is_terminal:
            self._face = self._stack.enter_context(_bar(console, self._label, self._rounds))
        else:
            self._face = _Lines(self._rounds, self._label, quiet=self._logged[logging.INFO])
        return self

    def __exit__(self, *error: object) -> None:
        """Stop showing the run."""
        self._stack.close()

    def __call__(self, number: int, rounds: int, line: Mapping[str, Any]) -> None:
        """Show that a round has ended."""
        self._face.show(number, line)

    def end(self, warnings: Sequence[str]) -> None:
        """Show the last round, and warnings that the program's own logging has not shown."""
        self._face.end()
        if not self._logged[logging.WARNING]:
            for sentence in warnings:
                self._face.say(f"warning: {sentence}")


@contextmanager
def _sentences_once() -> Iterator[None]:
    """Keep the shell's own handler quiet, because the display shows its records."""
    root = logging.getLogger()
    own = [handler for handler in root.handlers if handler is logging.lastResort]
    for handler in own:
        root.removeHandler(handler)
    try:
        yield
    finally:
        for handler in own:
            root.addHandler(handler)


def _is_logged(level: int) -> bool:
    """Return whether a handler of the program's own shows records of this level."""
    handlers = [*log.handlers, *(logging.getLogger().handlers if log.propagate else ())]
    silent = (logging.NullHandler, logging.FileHandler)
    own = [handler for handler in handlers if not isinstance(handler, silent) and handler is not logging.lastResort]
    return log.isEnabledFor(level) and any(handler.level <= level for handler in own)


class _Lines:
    """Lines on stderr. quiet: whether the program's own logging shows them."""

    def __init__(self, rounds: int, label: str = "", *, quiet: bool = False) -> None:
        self._label, self._rounds, self._quiet, self._rhythm = label, rounds, quiet, Rhythm(EVERY)
        self._waiting = ""  # the line of a round that was not due

    def show(self, number: int, line: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        for event in _events(line):
            self.say(event)
        self._waiting = f"{self._label}: {round_line(number, self._rounds, line)}"
        if self._rhythm.due(last=number == self._rounds):
            self.end()

    def end(self) -> None:
        if self._waiting:
            self.say(self._waiting)
        self._waiting = ""

    def say(self, text: str) -> None:
        print(one_line(text), file=sys.stderr, flush=True)


@contextmanager
def _bar(console: Any, label: str, rounds: int) -> "Iterator[_Bar]":
    """Show a bar in a terminal."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[figures]}", markup=False),
    )
    with progress.Progress(*columns, console=console) as bar:
        face = _Bar(bar, bar.add_task(label, total=rounds, figures=""))
        try:
            yield face
        except BaseException:
            bar.live.transient = not face.begun  # a bar that never began leaves only its sentence
            raise


class _Bar:
    def __init__(self, bar: Any, task: Any) -> None:
        self._bar, self._task, self.begun = bar, task, False

    def show(self, number: int, line: Mapping[str, Any]) -> None:
        self.begun = True
        for event in _events(line):
            self.say(event)
        figures = "  ".join(f"{name} {value:.4f}" for name, value in _figures(line).items())
        self._bar.update(self._task, completed=number, **({"figures": figures} if figures else {}))

    def say(self, text: str) -> None:
        self._bar.console.print(one_line(text), soft_wrap=True)

    def end(self) -> None:
        pass


def _notebook() -> Any:
    """Return the display function of a notebook's cell; None outside notebooks."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    from IPython import display

    return display


class _Cell:
    """A bar in a notebook's cell: HTML, with text for notebooks that show none."""

    def __init__(self, notebook: Any, label: str, rounds: int) -> None:
        self._label, self._rounds, self._notes, self._rhythm = label, rounds, list[str](), Rhythm(REFRESH)
        self._at, self._figures = 0, ""
        self._handle = notebook.display(self._picture(), raw=True, display_id=True)

    def show(self, number: int, line: Mapping[str, Any]) -> None:
        self._notes += _events(line)
        figures = "  ".join(f"{name} {value:.4f}" for name, value in _figures(line).items())
        self._at, self._figures = number, figures or self._figures
        if self._rhythm.due(last=number == self._rounds or bool(line["dropped"])):
            self.end()

    def say(self, text: str) -> None:
        self._notes.append(text)
        self.end()

    def end(self) -> None:
        self._handle.update(self._picture(), raw=True)

    def _picture(self) -> dict[str, str]:
        text = f"{self._label} {self._at}/{self._rounds}  {self._figures}".rstrip()
        bar = f'<progress value="{self._at}" max="{self._rounds}"></progress>'
        lines = [f"{bar} {html.escape(text)}", *map(html.escape, self._notes)]
        return {"text/plain": "\n".join([text, *self._notes]), "text/html": "<br>".join(lines)}
