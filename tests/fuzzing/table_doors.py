"""Tables and arrays of rows."""

from __future__ import annotations

import io
import zipfile
from functools import cache

import numpy as np
from door import BETWEEN, Door, written
from settings_doors import FULL

from moretta.data.images.sets import read_npz
from moretta.data.tables import doubts, inference, rows, schema
from moretta.data.tables.files import Format, read_columns
from moretta.errors import ParameterError

FORMS = (Format(), Format(separator=";", decimal=","), Format(encoding="latin-1", absent=("n/a", "-9")))


def open_csv(data: bytes) -> None:
    """A table by every way that reads it: its columns, a proposed schema, and rows by a schema."""
    form = FORMS[data[0] % len(FORMS)] if data else FORMS[0]
    read(read_columns(written("t.csv", data[1:]), form), form)


def read(columns: dict[str, np.ndarray], form: Format) -> None:
    known = set(columns) == set(full().columns)
    rows.encode(columns, full() if known else inference.infer(columns, doubts.Hints(), "t", form), "t", form)


@cache
def full() -> schema.Schema:
    return schema.load(written("full.toml", FULL))


TABLE = "patient;age;ward;seen;stage;died\np1;60;A;31.12.2021;II;yes\np2;<5;;;IV;no\np3;3,5;B;01.01.2020;I;no\n"


def csvs() -> list[bytes]:
    quoted = TABLE.replace(";", ",").replace("3,5", '"3.5"').replace("p1", '"p ""1"""')
    other = b"\x00a,b,day,y\n1,x,2020-01-01,0\n2,y,2021-01-01,1\n3,x,2020-01-01,1\n"
    return [
        other,
        b"\x01" + TABLE.encode(),
        b"\x00" + quoted.encode(),
        b"\x02" + quoted.replace("p2", "pé").encode("latin-1"),
    ]


def open_parquet(data: bytes) -> None:
    read(read_columns(written("t.parquet", data)), Format())


def open_arrow(data: bytes) -> None:
    read(read_columns(written("t.arrow", data)), Format())


def table() -> object:
    import pyarrow

    return pyarrow.table(
        {
            "patient": ["p1", "p2"],
            "age": pyarrow.array([60.0, None]),
            "ward": pyarrow.array(["A", None]).dictionary_encode(),
            "seen": pyarrow.array([18500, None], pyarrow.date32()),
            "stage": ["I", "II"],
            "died": ["no", "yes"],
        }
    )


def parquets() -> list[bytes]:
    from pyarrow import parquet

    found = list[bytes]()
    for compression in ("none", "snappy"):
        stream = io.BytesIO()
        parquet.write_table(table(), stream, compression=compression, store_schema=False)
        found.append(stream.getvalue())
    return found


def arrows() -> list[bytes]:
    from pyarrow import feather

    stream = io.BytesIO()
    feather.write_feather(table(), stream, compression="uncompressed")
    return [stream.getvalue()]


def open_npz(data: bytes) -> None:
    """Arrays x and y and another file, which the door puts into an archive; an archive as it is, too."""
    if not data.startswith(b"PK"):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for name, part in zip(("x.npy", "y.npy", "z"), data.split(BETWEEN), strict=False):
                archive.writestr(name, part)
        data = stream.getvalue()
    if not all(isinstance(one, np.ndarray) for one in read_npz(written("rows.npz", data)).values()):
        raise AssertionError("what is read is not all arrays")


def npzs() -> list[bytes]:
    def saved(array: np.ndarray) -> bytes:
        stream = io.BytesIO()
        np.save(stream, array, allow_pickle=False)
        return stream.getvalue()

    x, y = np.ones((2, 3), np.float32), np.array([0, 1])
    stream = io.BytesIO()
    np.savez(stream, x=x)
    return [saved(x) + BETWEEN + saved(y), stream.getvalue()]


DOORS = {
    "csv": Door(open_csv, ParameterError, csvs),
    "parquet": Door(open_parquet, ParameterError, parquets),
    "arrow": Door(open_arrow, ParameterError, arrows),
    "npz": Door(open_npz, ParameterError, npzs, share=3),
}
