"""The figures of the page as inline SVG, drawn by matplotlib's Figure without pyplot or a display.

Text stays text and takes the page's fonts. Black, grey and the paper's colour are CSS variables of the page, so that
the same SVG is readable in light and in dark. A protocol has one colour everywhere. Runs also differ in their dashes,
because curves of protocols with the same result coincide.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

from moretta.errors import MissingExtra
from moretta.protocols.registry import ENTRIES
from moretta.report.folder import RunRecord
from moretta.report.table import byte_unit, human_bytes, human_seconds, labels, other_seconds, phases

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, PAPER = "#010203", "#040506", "#070809"
"""Placeholders, unlikely as real colours, that become the page's variables --ink, --faint and --paper."""

Curve = Sequence[tuple[float, float]]
"""Points of a line, usually rounds and values."""

COLOURS = ("#e69f00", "#009e73", "#999933", "#cc79a7", INK, "#0072b2", "#d55e00", "#56b4e9")
"""Protocols' colours, in the registry's order: Okabe and Ito's palette, which the colour-blind can distinguish.

Its yellow is too faint on white; an olive of Paul Tol's muted palette replaces it.
"""

PHASE_COLOURS = ("#ee8866", "#77aadd", "#99ddff", "#44bb99", "#eedd88", "#bbcc33", "#ffaabb", "#aaaa00")
"""Paul Tol's light palette, also safe for the colour-blind, and unlike the protocols' colours."""

OTHER = "#bbbbbb"
DASHES = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1.2, 2)))
SMOOTH_FROM = 60
"""From this many rounds on, a training curve is a moving average over its own faint points."""

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a run's name may have dollar signs
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.unicode_minus": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.4,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "path.simplify": True,
}


_SVG = (
    '<svg {box} role="img" aria-labelledby="{key}-title {key}-described">'
    '<title id="{key}-title">{title}</title><desc id="{key}-described">{described}</desc>{drawn}'
)


