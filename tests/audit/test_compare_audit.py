"""Variants of a protocol in one comparison, and what an audit adds to it."""

from __future__ import annotations

import pytest
from recorded import RUN

from moretta.config import run_files
from moretta.errors import ParameterError
from moretta.run import comparison


@pytest.fixture
def run_file(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    return run_files.load(tmp_path / "run.toml")


def test_variants_are_named_by_what_was_written(run_file):
    written = ["fedsgd dp-noise=1.0 dp-clip=2", "pbpfl partitions=all", "pbpfl partitions=2 loss=cross-entropy"]
    found = comparison.variants(run_file, ["fedsgd", "pbpfl"], written)
    assert list(found) == [
        "fedsgd", "pbpfl", "fedsgd-dp-noise-1.0-dp-clip-2", "pbpfl-partitions-all",
        "pbpfl-partitions-2-loss-cross-entropy",
    ]  # fmt: skip
    noisy, whole, both = (found[name].protocol for name in list(found)[2:])
    assert (noisy.dp_noise, noisy.dp_clip) == (1.0, 2.0)
    assert whole.partitions == 10  # the digits
    assert (both.partitions, both.loss) == (2, "cross-entropy")
    assert {one.protocol.learning_rate for one in found.values()} == {0.1}
    assert found["fedsgd"].protocol == run_file.protocol


@pytest.mark.parametrize(("text", "says"), [
    ("pbpfl partitons=2", r"\[protocol\] partitons is not known; did you mean partitions\?"),
    ("pbpf partitions=2", r'expected .*, got "pbpf"; did you mean "pbpfl"\?'),
    ("cgd partitions=2", r"\[protocol\] partitions is a key of pbpfl, not of cgd"),
    ("pbpfl partitions", r'expected KEY=VALUE after the protocol, got "partitions"'),
    ("pbpfl partitions=two", r"\[protocol\] partitions: expected a whole number"),
    ("fedsgd dp-noise=1", r"dp-clip"),
    ("", r"expected PROTOCOL KEY=VALUE"),
    ('pbpfl "', r"expected PROTOCOL KEY=VALUE"),
])  # fmt: skip
def test_what_is_wrong_with_a_variant_is_one_sentence(run_file, text, says):
    with pytest.raises(ParameterError, match=says) as caught:
        comparison.variants(run_file, [], [text])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f'--variant "{text}": ')


def test_a_variant_twice_is_refused(run_file):
    with pytest.raises(ParameterError, match="another run is called pbpfl-partitions-2 already"):
        comparison.variants(run_file, [], ["pbpfl partitions=2", "pbpfl partitions=2"])


def test_an_audit_needs_views_and_takes_the_first_rounds_and_the_last(run_file, tmp_path):
    assert comparison.recording(run_file).run.record_views is True  # as it says
    (tmp_path / "run.toml").write_text(RUN.replace("record-views = true", "").replace("rounds = 6", "rounds = 300"))
    assert comparison.recording(run_files.load(tmp_path / "run.toml")).run.record_views == (*range(1, 21), 300)
    (tmp_path / "run.toml").write_text(RUN.replace("record-views = true", ""))
    assert comparison.recording(run_files.load(tmp_path / "run.toml")).run.record_views == (1, 2, 3, 4, 5, 6)
