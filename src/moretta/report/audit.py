"""The results of audits, as tables: one run's attacks by severity, and runs side by side with the worst of each role.

Attacks measure different things. A role's worst attack is the successful one whose score is furthest above chance
(`moretta.report.folder.Attacked.advantage`), and it is named. A role is not safe because all attacks on it failed.
"""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from safetensors.numpy import load

from moretta.contract.wording import enumerated
from moretta.engines.files import read_file
from moretta.errors import ParameterError
from moretta.protocols.common.claims import NAMES
from moretta.protocols.common.severity import EFFECTS, MEANING, SEVERITIES
from moretta.report.folder import Attacked, AuditRecord, NotRun, RunRecord
from moretta.report.table import ends, figure, human_bytes, human_seconds, labels, plain

ROLES: Mapping[str, str] = {role: f"{name[0].upper()}{name[1:]}" for role, name in NAMES.items()}
"""Roles in the order of a page: the audit's names, and the page's."""

GROUPS: Mapping[str, Sequence[str]] = {
    "server": ("server",),
    "silo": ("silo",),
    "others": ("silos together", "server and silos", "outsider"),
}
"""The roles that share a column where runs are side by side."""

CONFINED = (
    "Only Python confined the attackers, because this machine's kernel has no Landlock. That stops mistakes and "
    "curiosity, but not malicious code."
)
"""The note on an audit whose attackers the kernel did not confine."""

HEADERS = ("Leak to the server", "Leak to a silo", "Leak to colluders or outsiders")


@dataclass(frozen=True)
class Leak:
    """The result of some roles' attacks.

    Attributes:
        audited: Whether there was an audit.
        tried: The number of attacks that ended.
        worst: The worst success; None without one.
    """

    audited: bool
    tried: int = 0
    succeeded: int = 0
    worst: Attacked | None = None

    @property
    def summary(self) -> str:
        """The same in a few words."""
        if self.worst is not None:
            return f"{figure(self.worst.score)} ({ends(self.worst)})"
        if not self.audited:
            return "not audited"
        if not self.tried:
            return "no attack tried"
        return f"no attack succeeded, of {self.tried}; not shown safe"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON content."""
        worst = self.worst
        named = None if worst is None else {"attack": worst.attack, "score": worst.score, "chance": worst.chance}
        return {"tried": self.tried, "succeeded": self.succeeded, "worst": named}


def leak(audit: AuditRecord | None, roles: Sequence[str]) -> Leak:
    """Return the result of these roles' attacks."""
    if audit is None:
        return Leak(False)
    tried = [attack for attack in audit.attacks if attack.role in roles]
    succeeded = [attack for attack in tried if attack.succeeded]
    return Leak(True, len(tried), len(succeeded), max(succeeded, key=lambda attack: attack.advantage, default=None))


def by_severity(audit: AuditRecord) -> Iterable[tuple[str, str, Sequence[Attacked]]]:
    """Yield each kind of tried attacks, the gravest first: its name, its meaning, and its attacks.

    In a kind, successful attacks come first, by their advantage.
    """
    for severity in SEVERITIES:
        attacks = [attack for attack in audit.attacks if attack.severity == severity]
        attacks.sort(key=lambda attack: (not attack.succeeded, -attack.advantage))
        if attacks:
            yield f"{EFFECTS[severity][0].upper()}{EFFECTS[severity][1:]}", MEANING[severity], attacks


def who_does(attack: Attacked | NotRun) -> str:
    """Return who does what in an attack, for people."""
    attacker = "A group of silos" if attack.role == "silos together" else ROLES.get(attack.role, attack.role)
    return f"{attacker} {attack.title}"


def interval(attack: Attacked) -> str:
    """Return the 95 % interval of a score, marked as no evidence if it includes every score."""
    low, high = map(figure, attack.interval)
    return f"{low} to {high}{', no evidence' * (attack.ended == 'no evidence')}"


