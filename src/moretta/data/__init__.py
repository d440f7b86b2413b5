"""Data: from a run file's `[data]` section to what each silo holds. Needs no torch.

    load(source, ...)          -> Dataset       sources.py (tables: table.py, image sets: images.py and office_home.py,
                                                splits: split.py)
    into_domains(dataset, ...) -> Dataset       domains.py: one image source made into several domains
    distribute(dataset, ...)   -> Distributed   partition.py: rows to silos, absent values filled by each owner
                                                grid.py: rows and columns to participants
    partition(y, silos, how)   -> row numbers per silo

The arrays are defined in `dataset.py`, their rules in `checks.py`. Everything seeded uses numpy's PCG64 and is the same
on every machine; nothing here reads a pickle. scikit-learn is needed only for the sets that come with it, `wdbc` and
`digits`, and Pillow only for `office-home`.
"""

from moretta.data.checks import Task, as_features, as_targets, check_finite, check_fit, class_of
from moretta.data.dataset import Dataset, Missing, SiloData
from moretta.data.domains import DOMAINS, into_domains
from moretta.data.partition import Distributed, distribute, partition, silo_names
from moretta.data.sources import BUILT_IN, load
from moretta.data.table import Encoding, fill_missing, read_table

__all__ = [
    "BUILT_IN",
    "DOMAINS",
    "Dataset",
    "Distributed",
    "Encoding",
    "Missing",
    "SiloData",
    "Task",
    "as_features",
    "as_targets",
    "check_finite",
    "check_fit",
    "class_of",
    "distribute",
    "fill_missing",
    "into_domains",
    "load",
    "partition",
    "read_table",
    "silo_names",
]
