"""Text for a terminal: names of silos, classes and files are not trusted, and a terminal obeys control characters."""

import io
import logging
from collections.abc import Iterable
from typing import Any, TextIO
from unicodedata import category

from rich.console import Console, ConsoleOptions
from rich.segment import Segment


def printable(text: str, mark: str = "\ufffd") -> str:
    """Replace characters that control a terminal, or hide or turn text: control, format, bidi, half characters.

    Args:
        text: Untrusted text; spaces, tabs and line ends stay.
        mark: Replaces each such character.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" or category(character) == "Zs" else mark
        for character in text
    )


def one_line(text: str) -> str:
    """Return the same as one line, so that no name begins a line of its own."""
    return printable(text.replace("\r", " ").replace("\n", " "))


class Screen(Console):
    """A console that prints text as `printable` and has no markup, so that a class named "[red]" is shown so.

    It leaves out characters that `printable` replaces, because rich lays out cells for characters without a width.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the printed segments; the console's own control codes are separate from its text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, ""), style, control)


class PrintableStream(io.TextIOBase):
    """A stream that writes text as `printable` to the stream `raw`."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write a text."""
        self.raw.write(printable(text))
        return len(text)

    def flush(self) -> None:
        """Flush the other stream."""
        self.raw.flush()


class PrintableRecords(logging.Formatter):
    """Formats records of a log for a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record's text."""
        return printable(super().format(record))
