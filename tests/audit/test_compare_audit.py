"""Variants of a protocol in one comparison, and what an audit adds to it."""

from __future__ import annotations

import pytest
from recorded import RUN

from moretta.config import run_files
from moretta.errors import ParameterError
from moretta.run import comparison


@pytest.fixture
def path(tmp_path):
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def test_variants_are_named_by_what_was_written(path):
    run_file = run_files.load(path)
    written = ["fedsgd dp-noise=1.0 dp-clip=2", "pbpfl partitions=all", "pbpfl partitions=2 loss=cross-entropy"]
    found = comparison.variants(path, [], ["fedsgd", "pbpfl"], written)
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


def test_a_variant_has_keys_of_any_section_and_a_short_name(path):
    written = [
        "model.hidden=[8] protocol.learning-rate=0.5",
        "pbpfl protocol.rho=2 rho=2.5 data.batch-size=3 run.dtype=float64",
        "protocol.rho=2 protocol.name=pbpfl",
        "secure-aggregation.scheme=none",
    ]
    found = comparison.variants(path, ["run.rounds=4"], [], written)
    assert list(found) == [
        "hidden-8-learning-rate-0.5",
        "pbpfl-rho-2-rho-2.5-batch-size-3-dtype-float64",
        "rho-2-name-pbpfl",
        "scheme-none",
    ]
    first, second, third, fourth = found.values()
    assert (first.model.arguments, first.protocol.learning_rate, first.protocol.name) == (
        {"hidden": [8]},
        0.5,
        "fedsgd",
    )
    assert (second.protocol.rho, second.data.batch_size, second.run.dtype) == (2.5, 3, "float64")
    assert (third.protocol.name, third.protocol.rho, third.protocol.learning_rate) == ("pbpfl", 2.0, 0.1)
    assert fourth.secure_aggregation.scheme == "none"
    assert {one.run.rounds for one in (first, second, third, fourth)} == {4}  # what --set says holds in all


@pytest.mark.parametrize(("text", "says"), [
    ("pbpfl partitons=2", r"\[protocol\] partitons is not known; did you mean partitions\?"),
    ("pbpf partitions=2", r'expected .*, got "pbpf"; did you mean "pbpfl"\?'),
    ("cgd partitions=2", r"\[protocol\] partitions is a key of pbpfl, not of cgd"),
    ("pbpfl partitions", r'expected KEY=VALUE after the protocol, got "partitions"'),
    ("pbpfl partitions=two", r"\[protocol\] partitions: expected a whole number"),
    ("fedsgd dp-noise=1", r"dp-clip"),
    ("", r"expected PROTOCOL KEY=VALUE"),
    ('pbpfl "', r"expected PROTOCOL KEY=VALUE"),
    ("modle.hidden=[8]", r"the section \[modle\] is not known; did you mean \[model\]\?"),
    ("protocol.learning-rat=1", r"\[protocol\] learning-rat is not known; did you mean learning-rate\?"),
    ("data.bach-size=1", r"\[data\] bach-size is not known; did you mean batch-size\?"),
    ("batch-size=1", r"\[protocol\] batch-size is not known; it is a key of \[data\]"),
    ("protocol.name=pbpf", r'\[protocol\] name: expected .*, got "pbpf"; did you mean "pbpfl"\?'),
    ("run.seed=3", r"run.seed follows from --seeds; remove it here"),
    ("run.out=../x", r"run.out follows from --out; remove it here"),
    ("run.=3", r"expected section.key=value"),
    ("run.rounds.more=3", r"rounds is a value, not a section"),
])  # fmt: skip
def test_what_is_wrong_with_a_variant_is_one_sentence(path, text, says):
    with pytest.raises(ParameterError, match=says) as caught:
        comparison.variants(path, [], [], [text])
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f'--variant "{text}": ')


def test_a_variant_twice_is_refused(path):
    with pytest.raises(ParameterError, match="another run is called pbpfl-partitions-2 already"):
        comparison.variants(path, [], [], ["pbpfl partitions=2", "pbpfl partitions=2"])


def test_an_audit_needs_views_and_takes_the_first_rounds_and_the_last(path, tmp_path):
    run_file = run_files.load(path)
    assert comparison.recording(run_file).run.record_views is True  # as it says
    (tmp_path / "run.toml").write_text(RUN.replace("record-views = true", "").replace("rounds = 6", "rounds = 300"))
    assert comparison.recording(run_files.load(tmp_path / "run.toml")).run.record_views == (*range(1, 21), 300)
    (tmp_path / "run.toml").write_text(RUN.replace("record-views = true", ""))
    assert comparison.recording(run_files.load(tmp_path / "run.toml")).run.record_views == (1, 2, 3, 4, 5, 6)
