"""Memory for large messages in mapped files, which the system may move to the disk.

Uploads wait until the silos of the sum are known, and those of a large model are many times the model. They are in the
folder for temporary files (the variable TMPDIR; a file in a tmpfs saves no memory). A file has the mode 0600 and no
name, so it is removed however its process ends. A mapping holds its file open, so these are at most half of the files
that a process may have open.
"""

import dataclasses
import errno
import itertools
import logging
import math
import mmap
import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from moretta.contract.messages import Array, Message, Tensors

log = logging.getLogger("moretta")

LARGE = 1 << 20  # bytes; less stays in memory


def room(length: int) -> memoryview:
    """Return this many writable bytes, in a file if they are many and another file may be open."""
    if length < LARGE:
        return memoryview(bytearray(length))
    try:
        with tempfile.TemporaryFile() as file:  # the mapping keeps it open
            descriptor = file.fileno()
            if hasattr(os, "sysconf") and 2 * descriptor > os.sysconf("SC_OPEN_MAX") > 0:  # half is for other files
                raise OSError(errno.EMFILE, "half of the files that this process may open are open (ulimit -n)")
            _allocate(descriptor, length)
            return memoryview(mmap.mmap(descriptor, length))
    except OSError as error:
        log.warning("%d MiB are kept in memory and not in a file: %s", length >> 20, error)
        return memoryview(bytearray(length))


def empty(shape: Sequence[int] | int, dtype: DTypeLike) -> Array:
    """Return an array as `numpy.empty` does, in a file if it is large."""
    kind, shape = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
    return np.ndarray(shape, kind, buffer=room(math.prod(shape) * kind.itemsize))


def laid_down(message: Message) -> Message:
    """Return a message whose arrays are in a file, read-only, if it is large; else the message itself."""
    fields = {name: getattr(message, name) for name, kind in message.KINDS.items() if kind in (Array, Tensors)}
    lengths = list[int]()
    for value in fields.values():
        for array in (value,) if isinstance(value, np.ndarray) else value.values():
            lengths.append(-(-array.nbytes // 8) * 8)  # so that the next array is aligned
    if sum(lengths) < LARGE:
        return message
    memory, starts = room(sum(lengths)), itertools.accumulate(lengths, initial=0)

    def moved(array: Array) -> Array:
        place = np.ndarray(array.shape, array.dtype, buffer=memory, offset=next(starts))
        place[...] = array
        place.flags.writeable = False
        return place

    mapped: dict[str, Any] = {
        name: moved(value) if isinstance(value, np.ndarray) else {key: moved(array) for key, array in value.items()}
        for name, value in fields.items()
    }
    return dataclasses.replace(message, **mapped)


def _allocate(descriptor: int, length: int) -> None:
    """Give a file its length and its place on the disk now, because a full disk would later kill the process."""
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, length)
    else:
        os.truncate(descriptor, length)
