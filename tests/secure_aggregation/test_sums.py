"""Both schemes, whole: what they give, and what a misbehaving silo costs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sum_driver import ASKED, NOW, Silo, Train, play, whole_sum

from moretta.contract.messages import Message
from moretta.contract.roles import Missing, Reason
from moretta.errors import MisuseError, ParameterError, RangeError
from moretta.secure_aggregation.plain import PlainUpload
from moretta.secure_aggregation.schemes import SCHEMES, aggregator, contributor
from moretta.secure_aggregation.sums import Sum

WAYS = [("none", 64), ("pairwise", 64), ("pairwise", 32), ("additive-shares", 32)]
RECOVERING = ["pairwise", "none"]  # which sum those who are left


def silos(scheme: str, bits: int, count: int = 4) -> dict[str, Silo]:
    rng = np.random.default_rng(count)
    return {
        f"s{k}": Silo(
            scheme, f"s{k}", bits, {"w": rng.normal(size=(2, 3)).astype(np.float32), "loss": rng.normal()}, 3 * k + 1
        )
        for k in range(count)
    }


def expected(silos: dict[str, Silo], name: str) -> np.ndarray:
    weights = [silo.weight for silo in silos.values()]
    return np.average([silo.tensors[name].astype(np.float64) for silo in silos.values()], axis=0, weights=weights)


@pytest.mark.parametrize(("scheme", "bits"), WAYS)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_a_sum_is_the_weighted_mean_to_its_stated_step(scheme: str, bits: int, count: int) -> None:
    cohort = silos(scheme, bits, count)
    total = whole_sum(cohort, scheme, bits)
    assert isinstance(total, Sum)
    assert total.weight == sum(silo.weight for silo in cohort.values())
    assert (max(total.steps.values()) == 0.0) == (scheme == "none")
    for name, mean in total.means.items():
        assert mean.dtype == np.float64
        assert mean.shape == cohort["s0"].tensors[name].shape
        assert np.abs(mean - expected(cohort, name)).max() <= total.steps[name] + 1e-15  # float64's own rounding


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 10**6)), min_size=2, max_size=6), st.sampled_from(WAYS))
def test_any_values_and_weights(rows: list[tuple[float, int]], way: tuple[str, int]) -> None:
    cohort = {f"s{k}": Silo(*(way[0], f"s{k}", way[1]), {"x": x}, weight) for k, (x, weight) in enumerate(rows)}
    total = whole_sum(cohort, *way, limit=10.0)
    assert isinstance(total, Sum)
    assert abs(float(total.means["x"]) - float(expected(cohort, "x"))) <= total.steps["x"] + 1e-13


def test_one_plain_silo_gets_its_own_numbers_bit_for_bit() -> None:
    values = np.array([0.1, -0.0, 1e-310, 3e38, -7.7])
    total = whole_sum({"only": Silo("none", "only", 64, {"w": values}, 17)}, "none")
    assert isinstance(total, Sum)
    assert total.means["w"].tobytes() == values.tobytes()


def broken(scheme: str, silo: Silo) -> dict[str, tuple[Callable[[Message], Any], Reason]]:
    def other_shape(asked: Train) -> Message:
        good = silo(asked)
        wrong = {**good.tensors, "w": good.tensors["w"].T.copy()}
        return replace(good, tensors=wrong)

    def other_names(asked: Train) -> Message:
        good = silo(asked)
        return replace(good, tensors={"w": good.tensors["w"]})

    def other_kind(asked: Train) -> Message:
        if scheme == "none":
            return PlainUpload(stamp=asked.stamp, tensors=silo(asked).tensors, weight=10**6, asked=bytes(32))
        good = silo(asked)
        small = {name: array.astype(np.uint32) for name, array in good.tensors.items()}
        return replace(good, tensors=small, weight=np.array(1, dtype=np.uint32))

    def raises(asked: Train) -> Message:
        raise RangeError("`w`: too large")

    return {
        "junk": (lambda asked: b"\x00junk", Reason.MALFORMED),
        "another message": (lambda asked: asked, Reason.MALFORMED),
        "other shape": (other_shape, Reason.MALFORMED),
        "other names": (other_names, Reason.MALFORMED),
        "other kind": (other_kind, Reason.MALFORMED),
        "raises": (raises, Reason.REFUSED),
    }


@pytest.mark.parametrize("scheme", RECOVERING)
@pytest.mark.parametrize("how", ["junk", "another message", "other shape", "other names", "other kind", "raises"])
def test_a_misbehaving_silo_costs_itself_the_round(scheme: str, how: str) -> None:
    cohort = silos(scheme, 64)
    answer, reason = broken(scheme, cohort["s2"])[how]
    missing: dict[str, Missing] = {}
    total = whole_sum(cohort, scheme, replaced={"s2": answer}, missing=missing)
    assert {name: why.reason for name, why in missing.items()} == {"s2": reason}
    rest = {name: silo for name, silo in cohort.items() if name != "s2"}
    again = whole_sum({name: silo for name, silo in silos(scheme, 64).items() if name in rest}, scheme)  # and alone
    for result in (total, again):
        assert isinstance(result, Sum)
        assert list(result.silos) == sorted(rest)
        assert result.weight == sum(silo.weight for silo in rest.values())
        for name, mean in result.means.items():
            assert np.abs(mean - expected(rest, name)).max() <= result.steps[name] + 1e-15


@pytest.mark.parametrize("scheme", RECOVERING)
def test_a_value_that_is_not_finite_is_not_sent(scheme: str) -> None:
    cohort = silos(scheme, 64)
    cohort["s1"].tensors["w"] = np.full((2, 3), np.inf)
    missing: dict[str, Missing] = {}
    total = whole_sum(cohort, scheme, missing=missing)
    assert isinstance(total, Sum)
    assert list(total.silos) == ["s0", "s2", "s3"]
    assert "`w`: expected finite numbers" in missing["s1"].detail


@pytest.mark.parametrize("scheme", SCHEMES)
def test_misuse(scheme: str) -> None:
    cohort = silos(scheme, 64)
    server = aggregator(scheme)
    assert server.scheme == scheme
    assert play(server.setup(NOW, list(cohort)), cohort) is None
    assert list(server.cohort) == list(cohort)
    wanted = server.want({"w": (2, 3)}, {"w": 1.0}, 100)
    with pytest.raises(MisuseError, match="does not carry the encoding"):
        play(server.sum(Train(stamp=NOW, encoding={"w": 99}), wanted), cohort)
    with pytest.raises(ParameterError, match="at least 1"):
        cohort["s0"].contributor.upload(NOW, {"w": np.ones((2, 3))}, 0, wanted.fraction_bits, asked=ASKED)


def test_unknown_schemes_are_named() -> None:
    for make in (lambda: aggregator("shamir"), lambda: contributor("shamir", "a")):
        with pytest.raises(
            ParameterError, match='scheme = "shamir" is unknown; expected one of pairwise, additive-shares, none'
        ):
            make()
    with pytest.raises(ParameterError, match="ring-bits = 48"):
        aggregator("pairwise", 48)


def test_received_tensors_are_never_written_to() -> None:
    for scheme in SCHEMES:
        cohort = silos(scheme, 64)
        for silo in cohort.values():
            for array in silo.tensors.values():
                array.flags.writeable = False
        assert isinstance(whole_sum(cohort, scheme), Sum)


def test_no_torch_is_needed() -> None:
    code = """
        import sys
        sys.modules["torch"] = sys.modules["sklearn"] = None
        import moretta, moretta.contract.codec, moretta.secure_aggregation.schemes
        sys.path.insert(0, {here!r})
        from sum_driver import Silo, whole_sum
        total = whole_sum({{name: Silo("pairwise", name, 64, {{"w": [2.0]}}) for name in "ab"}}, "pairwise")
        assert total.means["w"][0] == 2.0 and total.weight == 2
    """
    code = textwrap.dedent(code).format(here=str(__file__).rsplit("/", 1)[0])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
