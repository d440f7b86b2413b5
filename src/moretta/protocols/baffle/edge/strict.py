"""The ONNX file that ONNX Runtime loads: rewritten with only the allowed fields and operations.

ONNX Runtime reads files that tensors name as external data, and runs operators of other domains than ONNX's own. Two
parsers may read one file differently. So this module encodes the content that it reads again, in protobuf's canonical
encoding, and those bytes are loaded: only allowed fields, operations and domains, and all tensors within the file. The
onnx package is not needed.

Only protobuf's canonical encoding is read: numbers of the fewest bytes, tags within 32 bits, values within 64. Other
readers truncate longer ones, each in its own way, and would see another field or value.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moretta.errors import ParameterError

FIXED = {1: 8, 5: 4}  # bytes of the wire types with one length
TEXT = 2  # the wire type of bytes, strings and messages
MOST = 1 << 31  # bytes of a field, beyond which protobuf reads none

Field = tuple[int, int, int, memoryview, memoryview]


def fields(data: memoryview) -> Iterator[Field]:
    """Yield a message's fields: number, wire type, value of a whole number, bytes of any other, and all its bytes.

    Raises:
        ParameterError: The bytes are no message in canonical encoding.
    """
    at = 0
    while at < len(data):
        start = at
        tag, at = _number(data, at)
        wire, value, part = tag & 7, 0, data[:0]
        if not 8 <= tag < 1 << 32:
            raise no_file()
        if wire == 0:
            value, at = _number(data, at)
        else:
            length, at = _number(data, at) if wire == TEXT else (FIXED.get(wire, MOST), at)
            part, at = data[at : at + length], at + length
            if at > len(data) or length >= MOST:
                raise no_file()
        yield tag >> 3, wire, value, part, data[start:at]


def numbers(data: memoryview) -> Iterator[int]:
    """Yield the whole numbers of a packed field. Raises as `fields`."""
    at = 0
    while at < len(data):
        value, at = _number(data, at)
        yield value


def written(number: int, value: int | bytes) -> bytes:
    """Return a field: of a whole number, or of bytes."""
    if isinstance(value, int):
        return octets(number << 3) + octets(value)
    return head(number, len(value)) + value


def head(number: int, length: int, wire: int = TEXT) -> bytes:
    """Return the bytes before `length` bytes of a field. wire: `TEXT`, or one of `FIXED`, which has no length."""
    return octets(number << 3 | wire) + (octets(length) if wire == TEXT else b"")


def octets(value: int) -> bytes:
    """Return the encoding of a whole number, 0 or more."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def no_file() -> ParameterError:
    """Return the error of bytes that are no ONNX file."""
    return ParameterError("these bytes are not an ONNX file; have the server export it again")


