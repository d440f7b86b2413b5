"""Settings of how the silos' uploads are summed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import PositiveInt

from moretta.contract.settings import SITE, Fraction, Positive, Section, SettingRule, Words
from moretta.secure_aggregation.cohort import Participation, Rules
from moretta.secure_aggregation.graph import CORRUPT_RATE, DROPOUT_RATE
from moretta.secure_aggregation.identity import Roster


class SecureAggregation(Section):
    """Choose how the silos' uploads are summed.

    Args:
        scheme: "pairwise" masks; "additive-shares", which cost more and bear no dropouts; or "none": the server sees
            each upload.
        ring_bits: the size of the exact integers in which sums are taken.
        limit: the largest absolute value of an upload's entries; None is 2^16 in 64 bits, 2^4 in 32. A larger limit
            leaves fewer bits behind the point.
        threshold: how many of a silo and its neighbours must remain for a sum to be opened; None is floor(2 n / 3) + 1
            where all n silos of a round are neighbours, else it follows from the two rates.
        degree: the number of neighbours with which a silo has masks, even. None is all others in cohorts of up to 50
            silos, and above that as few as the rates allow.
        corrupt_rate: the fraction of silos that may collude with the server.
        dropout_rate: the fraction of silos that may vanish in a round.
        min_survivors: the fewest silos with which a round may end; None is 2, or 1 under "none", and under dp-noise
            more: see `sharing_noise`.
        weights: "hidden": the server sees only the sum of the silos' weights; "public": it sees each silo's.
        roster: the file of the silos' public keys; None trusts the keys that the server relays.
        identity: the folder or file of each silo's own key, with "{silo}" in the place of the silo's name. Over "flare"
            each site names its own, so the run file has a roster alone.

    >>> SecureAggregation(scheme="pairwise", threshold=2).largest
    65536.0
    """

    RULES: ClassVar[tuple[SettingRule, ...]] = (
        SettingRule(
            lambda s: s.threshold is not None and s.scheme != "pairwise",
            '{threshold} belongs to {scheme:="pairwise"}, not to "{scheme:v}"; remove it',
        ),
        SettingRule(
            lambda s: s.degree is not None and s.scheme != "pairwise",
            '{degree} belongs to {scheme:="pairwise"}, not to "{scheme:v}"; remove it',
        ),
        SettingRule(
            lambda s: s.identity is not None and s.roster is None,
            "{roster} and {identity} belong together: who the silos are, and where each one's own key is; give both "
            "or none",
        ),
        SettingRule(
            lambda s: s.roster is not None and s.scheme == "none",
            "{roster} has nothing to protect under {scheme:=}; remove it and {identity}",
        ),
        SettingRule(
            lambda s: s.scheme != "none" and s.min_survivors == 1,
            "{min_survivors:=} with {scheme:=}: the sum of one silo is its own data; give at least 2",
        ),
    )

    scheme: Literal["pairwise", "additive-shares", "none"] = "pairwise"
    ring_bits: Literal[64, 32] = 64
    limit: Positive | None = None
    threshold: PositiveInt | None = None
    degree: PositiveInt | None = None
    corrupt_rate: Fraction = CORRUPT_RATE
    dropout_rate: Fraction = DROPOUT_RATE
    min_survivors: PositiveInt | None = None
    weights: Literal["hidden", "public"] = "hidden"
    roster: Annotated[Path | None, SITE] = None
    identity: Annotated[Words | None, SITE] = None

    @property
    def largest(self) -> float:
        """The limit, or its default."""
        if self.limit is not None:
            return self.limit
        return 2.0**16 if self.ring_bits == 64 else 2.0**4

    @property
    def least(self) -> int:
        """The fewest silos at the end of a round, or the default."""
        return self.min_survivors or (1 if self.scheme == "none" else 2)

    def sharing_noise(self, silos: int, participation: float = 1.0) -> SecureAggregation:
        """Return these settings with `min_survivors` filled in for silos that add noise to their sum together.

        Each silo's noise is scaled to the fewest silos without which the scheme opens no sum. With masks that is the
        threshold of a round's silos, which then does not shrink with the cohort, or `min_survivors` if that is more.
        With additive shares it is `min_survivors`, or floor(2 / 3 of a round's silos) + 1. With one silo or without
        masks nothing changes.

        Args:
            silos: The number of all.
            participation: The fraction of them in a round.
        """
        if self.scheme == "none" or silos < 2:
            return self
        chosen = self.playing(silos, participation)
        fewest = self.fewest(chosen) if self.scheme == "pairwise" else self.min_survivors or chosen * 2 // 3 + 1
        return self.model_copy(update={"min_survivors": fewest})

    def playing(self, silos: int, participation: float) -> int:
        """Return the number of silos in a round. silos: all. participation: the fraction of them in a round."""
        return max(self.least, round(participation * silos))

    def fewest(self, chosen: int) -> int:
        """Return the fewest silos that open a sum under masks, of `chosen` silos in a round."""
        return max(self.least, self.rules(None).plan(chosen).threshold)

    def rules(self, roster: Roster | None, participation: Participation | None = None) -> Rules:
        """Return the rules that all roles share. roster: the file's content. participation: the silos of a round."""
        return Rules(
            participation=participation,
            degree=self.degree,
            threshold=self.threshold,
            corrupt_rate=self.corrupt_rate,
            dropout_rate=self.dropout_rate,
            min_survivors=self.least,
            limit=self.largest,
            public_weights=self.weights == "public",
            roster=roster,
        )

    def load_roster(self) -> Roster | None:
        """Return all public keys, if a roster is named. Raises `moretta.errors.ParameterError` for a bad file."""
        return None if self.roster is None else Roster.load(self.roster)

    def identity_of(self, silo: str) -> str:
        """Return the folder of a silo's identity; empty without one."""
        return (self.identity or "").replace("{silo}", silo)
