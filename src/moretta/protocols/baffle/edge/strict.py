"""Checks of an ONNX file before ONNX Runtime sees it, without the onnx package.

ONNX Runtime reads files that tensors name as external data, relative to the process's folder, and runs operators of
domains other than ONNX's own. No graph of `moretta.protocols.baffle.onnx_export` has either, nor functions of its own.
"""

from __future__ import annotations

from moretta.errors import ParameterError
from moretta.protocols.baffle.edge.protobuf import TEXT, fields

LARGEST = 1 << 29  # bytes of a file
DOMAINS = (b"", b"ai.onnx")
# Field numbers of onnx.proto: fields that hold other messages, by what they hold, and fields that are refused. An
# attribute's type is ignored: all of its fields are walked.
HOLDS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "opset"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "opset": {},
    "tensor": {},
}
DOMAIN_FIELDS = {("node", 7), ("opset", 1)}
REFUSED = {
    ("model", 20): "training steps",
    ("model", 25): "functions of its own",
    ("tensor", 13): "tensors in other files",
}
DATA_LOCATION = ("tensor", 14)  # 0: in the file itself


def check(graph: bytes) -> None:
    """Raise ParameterError for an ONNX file that is too large, is no protobuf, or has what none of ours has."""
    if len(graph) > LARGEST:
        raise ParameterError(f"expected an ONNX file of at most {LARGEST} bytes, got {len(graph)}")
    left = [("model", memoryview(graph))]
    while left:  # not by recursion, whose depth the file would choose
        kind, data = left.pop()
        for number, wire, value, part, _ in fields(data):
            field = kind, number
            if field in REFUSED or (field == DATA_LOCATION and value):
                why = REFUSED.get(field, REFUSED["tensor", 13])
                raise ParameterError(f"this ONNX file has {why}, which no edge client takes")
            if field in DOMAIN_FIELDS and bytes(part) not in DOMAINS:
                raise ParameterError(
                    f"this ONNX file has operators of domain {bytes(part)!r:.60}; expected none but ONNX's own"
                )
            if wire == TEXT and number in HOLDS[kind]:
                left.append((HOLDS[kind][number], part))