def _number(data: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at a place, and the place after it."""
    value = shift = 0
    while at < len(data) and shift < 70:
        octet = data[at]
        value |= (octet & 127) << shift
        at, shift = at + 1, shift + 7
        if octet < 128:
            if value >> 64 or (not octet and shift > 7):
                break
            return value, at
    raise no_file()


LARGEST = 1 << 29  # bytes of a file
DEEPEST = 24  # nested messages; a branch of an If takes three
DOMAINS = (b"", b"ai.onnx")
INT32, INT64, FLOAT, DOUBLE, BYTES = "int32", "int64", "float", "double", "bytes"
WIRES = {INT32: 0, INT64: 0, FLOAT: 5, DOUBLE: 1}  # the wire type of numbers; all others have `TEXT`
LEFT_OUT = ""  # a field that does not affect the computation


class Rule(NamedTuple):
    """The content of a field: numbers, bytes, or a message of `ALLOWED`; and whether it may be repeated."""

    holds: str
    many: bool = False


# Fields of onnx.proto by message and number; any other is refused.
ALLOWED: dict[str, dict[int, Rule]] = {
    "model": {
        1: Rule(INT64),  # ir_version
        2: Rule(LEFT_OUT),  # producer_name
        3: Rule(LEFT_OUT),  # producer_version
        4: Rule(LEFT_OUT),  # domain
        5: Rule(LEFT_OUT),  # model_version
        6: Rule(LEFT_OUT),  # doc_string
        7: Rule("graph"),
        8: Rule("opset", many=True),  # opset_import
        14: Rule("entry", many=True),  # metadata_props
    },
    "opset": {1: Rule(BYTES), 2: Rule(INT64)},  # domain, version
    "entry": {1: Rule(BYTES), 2: Rule(BYTES)},  # key, value
    "graph": {
        1: Rule("node", many=True),
        2: Rule(BYTES),  # name
        5: Rule("tensor", many=True),  # initializer
        10: Rule(LEFT_OUT),  # doc_string
        11: Rule("value", many=True),  # input
        12: Rule("value", many=True),  # output
        13: Rule("value", many=True),  # value_info
        16: Rule(LEFT_OUT, many=True),  # metadata_props
    },
    "node": {
        1: Rule(BYTES, many=True),  # input
        2: Rule(BYTES, many=True),  # output
        3: Rule(BYTES),  # name
        4: Rule(BYTES),  # op_type
        5: Rule("attribute", many=True),
        6: Rule(LEFT_OUT),  # doc_string
        7: Rule(BYTES),  # domain
        9: Rule(LEFT_OUT, many=True),  # metadata_props
    },
    "attribute": {
        1: Rule(BYTES),  # name
        2: Rule(FLOAT),
        3: Rule(INT64),
        4: Rule(BYTES),
        5: Rule("tensor"),
        6: Rule("graph"),
        7: Rule(FLOAT, many=True),
        8: Rule(INT64, many=True),
        9: Rule(BYTES, many=True),
        13: Rule(LEFT_OUT),  # doc_string
        20: Rule(INT32),  # type
    },
    "tensor": {
        1: Rule(INT64, many=True),  # dims
        2: Rule(INT32),  # data_type
        4: Rule(FLOAT, many=True),
        5: Rule(INT32, many=True),
        7: Rule(INT64, many=True),
        8: Rule(BYTES),  # name
        9: Rule(BYTES),  # raw_data
        10: Rule(DOUBLE, many=True),
        11: Rule(INT64, many=True),
        12: Rule(LEFT_OUT),  # doc_string
        16: Rule(LEFT_OUT, many=True),  # metadata_props
    },
    "value": {1: Rule(BYTES), 2: Rule("type"), 3: Rule(LEFT_OUT), 4: Rule(LEFT_OUT, many=True)},
    "type": {1: Rule("array"), 6: Rule(LEFT_OUT)},  # tensor_type, denotation
    "array": {1: Rule(INT32), 2: Rule("shape")},  # elem_type
    "shape": {1: Rule("dimension", many=True)},
    "dimension": {1: Rule(INT64), 2: Rule(BYTES), 3: Rule(LEFT_OUT)},  # dim_value, dim_param
}
OPERATION = 4  # the field of a node with its operation
# Reasons for fields that a reader should know by name.
REFUSED = {
    ("model", 20): "training steps",
    ("model", 25): "functions of its own",
    ("tensor", 13): "tensors in other files",
    ("tensor", 14): "tensors in other files",
}
# Operations of ONNX that compute tensors of numbers from such. Omitted are loops, random numbers, text, sequences and
# formats of images.
_OPERATIONS = (
    b"Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BitShift "
    b"BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast CastLike Ceil Celu Clip Compress Concat Constant ConstantOfShape "
    b"Conv ConvInteger ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Det Div DynamicQuantizeLinear "
    b"Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND Gelu Gemm "
    b"GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample GroupNormalization HardSigmoid "
    b"HardSwish Hardmax Identity If InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less "
    b"LessOrEqual Log LogSoftmax LpNormalization LpPool MatMul MatMulInteger Max MaxPool MaxUnpool Mean "
    b"MeanVarianceNormalization Min Mish Mod Mul Neg NonZero Not OneHot Or PRelu Pad Pow QLinearConv QLinearMatMul "
    b"QuantizeLinear RMSNormalization RNN Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax "
    b"ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RotaryEmbedding "
    b"Round ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh Size Slice Softmax Softplus Softsign "
    b"SpaceToDepth Split Sqrt Squeeze Sub Sum Swish Tan Tanh TensorScatter ThresholdedRelu Tile TopK Transpose Trilu "
    b"Unique Unsqueeze Where Xor"
)
OPERATIONS = frozenset(_OPERATIONS.split())

Pieces = list[bytes | memoryview]


def admitted(file: bytes) -> bytes:
    """Return an ONNX file rewritten, for `onnxruntime.InferenceSession`.

    Raises:
        ParameterError: the file is too large, is no canonical protobuf, or has a field, operation or domain that no
            file of `moretta.protocols.baffle.onnx_export` has; or the rewritten file reads otherwise.
    """
    if len(file) > LARGEST:
        raise ParameterError(f"expected an ONNX file of at most {LARGEST} bytes, got {len(file)}")
    pieces, _ = _again("model", memoryview(file), 0)
    rewritten = b"".join(pieces)
    read, _ = _again("model", memoryview(rewritten), 0)
    if b"".join(read) != rewritten:
        raise no_file()
    return rewritten


def _again(kind: str, data: memoryview, depth: int) -> tuple[Pieces, int]:
    """Return a message's allowed fields in their encoding, in pieces, and their number of bytes."""
    if depth > DEEPEST:
        raise ParameterError(f"this ONNX file has more than {DEEPEST} messages within each other; export it again")
    pieces, length, seen = Pieces(), 0, set[int]()
    for number, wire, value, part, _ in fields(data):
        rule = ALLOWED[kind].get(number)
        if rule is None:
            why = REFUSED.get((kind, number), f"a field {number} of {kind}")
            raise ParameterError(f"this ONNX file has {why}, which no edge client takes")
        if number in seen and not rule.many:  # readers differ in which one counts
            raise no_file()
        seen.add(number)
        if rule.holds == LEFT_OUT:
            continue
        new, size = _field(rule, number, wire, value, part, depth)
        _check(kind, number, part)
        pieces += new
        length += size
    if kind == "node" and OPERATION not in seen:
        raise no_file()
    return pieces, length


def _field(rule: Rule, number: int, wire: int, value: int, part: memoryview, depth: int) -> tuple[Pieces, int]:
    """Return a field's encoding and its number of bytes. Raises ParameterError for one of another kind."""
    if rule.holds in WIRES:
        new: Pieces = [_numbers(rule, number, wire, value, part)]
        return new, len(new[0])
    if wire != TEXT:
        raise no_file()
    inner, length = ([part], len(part)) if rule.holds == BYTES else _again(rule.holds, part, depth + 1)
    before = head(number, length)
    return [before, *inner], len(before) + length


def _numbers(rule: Rule, number: int, wire: int, value: int, part: memoryview) -> bytes:
    """Return the encoding of a field of numbers: alone, or packed."""
    own = WIRES[rule.holds]
    packed = wire == TEXT and rule.many
    if wire != own and not packed:
        raise no_file()
    if own:
        if len(part) % FIXED[own]:
            raise no_file()
        return head(number, len(part), wire) + bytes(part)
    values: Sequence[int] = list(numbers(part)) if packed else [value]
    if rule.holds == INT32 and any(number_read >> 31 and number_read >> 31 != (1 << 33) - 1 for number_read in values):
        raise no_file()  # a reader would cut it to 32 bits
    if not packed:
        return octets(number << 3) + octets(value)
    content = b"".join(map(octets, values))
    return head(number, len(content)) + content


def _check(kind: str, number: int, part: memoryview) -> None:
    """Raise ParameterError for a domain or an operation that is not allowed."""
    if (kind, number) in (("node", 7), ("opset", 1)) and bytes(part) not in DOMAINS:
        raise ParameterError(f"this ONNX file has operators of domain {bytes(part)!r:.60}; expected ONNX's own alone")
    if (kind, number) == ("node", OPERATION) and bytes(part) not in OPERATIONS:
        raise ParameterError(f"this ONNX file has the operation {bytes(part)!r:.60}, which no edge client runs")
