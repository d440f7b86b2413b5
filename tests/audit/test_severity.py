"""Every attack has a name for people and says what harm it does."""

from __future__ import annotations

import re

from moretta.audit.auditor import all_attacks
from moretta.protocols.common import severity


def test_every_attack_has_a_title_and_a_severity():
    attacks = all_attacks()
    titles = [attack.title for attack in attacks]
    assert len(attacks) > 30
    assert len(set(titles)) == len(titles)
    assert {attack.severity for attack in attacks} == set(severity.SEVERITIES)
    for title in titles:
        assert re.fullmatch(r"[a-z]+s [^.]{15,90}", title), title  # a verb first, no full stop
        assert not re.search(r"gradient|softmax|ROC|LiRA|lemma|gamma|tensor|logit", title, re.IGNORECASE), title


def test_every_severity_is_said_and_explained_the_gravest_first():
    assert severity.SEVERITIES == ("rows", "labels", "members", "protocol")
    assert list(severity.EFFECTS) == list(severity.MEANING) == list(severity.SEVERITIES)
