"""Data: from a run file's `[data]` section to what each silo holds. Needs no torch.

    read(source, expected, where) -> Rows          reading.py: the one reader, of tables/, images/ and arrays
    load(data, table, ...)        -> Split         datasets.py: rows of a run file, in three parts (split.py)
    into_domains(source, ...)     -> Split         domains.py: one image source turned into several domains
    distribute(source, ...)       -> Distributed   partition.py: rows to silos, in grids columns too
    partition(y, silos, how)      -> row numbers per silo

Rows and their rules are defined in `rows.py`, their owner in `silo.py`. All seeded choices use numpy's PCG64 and are
the same on every machine; nothing here reads a pickle.
"""