def switched_off(attacks_by_key: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for each setting that prevents attacks of an audit. attacks_by_key: their names, by key."""
    return [
        f"{key} prevents {len(names)} {'attack' if len(names) == 1 else 'attacks'} of an audit: {enumerated(names)}."
        for key, names in attacks_by_key.items()
    ]


def used(attack: Attacked) -> str:
    """Return the attack's view and knowledge, in words."""
    return f"{attack.view}; {'knows nothing else' if attack.knowledge == 'nothing' else f'knows {attack.knowledge}'}"


def side_by_side(records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return scores, costs and leaks, an object a run, as JSON content."""
    return [
        {
            "run": label,
            "folder": str(record.folder),
            "accuracy": record.test.accuracy,
            "mse": record.test.mse,
            "seconds": record.seconds["total"],
            "bytes_per_silo_per_round": _bytes(record),
            "audited": record.audit is not None,
            **{group: leak(record.audit, roles).to_json() for group, roles in GROUPS.items()},
        }
        for label, record in zip(labels(records), records, strict=True)
    ]


def costs(record: RunRecord) -> tuple[str, str, str]:
    """Return a run's score on its test rows, its seconds, and its bytes per silo and round, as text."""
    test = record.test
    score = plain(test.mse if test.accuracy is None else test.accuracy)
    return score, human_seconds(record.seconds["total"]), human_bytes(_bytes(record))


def score_name(records: Sequence[RunRecord]) -> str:
    """Return the name of these runs' score, usually of one task."""
    names = dict.fromkeys("MSE" if record.test.accuracy is None else "Accuracy" for record in records)
    return " or ".join(names)


def leaks_table(records: Sequence[RunRecord]) -> Table:
    """Return runs for a terminal, one below the other: the scores, costs and leaks of each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("Leak", overflow="fold")
    table.add_column("Score", justify="right")
    table.add_column("Of the attack that got furthest", overflow="fold")
    for label, record in zip(labels(records), records, strict=True):
        score, seconds, sent = costs(record)
        table.add_row(Text(label, style="bold"))
        table.add_row("", "", Text(f"{score_name([record])} {score}, {seconds}, {sent} a round", style="dim"))
        for header, roles in zip(HEADERS, GROUPS.values(), strict=True):
            outcome = leak(record.audit, roles)
            name, worst = Text(f"  {header.removeprefix('Leak ')}"), outcome.worst
            if worst is None:
                table.add_row(name, "", Text(outcome.summary, style="dim"))
            else:
                row = Text.assemble((who_does(worst), "bold"), (f" ({worst.attack}; {ends(worst)})", "dim"))
                table.add_row(name, Text(figure(worst.score)), row)
    return table


def audit_lines(audit: AuditRecord) -> Group:
    """Return the attacks on one run for a terminal, by severity: what each does, its figures, and their meaning."""
    lines: list[RenderableType] = []
    for name, _, attacks in by_severity(audit):
        lines.append(Text(name, style="bold underline"))
        for attack in attacks:
            mark = Text(f" {attack.ended} ", style="bold reverse" if attack.succeeded else "dim")
            heading = Text.assemble((who_does(attack), "bold"), " ", (f"({attack.attack})", "dim"), " ", mark)
            numbers = (
                f"Score {figure(attack.score)} (95 %: {interval(attack)}): {ends(attack)}. {attack.seconds:.1f} s."
            )
            lines += [Padding(heading, (0, 0, 0, 2)), Padding(Text(attack.sentence), (0, 0, 0, 4))]
            lines.append(Padding(Text(numbers), (0, 0, 0, 4)))
            lines.append(Padding(Text(f"Score: {attack.measure}. Used: {used(attack)}.", style="dim"), (0, 0, 0, 4)))
    if not lines:
        lines.append(Text("no attack gave a score on this run"))
    lines += map(Text, switched_off(audit.switched_off))
    lines += [Text(f"{who_does(attack)} ({attack.attack}): not run, as {attack.because}") for attack in audit.not_run]
    if audit.confined_by != "kernel":
        lines.append(Text(CONFINED, style="dim"))
    return Group(*lines)


def pictures(record: RunRecord) -> Iterable[tuple[str, str, Sequence[str]]]:
    """Yield an audit's pictures: the attack's action, the caption, and PNG data URIs of true and reconstructed images.

    Pictures of a missing file have no images.

    Raises:
        ParameterError: A file holds no pictures.
    """
    for attack in () if record.audit is None else record.audit.attacks:
        for picture in attack.pictures:
            file = record.folder / picture.file
            if not file.exists():
                yield who_does(attack), picture.caption, ()
                continue
            true, recovered = _images(record.folder, picture.file)
            scale = float(true.min(initial=0.0)), float(true.max(initial=0.0))
            yield who_does(attack), picture.caption, [_sheet(images, scale) for images in (true, recovered)]


def rounds_recorded(record: RunRecord) -> int:
    """Return how many training rounds the audit has views of, without those recorded after the last one."""
    return 0 if record.audit is None else sum(1 <= number <= record.rounds for number in record.audit.views)


def _bytes(record: RunRecord) -> float:
    return record.traffic.up_per_silo_per_round + record.traffic.down_per_silo_per_round


def _images(folder: Path, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the true and the reconstructed images of a file, [n, C, H, W]."""
    file = folder / name
    try:
        held = load(read_file(folder, name))
        true, recovered = (np.asarray(held[name], dtype=np.float64) for name in ("true", "found"))
    except (OSError, SafetensorError, KeyError) as error:
        raise ParameterError(f"{file} holds no pictures ({error}); audit the run again") from None
    if true.ndim != 4 or true.shape != recovered.shape or not true.size:
        raise ParameterError(f"{file}: expected as many reconstructed images as true ones; audit the run again")
    return true, recovered


def _sheet(images: NDArray[np.float64], scale: tuple[float, float]) -> str:
    """Return images side by side, a white pixel between them, as a PNG's data URI. scale: the black and white value."""
    from matplotlib.image import imsave

    count, channels, height, width = images.shape
    kept = images if channels == 3 else images[:, :1].repeat(3, axis=1)  # other images by their first channel
    low, high = scale
    levels = np.clip((np.nan_to_num(kept, nan=low) - low) / ((high - low) or 1.0), 0.0, 1.0)
    sheet = np.full((height, count * (width + 1) - 1, 3), 255, dtype=np.uint8)
    for number, image in enumerate(np.round(levels * 255).astype(np.uint8)):
        start = number * (width + 1)
        sheet[:, start : start + width] = image.transpose(1, 2, 0)
    stream = io.BytesIO()
    imsave(stream, sheet, format="png")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
