"""Whatever list of operations a coalition draws, no honest silo's own upload follows from what it saw.

What is excepted, and true of the design (`docs/secure-aggregation.md`):

- The number of a round, of a job, and the model are the server's own words. One that asks for the same model under two
  rounds or jobs has the same uploads of silos whose rows are the same, and sums over sets of its choice. Lists in which
  it does are judged within each round of each job. Where silos set `apart`, any two sums over different sets are judged
  together too; more than two sets may still be chosen so that one silo is left, and sums over one set differ by a silo
  where the others' rows come again (`test_known_limit_batches_that_come_again`, `.._epochs_of_unequal_length`).
- Without a roster a server that hands out keys of its own is every other silo, so keys are swapped with one only.
- Sets with fewer than two honest silos: silos hold the floor of their sums themselves, and it is above the coalition.
- The scheme ``none`` hides nothing.
"""

from __future__ import annotations

from itertools import combinations

import exchange
import pytest
from equations import Equation
from hypothesis import HealthCheck, given, seed, settings
from judge import played
from operation_lists import Case, cases
from silos import PROTOCOLS, SCHEMES
from wiretap import leaks

EACH = [(protocol, scheme) for protocol in PROTOCOLS for scheme in SCHEMES]
IN_ALL, QUICK = 10_000, 240  # lists, over all protocols and schemes, in `make test-all` and in `make test`


@pytest.mark.parametrize(("protocol", "scheme"), EACH)
def test_no_list_tells_a_silo_s_own_upload(protocol: str, scheme: str) -> None:
    _search(protocol, scheme, QUICK // len(EACH))


@pytest.mark.slow
@pytest.mark.parametrize(("protocol", "scheme"), EACH)
def test_none_of_many_lists_tells_a_silo_s_own_upload(protocol: str, scheme: str) -> None:
    _search(protocol, scheme, -(-IN_ALL // len(EACH)))


def _search(protocol: str, scheme: str, examples: int) -> None:
    """Play so many lists, a third of which must come to a round's sum; fails with the shortest that tells something."""
    came_to_sums = list[bool]()

    @seed(EACH.index((protocol, scheme)))
    @settings(
        max_examples=examples, database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(case=cases(protocol, scheme))
    def search(case: Case) -> None:
        coalition = played(case.world, case.operations)
        tap, rows = coalition.tap, coalition.tap.rows()
        came_to_sums.append(any(number > 0 for row in rows for _, number in row.of))
        assert not leaks(rows, within_rounds=_is_excepted(case)), "the coalition has a silo's own upload"
        if case.world.apart > 1:
            pairs = (pair for pair in combinations(rows, 2) if _silos(pair[0]) != _silos(pair[1]))
            assert not any(map(leaks, pairs)), "two sums differ by a silo, for all that sets are apart"
        assert not exchange.silos_told(tap.sums()), "the coalition has a silo's own gradients of outputs"
        assert not exchange.predicted_twice(tap), "a silo predicted for two models in one round"
        assert not coalition.deceived, "a silo took a key of the server's for another silo's"

    search()
    assert sum(came_to_sums) > len(came_to_sums) / 3


def _silos(row: Equation) -> set[str]:
    return {unknown.silo for unknown in row.coefficients}  # type: ignore[attr-defined]


def _is_excepted(case: Case) -> bool:
    """Whether a model can be asked for under two rounds: by the list, or as CGD's moves only when it is told to."""
    return case.one_model or (case.world.protocol.startswith("cgd") and case.world.batch == 0)
