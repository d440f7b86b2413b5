"""An append-only file of lines: what a silo must not forget, even if it goes back to an earlier checkpoint."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moretta.engines.files import make_folder, sync
from moretta.errors import ParameterError, PeerError
from moretta.secure_aggregation.one_sum import HelpedSums

BOOT = Path("/proc/sys/kernel/random/boot_id")


class KeptLines:
    """Whole lines of a file with mode 0600, which is made with its folder by the first of them.

    forces: whether a line that asks for it is forced to the disk, with all before it. This is not needed where one
    machine plays all roles: what a loss of power could reveal is on that machine anyway.
    """

    def __init__(self, path: Path, *, forces: bool) -> None:
        self._path, self._forces = path, forces

    def read(self) -> list[str]:
        """Return the lines. Half a line at the end, left by a killed process, is removed from the file."""
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(self._path, whole)
        return data[:whole].decode(errors="replace").splitlines()

    def keep(self, line: str, force: bool) -> None:
        """Add a line. It is with the operating system when this returns, so that a killed process has it."""
        made = not self._path.exists()
        if made:
            make_folder(self._path.parent, 0o700)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(descriptor, line.encode() + b"\n")
            if force and self._forces:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if made and self._forces:
            sync(self._path.parent)


@dataclass(frozen=True)
class HelpedFile:
    """Where a silo keeps what it has helped to open; opened once, by whoever plays the silo.

    forces: as of `KeptLines`. over_runs, apart, repeats, fewest: as of `HelpedSums`. It travels as JSON to a process of
    the silo's own.
    """

    path: str
    forces: bool = False
    over_runs: bool = False
    apart: int = 1
    repeats: bool = False
    fewest: int = 1

    @cached_property
    def opened(self) -> HelpedSums:
        """Return what the file keeps, and keep more in it. Raises `moretta.errors.ParameterError` for a damaged one."""
        lines = KeptLines(Path(self.path), forces=self.forces)
        try:
            return HelpedSums(
                lines.read(),
                lines.keep,
                powered=powered_since(),
                over_runs=self.over_runs,
                apart=self.apart,
                repeats=self.repeats,
                fewest=self.fewest,
            )
        except (OSError, PeerError) as error:
            raise ParameterError(
                f"{self.path} is damaged ({error}); it says which sums this silo has helped to open, so bring back a "
                "copy of it, or take part in new runs alone, in another folder"
            ) from None


def powered_since() -> str:
    """Return a name for the time since this machine was started; a constant on machines that do not tell."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
