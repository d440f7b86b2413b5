import pytest

from moretta.report import privacy_statements, read_run
from moretta.report.privacy import UNTESTED, reading_notes

FORBIDDEN = ("encrypt", "semantically secure", "anonym", "cannot learn", "guarantee", "safe")


def said(record, role):
    return " ".join(one.text for one in privacy_statements(record) if one.role == role)


@pytest.mark.parametrize("protocol", ["pbpfl", "fedsgd", "fedavg", "local", "centralised", "cgd"])
def test_every_role_has_a_sentence_none_is_tested_none_promises_more_than_the_design(make_run, protocol):
    record = read_run(make_run(protocol))
    statements = privacy_statements(record)
    assert {one.role for one in statements} == {"Server", "A silo", "An eavesdropper"}
    assert all(one.evidence == UNTESTED for one in statements)
    text = " ".join([one.text for one in statements] + list(reading_notes(record))).lower()
    assert not [word for word in FORBIDDEN if word in text]


def test_pbpfl(make_run):
    record = read_run(make_run("pbpfl"))
    assert "only the ring sum (modulo 2⁶⁴)" in said(record, "Server")
    silo = said(record, "A silo")
    for words in (
        "parameter values are obfuscated",
        "scaling and permutation",
        "here m = 2",
        "least squares",
        "true function",
    ):
        assert words in silo
    assert "softmax" not in said(record, "Server") + silo
    settings = {"protocol": {"loss": "cross-entropy"}}
    record = read_run(make_run("pbpfl", folder="ce", settings=settings))
    assert "softmax of each sample" in said(record, "Server")
    assert "true softmax exactly" in said(record, "A silo")


def test_without_masks_the_server_sees_each_silo(make_run):
    for number, plain in enumerate(({"scheme": "none", "ring_bits": None}, None)):
        record = read_run(make_run("fedsgd", folder=str(number), secure_aggregation=plain))
        assert "gradient of each silo by itself" in said(record, "Server")
    record = read_run(make_run("fedsgd"))
    assert "only the ring sum" in said(record, "Server")
    assert "Receives the model itself" in said(record, "A silo")


def test_a_protocol_or_scheme_without_sentences_says_so(make_run):
    assert "no sentence about the protocol cgd" in said(read_run(make_run("cgd")), "Server")
    record = read_run(make_run("fedavg", secure_aggregation={"scheme": "additive-shares", "ring_bits": 64}))
    assert "no sentence about the aggregation scheme additive-shares" in said(record, "Server")