def figures(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Draw the figures of runs, by their places on the page; None for a figure without data.

    Over rounds they are training loss, test accuracy (or mse), loss on validation rows and epsilon. The others are the
    curves of `RANKED`, stacked seconds by phase, and bytes of one silo in one round.
    """
    return {
        **curves(records),
        "ranked": _ranked(records),
        "seconds": _svg(records, "seconds", "Seconds by phase", partial(_draw_seconds, records=records), bars=1),
        "bytes": _svg(records, "bytes", "Bytes per silo and round", partial(_draw_bytes, records=records), bars=2),
    }


def curves(records: Sequence[RunRecord], last: str = "") -> dict[str, Markup | None]:
    """Draw the result of runs over their rounds, by their places on the page; None for a curve without data.

    Args:
        last: The end of the SVGs' ids, if a page has several.
    """
    losses, window = f"losses{last}", smoothing(records)
    scaled = ", of scaled targets" * any(record.scales_targets for record in records)
    return {
        "losses": _curves(records, losses, "loss", f"Training loss{scaled}", least=1, window=window),
        "scores": _curves(records, f"scores{last}", *score_of(records), least=2),
        "validated": _curves(records, f"validated{last}", "validation_loss", "Loss on validation rows", least=2),
        "spent": _curves(records, f"spent{last}", "epsilon", "Epsilon spent", least=2),
    }


RANKED = {
    "roc": ("ROC curve", "False-positive rate", "Recall", "The dashed line is guessing."),
    "precision_recall": ("Precision and recall", "Recall", "Precision", "Precision at each recall."),
    "calibration": ("Calibration", "Stated probability", "Accuracy", "On the dashed line both are equal."),
}
"""Curves on the test rows: title, axes, and a sentence."""


def _ranked(records: Sequence[RunRecord]) -> list[tuple[Markup, str]]:
    """Return the curves that any of the runs has, with their sentences; three stand side by side."""
    figures = []
    for key, (title, across, up, caption) in RANKED.items():
        points = [_points(record, key) for record in records]
        draw = partial(_draw_points, records=records, points=points, titles=(title, across, up))
        if any(points):
            figures.append((drawn(key, title, f"{title}: {', '.join(labels(records))}.", draw, 3.1, 3.4), caption))
    return figures


def _points(record: RunRecord, key: str) -> Curve:
    if key == "calibration":
        table = record.test.classes.reliability if record.test.classes else ()
        return [(bin_of_table.probability, bin_of_table.accuracy) for bin_of_table in table]
    values = record.test.curves.get(key, ())
    return [(place / max(1, len(values) - 1), value) for place, value in enumerate(values)]


def _draw_points(
    figure: Figure, records: Sequence[RunRecord], points: Sequence[Curve], titles: tuple[str, str, str]
) -> None:
    axes = figure.add_subplot()
    if titles[2] != "Precision":
        axes.plot((0, 1), (0, 1), color=FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
    _lines(axes, records, points, 1)
    _finish_curves(axes, records, *titles[:2])
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), ylabel=titles[2])


def smoothing(records: Sequence[RunRecord]) -> int:
    """Return the number of rounds of the moving average; 1 if every round is drawn."""
    longest = max(len(_last_attempts(record, "loss")) for record in records)
    return max(3, longest // 30 | 1) if longest >= SMOOTH_FROM else 1


def score_of(records: Sequence[RunRecord]) -> tuple[str, str]:
    """Return the history's key of the score that the runs share, and its name."""
    if all(record.task == "regression" for record in records):
        return "test_mse", "Test mean squared error"
    return "test_accuracy", "Test accuracy"


def _last_attempts(record: RunRecord, measure: str) -> Curve:
    """Return (round, value) of rounds with a value; only the last attempt of a repeated round counts."""
    values = {}
    for line in sorted(record.history, key=lambda line: (line.round, line.attempt)):
        if (value := getattr(line, measure)) is not None and not 1e300 < abs(value) < float(
            "inf"
        ):  # no axis spans more
            values[line.round] = value
    return list(values.items())


def _curves(
    records: Sequence[RunRecord], key: str, measure: str, title: str, least: int, window: int = 1
) -> Markup | None:
    """Draw a measure over rounds; None if no run has `least` rounds with it. window: rounds that are averaged."""
    curves = [_last_attempts(record, measure) for record in records]
    if max(map(len, curves)) < least:
        return None

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        _lines(axes, records, curves, window)
        values = [value for curve in curves for _, value in curve]
        positive = [value for value in values if 0 < value < float("inf")]
        logarithmic = measure == "loss" and all(value > 0 for value in values)
        logarithmic = logarithmic and bool(positive) and max(positive) > 20 * min(positive)
        if logarithmic:
            axes.set_yscale("log")
            _plain_decades(axes, max(positive) / min(positive))
        else:
            _span(axes, records, measure, [value for value in values if abs(value) < float("inf")])
        for record in records:
            if measure == "validation_loss" and isinstance(best := record.facts.get("best_round"), float):
                axes.axvline(best, color=colour(record.protocol), linewidth=0.8, gid=f"best-{best:.0f}")
        _finish_curves(axes, records, title + (", log scale" if logarithmic else ""))

    return _svg(records, key, f"{title} over rounds", draw)


def _span(axes: Axes, records: Sequence[RunRecord], measure: str, values: Sequence[float]) -> None:
    """Begin an axis at 0 or at guessing, so that noise is not magnified."""
    if measure == "test_accuracy":
        guesses = sorted({max(record.test.shares) for record in records if record.test.shares})
        low = min([*values, *(guesses or [0.5])])
        axes.set_ylim(max(-0.02, low - 0.05), 1.02)
        for guess in guesses:
            axes.axhline(guess, color=FAINT, linewidth=0.8, linestyle=(0, (2, 2)))
    elif values and max(values) > 0:
        axes.set_ylim(min(0.0, *values), 1.05 * max(values))


def _lines(axes: Axes, records: Sequence[RunRecord], curves: Sequence[Curve], window: int) -> None:
    """Draw runs, earlier ones broader, so that a later one on the same points does not hide them."""
    for number, (curve, record, name) in enumerate(zip(curves, records, _short_labels(records), strict=True)):
        rounds, values = [at for at, _ in curve], [value for _, value in curve]
        if window > 1:
            axes.plot(rounds, values, color=colour(record.protocol), alpha=0.22, linewidth=0.6)
        axes.plot(
            rounds,
            _moving_average(values, window),
            color=colour(record.protocol),
            linestyle=DASHES[number % len(DASHES)],
            linewidth=max(1.5, 2.6 - 0.5 * number) if len(records) > 1 else 1.7,
            marker="o" if len(rounds) < 40 and window == 1 else "",
            markersize=3,
            label=name if rounds else None,  # under a blind aggregator no loss is known
        )


def _finish_curves(axes: Axes, records: Sequence[RunRecord], title: str, across: str = "Round") -> None:
    from matplotlib.ticker import MaxNLocator

    longest, width = max(map(len, _short_labels(records))), 68 if across == "Round" else 44
    columns = min(len(records), 4, max(1, width // (longest + 6)))
    axes.set_title(title, pad=8 if len(records) == 1 else 8 + 15 * -(-len(records) // columns))
    axes.set_xlabel(across)
    if across == "Round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    axes.grid(axis="y")
    if len(records) > 1:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, handlelength=2.2, borderaxespad=0.2)


def _draw_seconds(figure: Figure, records: Sequence[RunRecord]) -> None:
    axes = figure.add_subplot()
    places = range(len(records))
    begun = [0.0] * len(records)
    names = phases(records)
    parts = [(name, [r.seconds.get(phase, 0.0) for r in records]) for phase, name in names.items()]
    others = [other_seconds(record.seconds) for record in records]
    for number, (name, values) in enumerate([*parts, ("In no phase", others)]):
        colour = OTHER if number == len(parts) else PHASE_COLOURS[number % len(PHASE_COLOURS)]
        axes.barh(places, values, left=begun, height=0.56, color=colour, edgecolor=PAPER, linewidth=0.6, label=name)
        begun = [start + value for start, value in zip(begun, values, strict=True)]
    for place, (end, record) in enumerate(zip(begun, records, strict=True)):
        _beside(axes, end, place, human_seconds(record.seconds["total"]))
    axes.set_xlabel("Seconds, whole run")
    _finish_bars(axes, records, max(begun))
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, handlelength=1, handleheight=1, columnspacing=1.2
    )


def _draw_bytes(figure: Figure, records: Sequence[RunRecord]) -> None:
    axes = figure.add_subplot()
    up = [record.traffic.up_per_silo_per_round for record in records]
    down = [record.traffic.down_per_silo_per_round for record in records]
    unit, size = byte_unit(max(*up, *down))
    for values, offset, alpha in ((up, -0.19, 1.0), (down, 0.19, 0.45)):
        for place, (value, record) in enumerate(zip(values, records, strict=True)):
            axes.barh(place + offset, value / size, height=0.34, color=colour(record.protocol), alpha=alpha)
            way = "up" if offset < 0 else "down"
            _beside(axes, value / size, place + offset, f"{human_bytes(value)} {way}")
    axes.set_xlabel(f"{unit} per silo and round")
    _finish_bars(axes, records, max(*up, *down) / size)


def _finish_bars(axes: Axes, records: Sequence[RunRecord], longest: float) -> None:
    axes.set_yticks(range(len(records)), _short_labels(records))
    axes.set_ylim(len(records) - 0.5, -0.5)
    axes.set_xlim(0, (longest or 1.0) * 1.25)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _beside(axes: Axes, end: float, place: float, text: str) -> None:
    axes.annotate(text, (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)


def _plain_decades(axes: Axes, ratio: float) -> None:
    """Set ticks at 1, 2 and 5 (only 1 over many decades), written out: the default writes powers in TeX."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio < 1e3 else (1.0,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _short_labels(records: Sequence[RunRecord]) -> list[str]:
    """Return labels that fit a figure. matplotlib leaves names that begin with _ out of a legend."""
    names = [label.lstrip("_") or "?" for label in labels(records)]
    return [name if len(name) <= 30 else name[:29] + "…" for name in names]


def _moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the mean over `window` neighbours, fewer at both ends."""
    reach = window // 2
    around = [values[max(0, at - reach) : at + reach + 1] for at in range(len(values))]
    return [sum(neighbours) / len(neighbours) for neighbours in around]


def colour(protocol: str) -> str:
    """Return a protocol's colour; grey for one without a colour."""
    return dict(zip(ENTRIES, COLOURS, strict=False)).get(protocol, "#999999")


def _svg(
    records: Sequence[RunRecord], key: str, title: str, draw: Callable[[Figure], None], *, bars: int | None = None
) -> Markup:
    """Draw one figure of runs. bars: the number of a run's bars, which sets the height; None for curves."""
    height = 3.1 if bars is None else 0.9 + (0.24 + 0.2 * bars) * len(records)
    described = f"{title}: {', '.join(labels(records))}. The numbers are in the comparison table."
    return drawn(key, title, described, draw, height)


def drawn(
    key: str, title: str, described: str, draw: Callable[[Figure], None], height: float, width: float = 5.2
) -> Markup:
    """Draw a figure as an SVG inside a page, always in the same bytes.

    Args:
        key: The start of the SVG's ids, and the salt of others.
        height, width: The size in inches.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra('The figures of a report need matplotlib: pip install "moretta[torch]".') from None
    with warnings.catch_warnings(), matplotlib.rc_context({**_STYLE, "svg.hashsalt": key}):
        warnings.simplefilter("ignore")  # the measuring font may lack glyphs; the browser has its own fonts
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        written = StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(written.getvalue(), key, title, described)


def _inline(svg: str, key: str, title: str, described: str) -> Markup:
    """Remove a file's header, make ids unique to the figure, name it for screen readers, and theme its colours.

    matplotlib escapes the text that it draws, so its output is markup; text that is added here is escaped.
    """
    from markupsafe import Markup

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    opening, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', opening)
    rest = re.sub(r'\bid="', f'id="{key}-', rest)
    rest = re.sub(r'xlink:href="#', f'href="#{key}-', rest)
    rest = re.sub(r"url\(#", f"url(#{key}-", rest)
    rest = re.sub(r"(font(?:-family)?): ([^;\"]*)'DejaVu Sans'[^;\"]*", r"\1: \2var(--figures)", rest)
    for stand_in, variable in ((INK, "--ink"), (FAINT, "--faint"), (PAPER, "--paper")):
        rest = rest.replace(stand_in, f"var({variable})")
    return Markup(_SVG).format(
        box=Markup(box.group() if box else ""), key=key, title=title, described=described, drawn=Markup(rest)
    )
