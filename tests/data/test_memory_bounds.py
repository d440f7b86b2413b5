"""Small files that are large in memory: an error that names the file, before this process is stopped."""

from __future__ import annotations

import gzip
import importlib.util
import io
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from moretta.contract import memory
from moretta.data.images.sets import read_npz
from moretta.data.tables.files import read_columns
from moretta.errors import ParameterError

GIB = 1 << 30
LOAD = """
import resource, sys
from pathlib import Path
import numpy, PIL.Image, pyarrow.parquet, pyarrow.feather, pyarrow.csv
from moretta.data.images.pixels import ImageForm, read_image
from moretta.data.datasets import load
from moretta.data.settings import Data
from moretta.errors import ParameterError

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
path = Path(sys.argv[1])
try:
    if path.suffix in (".png", ".dcm") or path.name.endswith(".nii.gz"):
        read_image(path.read_bytes(), str(path), ImageForm())
    else:
        load(Data(source=path.name, target=None if path.suffix == ".npz" else "y"), seed=0, base=path.parent)
except ParameterError as error:
    print(error)
    sys.exit(2)
"""


def repeated_words(path: Path) -> None:
    """A dictionary has one word of 64 KiB, which stands in 200,000 rows: 12 GiB."""
    word, rows = "x" * (1 << 16), 200_000
    cells = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([word]))
    parquet.write_table(pa.table({"name": cells, "y": np.arange(rows) % 2}), path)


def run_lengths(path: Path) -> None:
    """240 million equal numbers in pages of a few bytes."""
    names, rows = [f"c{number}" for number in range(24)], 10_000_000
    one = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array([1.5]))
    table = pa.table({**dict.fromkeys(names, one), "y": one})
    parquet.write_table(table, path, row_group_size=rows)


def compressed_buffers(path: Path) -> None:
    numbers = np.zeros(40_000_000)
    columns = {**{f"c{number}": numbers for number in range(8)}, "y": numbers}
    feather.write_feather(pa.table(columns), str(path), compression="zstd")


def compressed_csv(path: Path) -> None:
    lines = gzip.compress(b"1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1\n" * 1_000_000)  # members follow one another
    path.write_bytes(gzip.compress(b"a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,y\n") + 50 * lines)


def many_cells(path: Path) -> None:
    """What unpacks to 60 MB, and has 30 million words."""
    lines = gzip.compress(b"1,1,1,1,1\n" * 1_000_000)
    path.write_bytes(gzip.compress(b"a,b,c,d,y\n") + 6 * lines)


