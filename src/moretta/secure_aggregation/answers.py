"""Answers that a silo gives once: what each follows from is recorded before it leaves, and nothing else is answered.

Some questions may be asked once, because two answers together tell what neither does: two z of one take (CGD), the
comparison with two lists of ids, the sums of squares around two centers, the scores of two models. A restart and an
earlier checkpoint do not change that, and neither do another session, attempt, cohort or group. The same question again
is answered again: its answer tells nothing new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from moretta.secure_aggregation.keystream import encode_parts

DIGEST = 16  # bytes of each digest that are kept
LINE = "answer"  # how a line of the record begins

Key = tuple[str, str]  # run, and what is answered


class Answers:
    """What one silo has answered, by run.

    Args:
        keep: takes a line, and returns when the disk has it; it raises where that is not possible.
        over_runs: whether what follows from rows alone is answered once in all runs together, or once in each.
    """

    def __init__(self, keep: Callable[[str], None] = lambda line: None, *, over_runs: bool = False) -> None:
        self._keep, self._over_runs = keep, over_runs
        self._held = dict[Key, str]()

    def hold(self, run: str, name: str, *content: int | str | bytes, lasting: bool = False) -> bool:
        """Record that an answer is about to be given, unless another one was.

        Args:
            run: the id in the question's stamp.
            name: of the answer, one for all questions of which one is answered.
            content: what the answer follows from.
            lasting: whether it follows from rows alone, and so would tell something new in another run.

        Returns:
            Whether this is the first such answer, or the same again. Nothing is recorded otherwise.
        """
        key = ("" if lasting and self._over_runs else run), name
        digest = hashlib.sha256(encode_parts(*content)).digest()[:DIGEST].hex()
        if key not in self._held:
            self._keep(json.dumps([LINE, *key, digest]))
            self._held[key] = digest
        return self._held[key] == digest

    def names(self, run: str) -> list[str]:
        """Return the names of what was answered in a run, its groups, or all runs together; "" for any run."""
        return [name for held, name in self._held if not run or held.rpartition("/")[2] in (run, "")]

    def read(self, run: object, name: object, digest: object) -> None:
        """Take up a line that was kept. Raises ValueError for anything else."""
        if not (isinstance(run, str) and isinstance(name, str) and isinstance(digest, str)):
            raise ValueError("expected the record of an answer")
        self._held[run, name] = digest

    def __repr__(self) -> str:
        return f"Answers({len(self._held)} answers)"
