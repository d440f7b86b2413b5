"""One HTML page for one run or several: self-contained, without scripts, to be read on a screen or on paper.

Nothing on the page is fetched from anywhere, and its content security policy forbids it to. All text of a run (its
name, its silos, its settings) passes through `_text`, which escapes it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from moretta.engines.files import write_atomically
from moretta.errors import ParameterError
from moretta.report import audit, plots
from moretta.report.folder import TEST_ROWS, Attacked, AuditRecord, RunRecord, read_run
from moretta.report.privacy import Statement, privacy_statements, reading_notes
from moretta.report.style import CSS
from moretta.report.table import MISSING, PROTOCOLS, comparison_rows, human_bytes, human_seconds, labels, plain


def write_report(folders: Sequence[Path], out: Path, differences: Mapping[str, float] | None = None) -> Path:
    """Write the page about these run folders to `out`, whole or not at all, and return `out`.

    differences: as in `moretta.report.table.comparison_rows`.
    Raises ParameterError for a folder that cannot be read or a file that cannot be written, and MissingExtra without
    matplotlib; then `out` is as it was.
    """
    if not folders:
        raise ParameterError("A report needs at least one run folder.")
    written = page([read_run(folder) for folder in folders], differences)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        mode = 0o600 if "<img " in written else 0o644  # pictures may be of silos' own rows
        write_atomically(out, written.encode("utf-8", "replace"), mode)  # a folder's name need not be UTF-8
    except OSError as error:
        raise ParameterError(f"The report cannot be written to {out}: {error.strerror}.") from error
    return out


def page(records: Sequence[RunRecord], differences: Mapping[str, float] | None = None) -> str:
    """The page as text; the same records give the same text."""
    title, audits = _title(records), _audits(records)
    policy = "default-src 'none'; style-src 'unsafe-inline'" + ("; img-src data:" if "<img " in audits else "")
    sections = [
        _section("Defences side by side", _defences(records)),
        _section("Comparison" if len(records) > 1 else "Result", _comparison(records, differences)),
        _section("Learning curves", _curves(records)),
        _section("Time and traffic", _costs(records)),
        _section("By silo", _silos(records)),
        _section("Dropped silos", _dropped(records)),
        _section("What each role could learn", audits),
        _section("What was hidden from whom", _privacy(records)),
        _section("Facts and settings", _settings(records)),
        _section("Versions, and how to run it again", _again(records)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{_text(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{_text(title)}</h1>{_banner(records)}{_summary(records)}{_warnings(records)}</header>\n"
        + "\n".join(section for section in sections if section)
        + "\n</main>\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    return escape(str(value))


def _section(title: str, body: str) -> str:
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>" if body else ""


def _table(caption: str, head: str, body: Iterable[str], kind: str = "") -> str:
    """caption, head and body are HTML already."""
    return (
        f'<div class="wide"><table class="{kind}"><caption>{caption}</caption>\n<thead>{head}</thead>\n'
        + "\n".join(body)
        + "</table></div>"
    )


def _head(*names: str, numbers: bool = False) -> str:
    cells = "".join(f'<th scope="col"{_number(numbers and at > 0)}>{_text(name)}</th>' for at, name in enumerate(names))
    return f"<tr>{cells}</tr>"


def _row(header: str, cells: Iterable[str], numbers: bool = False) -> str:
    """header and cells are HTML already."""
    rest = "".join(f"<td{_number(numbers)}>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{header}</th>{rest}</tr>'


def _number(numbers: bool) -> str:
    return ' class="n"' if numbers else ""


def _figures(value: str) -> str:
    """A number's text in HTML: 3.2e-07 becomes 3.2 x 10^-7, a hyphen before a digit a minus sign."""
    if found := re.fullmatch(r"(-?[\d.]+)e([+-]\d+)", value):
        exponent = str(int(found[2])).replace("-", "−")
        return f"{found[1].replace('-', '−')} × 10<sup>{exponent}</sup>"
    return _text(value.replace("-", "−") if re.fullmatch(r"-[\d.]+", value) else value)


def _title(records: Sequence[RunRecord]) -> str:
    names = list(dict.fromkeys(record.name for record in records))
    if len(records) == 1:
        return f"{names[0]}: {PROTOCOLS.get(records[0].protocol, records[0].protocol)}"
    return f"{', '.join(names)}: {len(records)} runs compared"