def compressed_arrays(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack, pack.open("x.npy", "w", force_zip64=True) as file:
        header, repeats = io.BytesIO(), 3 * GIB >> 24
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (3 * GIB // 4,)})
        packer: Any = file
        packed, zeros = packer._compressor, bytes(1 << 24)
        blocks = packed.compress(zeros) + packed.flush(zlib.Z_FULL_FLUSH)
        file.write(header.getvalue())
        packer._fileobj.write(packed.flush(zlib.Z_FULL_FLUSH) + repeats * blocks)  # not packed again each time
        packer._compress_size += repeats * len(blocks)
        packer._file_size += repeats << 24


def declared_array(path: Path) -> None:
    """A header declares 4 TiB, and nothing is behind it."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(path, "w") as pack:
        pack.writestr("x.npy", header.getvalue() + bytes(100))


def many_pixels(path: Path) -> None:
    """A PNG of 9,000 x 9,000 pixels of colour, which is within the bound on pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress((b"\0" + bytes(27_000)) * 9_000, 9)
    head = struct.pack(">IIBBBBB", 9_000, 9_000, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))


def deflated_dicom(path: Path) -> None:
    packed = zlib.compressobj(9, zlib.DEFLATED, -15)
    # (0008,0000) UN with 3 GiB of zeros: a value that is skipped, and unpacked before that.
    body = packed.compress(struct.pack("<HH2sHI", 0x0009, 0x0010, b"OB", 0, 3 * GIB))
    body += packed.flush(zlib.Z_FULL_FLUSH)
    zeros = packed.compress(bytes(1 << 24)) + packed.flush(zlib.Z_FULL_FLUSH)
    body += (3 * GIB >> 24) * zeros + packed.flush()
    syntax = b"1.2.840.10008.1.2.1.99"
    meta = struct.pack("<HH2sH", 2, 0x10, b"UI", len(syntax)) + syntax
    path.write_bytes(bytes(128) + b"DICM" + struct.pack("<HH2sHI", 2, 0, b"UL", 4, len(meta)) + meta + body)


def compressed_volume(path: Path) -> None:
    """A volume in a .nii.gz file of 3 GiB of zeros."""
    packed = zlib.compressobj(9, zlib.DEFLATED, 31)
    head = struct.pack("<i", 348) + bytes(340) + b"n+1\0" + bytes(4)
    body = packed.compress(head) + packed.flush(zlib.Z_FULL_FLUSH)
    zeros = packed.compress(bytes(1 << 24)) + packed.flush(zlib.Z_FULL_FLUSH)
    path.write_bytes(body + (3 * GIB >> 24) * zeros)


BOMBS: dict[str, tuple[str, int, Callable[[Path], None]]] = {
    "a long word in a dictionary of Parquet": ("bomb.parquet", 1 << 20, repeated_words),
    "run lengths of Parquet": ("bomb.parquet", 1 << 20, run_lengths),
    "compressed buffers of Arrow": ("bomb.arrow", 1 << 20, compressed_buffers),
    "a compressed table": ("bomb.csv.gz", 4 << 20, compressed_csv),
    "many cells": ("bomb.csv.gz", 4 << 20, many_cells),
    "compressed arrays": ("bomb.npz", 4 << 20, compressed_arrays),
    "an array that is declared": ("bomb.npz", 1 << 10, declared_array),
    "pixels": ("bomb.png", 1 << 20, many_pixels),
    "a deflated DICOM file": ("bomb.dcm", 4 << 20, deflated_dicom),
}
if importlib.util.find_spec("nibabel") is not None:
    BOMBS["a compressed volume"] = ("bomb.nii.gz", 4 << 20, compressed_volume)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a bound on memory")
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_that_is_large_in_memory_is_refused_by_its_name(tmp_path: Path, bomb: str) -> None:
    name, most, make = BOMBS[bomb]
    make(tmp_path / name)
    assert (tmp_path / name).stat().st_size <= most
    ended = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / name)], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (2, ""), ended.stderr[-2000:]
    assert len(ended.stdout.splitlines()) == 1
    assert name in ended.stdout
    assert "GiB" in ended.stdout or "declares" in ended.stdout
    assert "use a smaller file" in ended.stdout or "save it again" in ended.stdout


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "parquet", "feather"])
def test_a_bound_refuses_what_is_above_it_and_nothing_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    path = tmp_path / f"table.{ending}"
    table = pa.table({"name": ["a", "bb", ""] * 1000, "x": np.arange(3000.0)})
    match ending:
        case "parquet":
            parquet.write_table(table, path)
        case "feather":
            feather.write_feather(table, str(path), compression="lz4")
        case _:
            text = "name,x\n" + "".join(f"{a.as_py()},{b.as_py()}\n" for a, b in zip(*table.columns, strict=True))
            path.write_bytes(gzip.compress(text.encode()) if ending == "csv.gz" else text.encode())
    monkeypatch.setattr(memory, "CHECKED_BYTES", 0)
    read = read_columns(path)
    assert read["name"].tolist() == ["a", "bb", ""] * 1000
    monkeypatch.setattr(memory, "free_memory", lambda: 100_000)
    with pytest.raises(ParameterError, match=rf"table.{ending} takes .* GiB of memory, and .* use a smaller file"):
        read_columns(path)


def test_arrays_are_read_as_they_were(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "x": np.arange(6, dtype=np.float32).reshape(2, 3),
        "y": np.array([1, 2]),
        "id": np.array(["a", "b"]),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "rows.npz", **arrays)
        for name, read in read_npz(tmp_path / "rows.npz").items():
            assert read.dtype == arrays[name].dtype
            np.testing.assert_array_equal(read, arrays[name])


def with_fewer_rows(path: Path) -> None:
    """A footer says 1 where the row group has 64 million rows, and 1 byte for the group."""
    rows = 64_000_000
    parquet.write_table(pa.table({"y": np.zeros(rows)}), path, compression="zstd", row_group_size=rows)
    group, content = parquet.read_metadata(path).row_group(0), path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    footer = content[start:-8]
    for number, times in ((rows, 1), (group.total_byte_size, -1)):
        written = _zigzag(number)
        footer = footer.replace(written, b"\x82" + b"\x80" * (len(written) - 2) + b"\x00", times)
    path.write_bytes(content[:start] + footer + content[-8:])
    assert parquet.read_metadata(path).num_rows == parquet.read_metadata(path).row_group(0).total_byte_size == 1


def one_long_list(path: Path) -> None:
    """One row has a list of 64 million equal numbers."""
    column = pa.ListArray.from_arrays([0, 64_000_000], pa.array(np.zeros(64_000_000, np.int8)))
    parquet.write_table(pa.table({"y": column}), path, compression="zstd")


def _zigzag(number: int) -> bytes:
    octets, rest = [], number << 1
    while rest > 127:
        octets.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*octets, rest])


@pytest.mark.parametrize("make", [with_fewer_rows, one_long_list])
def test_a_footer_is_not_taken_at_its_word_for_rows(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "table.parquet")
    monkeypatch.setattr(memory, "free_memory", lambda: 200 << 20)
    monkeypatch.setattr(parquet, "read_table", None)  # refused before anything is read
    with pytest.raises(ParameterError, match=r"table\.parquet takes .* of memory"):
        read_columns(tmp_path / "table.parquet")
