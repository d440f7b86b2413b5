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