def _banner(records: Sequence[RunRecord]) -> str:
    runs = [label for label, record in zip(labels(records), records, strict=True) if record.insecure_secret_seed]
    if not runs:
        return ""
    which = "This run" if len(records) == 1 else f"The run {runs[0]}" if len(runs) == 1 else f"The runs {_and(runs)}"
    return (
        f'<p class="banner" role="alert"><strong>Insecure: nothing was hidden.</strong> {_text(which)} used '
        "<code>insecure-secret-seed</code>, so every key and mask can be computed by whoever knows the run file. "
        "It is for tests only: no sentence about privacy below holds.</p>"
    )


def _warnings(records: Sequence[RunRecord]) -> str:
    items = [
        f"<li>{_text(f'{label}: ' if len(records) > 1 else '')}{_text(warning)}</li>"
        for label, record in zip(labels(records), records, strict=True)
        for warning in record.warnings
    ]
    return f'<div class="warnings"><h2>Warnings</h2><ul>{"".join(items)}</ul></div>' if items else ""


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _summary(records: Sequence[RunRecord]) -> str:
    said = _one_summary(records[0]) if len(records) == 1 else _many_summary(records)
    return f'<p class="summary">{_text(said)}</p>'


def _one_summary(record: RunRecord) -> str:
    sent, received = record.traffic.up_per_silo_per_round, record.traffic.down_per_silo_per_round
    traffic = (
        f"In each round a silo sent {human_bytes(sent)} and received {human_bytes(received)}."
        if sent or received
        else "The silos sent and received nothing during training."
    )
    return f"{_cohort(record)} with {_protocol(record)}, in {human_seconds(record.seconds['total'])}. " + (
        f"{_reached(record)} {traffic} {_missed(record)}"
    )


def _many_summary(records: Sequence[RunRecord]) -> str:
    names = labels(records)
    how_many = _number_word(len(records))
    if len({(record.name, record.parameters, record.silos, record.rounds) for record in records}) == 1:
        opening = f"{_cohort(records[0])}, in {how_many} ways: {_and(names)}."
    else:
        opening = f"{how_many.capitalize()} runs: {_and(names)}. They differ in name, model size, silos or rounds."
    missed = " ".join(dict.fromkeys(map(_missed, records)))
    if not all(record.test.given for record in records):
        return f"{opening} {missed}".strip()
    scores = [f"{_score(record)} ({name})" for name, record in zip(names, records, strict=True)]
    if len(set(map(_score, records))) == 1:
        return f"{opening} On the test rows all of them reach {_score(records[0])}. {missed}".strip()
    return f"{opening} On the test rows they reach {_and(scores)}. {missed}".strip()


def _protocol(record: RunRecord) -> str:
    return PROTOCOLS.get(record.protocol, record.protocol)


def _cohort(record: RunRecord) -> str:
    silos = _count(record.silos, "silo")
    return (
        f"{silos[0].upper()}{silos[1:]} trained a model of {_count(record.parameters, 'parameter')} "
        f"for {_count(record.rounds, 'round')}"
    )


def _count(number: int, thing: str) -> str:
    return f"{_number_word(number)} {thing}{'' if number == 1 else 's'}"


