"""Parquet and Arrow files as tables of pyarrow, read only if their declared content fits into memory.

Both may be small on a disk and large in memory: pages and buffers are compressed, and a long word that a dictionary has
once occurs in millions of rows. Words of Parquet therefore stay in their dictionaries until `decoded_size` is checked.
"""

import struct
from pathlib import Path
from typing import Any

from moretta.contract.memory import check_memory


def read_parquet(content: bytes, path: Path) -> Any:
    """Return a Parquet file's table.

    Args:
        path: The file's name in errors.

    Raises:
        ParameterError: The table would take more memory than is free. pyarrow raises its own errors.
    """
    import pyarrow
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
    schema, groups = file.schema_arrow, map(file.metadata.row_group, range(file.metadata.num_row_groups))
    check_memory(sum(map(_group_size, groups)), f"{path} takes")
    types = pyarrow.types
    words = [column.name for column in schema if types.is_string(column.type) or types.is_large_string(column.type)]
    return pyarrow.parquet.read_table(pyarrow.BufferReader(content), read_dictionary=words)


def read_arrow(content: bytes, path: Path) -> Any:
    """Return an Arrow file's table. Raises as `read_parquet`, and `struct.error` for a truncated message."""
    import pyarrow
    import pyarrow.feather

    if not content.startswith(b"ARROW1\0\0"):  # of Feather's first version, which compresses nothing
        return pyarrow.feather.read_table(pyarrow.BufferReader(content))
    stream = pyarrow.py_buffer(content)[8:]  # after the magic a file is a stream, then a list of its places
    messages = pyarrow.ipc.MessageReader.open_stream(stream)
    check_memory(sum(map(_unpacked_size, messages)), f"{path} takes")
    return pyarrow.ipc.open_stream(stream).read_all()


def _group_size(group: Any) -> int:
    """Return a row group's declared bytes, and 16 for each number: runs of equal ones take no room in a file.

    The rows are the group's own, by which pyarrow reads; the file's sum of them may differ. A list has many numbers per
    row.
    """
    columns = map(group.column, range(group.num_columns))
    return int(group.total_byte_size + 16 * sum(max(group.num_rows, column.num_values) for column in columns))


def decoded_size(chunks: Any) -> int:
    """Return the bytes of a column's words once each row has its own; 0 for other columns."""
    import pyarrow
    import pyarrow.compute as compute

    kind, types, size = chunks.type, pyarrow.types, 0
    if types.is_string(kind) or types.is_large_string(kind):
        return int(chunks.nbytes)
    for chunk in chunks.chunks if types.is_dictionary(kind) else ():
        if types.is_string(kind.value_type) or types.is_large_string(kind.value_type):
            lengths = compute.cast(compute.binary_length(chunk.dictionary), pyarrow.int64())
            size += compute.sum(lengths.take(chunk.indices)).as_py() or 0
    return size


def _unpacked_size(message: Any) -> int:
    """Return the bytes that compressed buffers of a message declare; 0 where none is compressed.

    Source: Message.fbs of the Arrow format: field 2 of Message is its header; of RecordBatch 2 are buffers, each an
    offset and a length, and 3 the compression. A compressed buffer begins with its own length, int64.
    """
    data, body = memoryview(message.metadata), message.body

    def field(table: int, number: int) -> int:
        """Return the place of a field of a flatbuffers table, 0 without it."""
        fields = table - _int("i", data, table)
        known = 4 + 2 * number < _int("H", data, fields)
        offset = _int("H", data, fields + 4 + 2 * number) if known else 0
        return table + offset if offset else 0

    def follow(place: int) -> int:
        return place + _int("I", data, place)

    if message.type not in ("record batch", "dictionary") or body is None:
        return 0
    batch = follow(field(_int("I", data, 0), 2))
    if message.type == "dictionary":
        batch = follow(field(batch, 1))
    if not field(batch, 3):
        return 0
    buffers, size, packed = follow(field(batch, 2)), 0, memoryview(body)
    for number in range(_int("I", data, buffers)):
        offset, length = struct.unpack_from("<qq", data, buffers + 4 + 16 * number)
        size += max(_int("q", packed, offset), 0) if length >= 8 else 0  # -1: uncompressed
    return size


def _int(kind: str, data: memoryview, place: int) -> int:
    if place < 0:  # counts from the end
        raise struct.error("a place before the message")
    return int(struct.unpack_from(f"<{kind}", data, place)[0])