def _number_word(number: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    return words[number] if 0 <= number < len(words) else f"{number:,}"


def _reached(record: RunRecord) -> str:
    if not record.test.given:
        return "There were no test rows, so nothing says how good the model is."
    rows = "rows that silos hold back" if record.test.by == "silos" else "test rows"
    return f"On the {rows} the model reaches {_score(record)}."


def _score(record: RunRecord) -> str:
    if record.test.accuracy is not None:
        return f"an accuracy of {100 * record.test.accuracy:.1f} %"
    return f"a mean squared error of {plain(record.test.mse)}"


def _missed(record: RunRecord) -> str:
    if not record.dropped:
        return ""
    silos = len({missed.silo for missed in record.dropped})
    rounds = len({missed.round for missed in record.dropped})
    return f"With {_protocol(record)}, {_count(silos, 'silo')} missed {_count(rounds, 'round')}."


def _comparison(records: Sequence[RunRecord], differences: Mapping[str, float] | None) -> str:
    bodies = []
    for group, rows in groupby(comparison_rows(records, differences), key=lambda row: row.group):
        heading = f'<tr class="group"><th colspan="{len(records) + 1}" scope="rowgroup">{_text(group)}</th></tr>'
        lines = [_row(_text(row.header), map(_figures, row.cells), numbers=True) for row in rows]
        bodies.append(f"<tbody>{heading}{''.join(lines)}</tbody>")
    caption = "1 kB is 1000 bytes; times are of the whole run."
    if any(MISSING in row.cells for row in comparison_rows(records, differences)):
        caption += f" {MISSING}: no such number."
    return _table(caption, _head("Measure", *labels(records), numbers=True), bodies)


def _curves(records: Sequence[RunRecord]) -> str:
    window = plots.smoothing(records)
    notes = ["The loss is that of the rows each round was trained on, as the run recorded it."]
    if window > 1:
        notes.append(f"Strong lines are averages over {window} neighbouring rounds, faint lines the rounds themselves.")
    if len({str(record.setting("protocol", "loss")) for record in records}) > 1:
        notes.append("The runs were trained on different losses, whose heights cannot be compared.")
    drawn = [
        _figure(plots.loss_curves(records, "losses"), " ".join(notes), "No training loss was recorded."),
        _figure(
            plots.score_curves(records, "scores"),
            f"{plots.score_of(records)[1]} on the rounds that were evaluated.",
            "The run was not evaluated during training; the final scores are in the table above.",
        ),
    ]
    return f'<div class="figures">{"".join(drawn)}</div>'


def _costs(records: Sequence[RunRecord]) -> str:
    time = "Seconds by phase; the number is the total. Phases of silos that work at the same time are added up."
    traffic = "Mean bytes of one silo in one round: up from the silo (full colour) and down to it (pale)."
    drawn = [
        _figure(plots.seconds_bars(records, "seconds"), time, ""),
        _figure(plots.bytes_bars(records, "bytes"), traffic, ""),
    ]
    return f'<div class="figures">{"".join(drawn)}</div>'


def _figure(svg: str | None, caption: str, without: str) -> str:
    if svg is None:
        return f'<p class="note">{_text(without)}</p>'
    return f"<figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>"


def _silos(records: Sequence[RunRecord]) -> str:
    silos = list(dict.fromkeys(silo for record in records for silo in record.test.per_silo))
    if not silos:
        return ""
    score, name = ("mse", "MSE") if plots.score_of(records)[0] == "test_mse" else ("accuracy", "Accuracy")
    spans = "".join(f'<th scope="colgroup" colspan="2" class="over">{_text(label)}</th>' for label in labels(records))
    each = f'<th scope="col" class="n">{name}</th><th scope="col" class="n">Loss</th>' * len(records)
    caption = "A model that all silos share is scored on each silo’s own rows, a silo’s own model on the test rows."
    first = '<th scope="col" rowspan="2">Silo</th><th scope="col" rowspan="2" class="n">Rows</th>'
    head = f"<tr>{first}{spans}</tr><tr>{each}</tr>"
    rows = []
    for silo in silos:
        found = [record.test.per_silo.get(silo) for record in records]
        counts = dict.fromkeys(f"{one.rows:,}" for one in found if one and one.rows is not None)
        cells = [" / ".join(counts) or MISSING]
        for one in found:
            cells += [plain(getattr(one, score)) if one else MISSING, plain(one.loss) if one else MISSING]
        rows.append(_row(_text(silo), map(_figures, cells), numbers=True))
    return _table(caption, head, [f"<tbody>{''.join(rows)}</tbody>"])


def _dropped(records: Sequence[RunRecord]) -> str:
    rows = [
        _row(_text(label), (f"{missed.round:,}", _text(missed.silo), _text(missed.reason)))
        for label, record in zip(labels(records), records, strict=True)
        for missed in record.dropped
    ]
    if not rows:
        return "<p>No silo missed a round.</p>"
    return _table(
        f"Rounds that a silo missed, {len(rows):,} in all; where it missed only the unmasking, its upload counts.",
        _head("Run", "Round", "Silo", "Reason"),
        [f"<tbody>{''.join(rows)}</tbody>"],
        "words",
    )


def _defences(records: Sequence[RunRecord]) -> str:
    """Runs side by side, where any of them was audited: what each reaches, costs and leaks."""
    if len(records) < 2 or all(record.audit is None for record in records):
        return ""
    rows = []
    for label, record in zip(labels(records), records, strict=True):
        numbers = "".join(f'<td class="n">{_figures(cell)}</td>' for cell in audit.costs(record))
        leaks = "".join(f"<td>{_leak(audit.leak(record.audit, roles))}</td>" for roles in audit.GROUPS.values())
        rows.append(f'<tr><th scope="row">{_text(label)}</th>{numbers}{leaks}</tr>')
    costs = "".join(f'<th scope="col" class="n">{name}</th>' for name in (audit.score_name(records), "Time", "Bytes"))
    leaks = "".join(f'<th scope="col">{name}</th>' for name in audit.HEADERS)
    caption = (
        "Of each role’s attacks that succeeded, the one that got furthest from chance towards the highest score, which "
        "is 1. Bytes are of one silo in one round, up and down. Colluders are silos, or the server and silos, that put "
        "together what they saw; an outsider counts as one. Where attacks failed, a stronger one may exist."
    )
    head = f'<tr><th scope="col">Run</th>{costs}{leaks}</tr>'
    return _table(caption, head, [f"<tbody>{''.join(rows)}</tbody>"], "words defences")


def _leak(found: audit.Leak) -> str:
    if found.worst is None:
        return f'<span class="held">{_text(found.said)}</span>'
    return f'<strong class="leak">{_text(found.said)}</strong><br><code>{_text(found.worst.attack)}</code>'


def _audits(records: Sequence[RunRecord]) -> str:
    """A table for each audited run, and its pictures."""
    drawn = []
    for label, record in zip(labels(records), records, strict=True):
        if record.audit is not None:
            drawn += [_attacks(label, record, record.audit), _pictures(record)]
            drawn += [_not_run(record.audit), _confined(record.audit)]
    if not drawn:
        return ""
    drawn.append(
        '<p class="note">An attack succeeded where the whole 95 % interval of its score lies above chance. One that '
        "failed says that this attack failed and no more: a stronger one may exist. Roles are honest but curious: each "
        "follows the protocol, and keeps what it saw.</p>"
    )
    return "\n".join(filter(None, drawn))


def _attacks(label: str, record: RunRecord, audited: AuditRecord) -> str:
    bodies = []
    for role, some in audit.by_role(audited):
        heading = f'<tr class="group"><th colspan="6" scope="rowgroup">{_text(role)}</th></tr>'
        bodies.append(f"<tbody>{heading}{''.join(map(_attack, some))}</tbody>")
    if not bodies:
        return f"<p><strong>{_text(label)}</strong>: no attack came to a score on this run.</p>"
    numbers = "".join(f'<th scope="col" class="n">{name}</th>' for name in ("Score", "Chance", "95 %", "Seconds"))
    head = f'<tr><th scope="col">Attack, and what it used</th><th scope="col">What it came to</th>{numbers}</tr>'
    thorough = ", a thorough one" if audited.thorough else ""
    recorded = sum(1 <= number <= record.rounds for number in audited.views)  # without the release after the last
    caption = f"<strong>{_text(label)}</strong>: the audit{thorough}, of {recorded:,} of {record.rounds:,} rounds"
    if audited.background != TEST_ROWS:
        caption += f"; background knowledge is {_text(audited.background)}"
    return _table(caption, head, bodies, "words audit")


def _attack(one: Attacked) -> str:
    mark = f'<span class="verdict {audit.verdict(one)}">{audit.verdict(one)}</span>'
    name = f"<code>{_text(one.attack)}</code><br><small>{_text(audit.used(one))}</small>"
    said = f"{mark} {_text(one.sentence)}<br><small>Score: {_text(one.measure)}</small>"
    low, high = map(_figures, map(audit.figure, one.interval))
    numbers = (_figures(audit.figure(one.score)), _figures(audit.figure(one.chance)), f"{low} to {high}",
               _figures(f"{one.seconds:.1f}"))  # fmt: skip
    cells = "".join(f'<td class="n">{cell}</td>' for cell in numbers)
    return f'<tr><th scope="row">{name}</th><td>{said}</td>{cells}</tr>'


def _pictures(record: RunRecord) -> str:
    drawn, gone = [], []
    for attack, caption, images in audit.pictures(record):
        if not images:
            gone.append(f"{_text(attack)} ({_text(caption)})")
            continue
        true, found = images
        drawn.append(
            f'<figure class="pictures"><img src="{true}" alt="True rows">'
            f'<img src="{found}" alt="Rows as reconstructed">'
            f"<figcaption>{_text(attack)}: {_text(caption)}; true rows above, reconstructed below</figcaption></figure>"
        )
    told = f'<p class="note">Pictures that are gone; audit again to see them: {", ".join(gone)}.</p>' if gone else ""
    if not drawn:
        return told
    note = "These are rows of the silos: a page with them is for the silos’ own eyes and not to be handed on."
    return f'<p class="rows"><strong>{note}</strong></p><div class="figures">{"".join(drawn)}</div>{told}'


def _not_run(record: AuditRecord) -> str:
    if not record.not_run:
        return ""
    items = "".join(
        f"<li><code>{_text(one.attack)}</code> ({_text(audit.ROLES.get(one.role, one.role).lower())}): "
        f"{_text(one.because)}</li>"
        for one in record.not_run
    )
    return f'<div class="note not-run"><p>Not run, so that nothing is known of these:</p><ul>{items}</ul></div>'


def _confined(record: AuditRecord) -> str:
    return "" if record.confined_by == "kernel" else f'<p class="note">{_text(audit.CONFINED)}</p>'


def _privacy(records: Sequence[RunRecord]) -> str:
    """A table for each set of sentences: runs of one protocol mostly share theirs."""
    shared: dict[tuple[tuple[Statement, ...], tuple[str, ...]], list[str]] = {}
    for label, record in zip(labels(records), records, strict=True):
        shared.setdefault((privacy_statements(record), reading_notes(record)), []).append(label)
    tables = []
    for (statements, _), names in shared.items():
        bodies = []
        for role, some in groupby(statements, key=lambda statement: statement.role):
            said = list(some)
            first = f'<th scope="rowgroup" rowspan="{len(said)}">{role}</th>'
            lines = [f'<td>{_text(one.text)}</td><td class="evidence">{_text(one.evidence)}</td>' for one in said]
            bodies.append(f"<tbody><tr>{first}{'</tr><tr>'.join(lines)}</tr></tbody>")
        head = _head("Role", "What it sees or can work out", "Evidence")
        tables.append(_table(f"<strong>{_text(_and(names))}</strong>", head, bodies, "words privacy"))
    notes = dict.fromkeys(note for _, some in shared for note in some)
    return "\n".join([*tables, *(f'<p class="note">{_text(note)}</p>' for note in notes)])


def _settings(records: Sequence[RunRecord]) -> str:
    drawn = []
    for label, record in zip(labels(records), records, strict=True):
        groups: dict[str, Mapping[str, object]] = {"facts the run states": record.facts} if record.facts else {}
        groups |= {f"[{section}]": values for section, values in record.settings.items() if values}
        bodies = []
        for group, values in groups.items():
            rows = "".join(_row(_text(key), [_setting(value)]) for key, value in values.items())
            heading = f'<tr class="group"><th colspan="2" scope="rowgroup">{_text(group)}</th></tr>'
            bodies.append(f"<tbody>{heading}{rows}</tbody>")
        if bodies:
            table = _table(
                "Facts are the run's own statements, settings its run file as resolved.", "", bodies, "words keys"
            )
            run = f", run <code>{_text(record.run)}</code>" if record.run else ""
            drawn.append(f"<details><summary>{_text(label)}: {_text(record.name)}{run}</summary>{table}</details>")
    return "\n".join(drawn)


def _setting(value: object) -> str:
    if isinstance(value, float):
        return _figures(f"{value:g}")
    return _text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _again(records: Sequence[RunRecord]) -> str:
    programs = list(dict.fromkeys(program for record in records for program in record.versions))
    rows = [
        _row(_text(program), [_text(record.versions.get(program) or MISSING) for record in records], numbers=True)
        for program in programs
    ]
    head = _head("Program", *labels(records), numbers=True)
    folders = [shlex.quote(record.folder.name or ".") for record in records]
    commands = [
        f"moretta {'serve' if record.setting('engine', 'name') == 'flare' else 'train'} {folder}/run.toml "
        f"--out {folder}-again"
        for folder, record in zip(folders, records, strict=True)
    ]
    commands.append(f"moretta report {' '.join(folders)} --out report.html")
    return (
        _table("Versions that the runs recorded.", head, [f"<tbody>{''.join(rows)}</tbody>"])
        + "<p>A run folder keeps its run file, as resolved. From the directory that holds the folders:</p>"
        + f"<pre><code>{_text(chr(10).join(commands))}</code></pre>"
    )
