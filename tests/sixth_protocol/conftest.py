"""FedSAM is tried where `test_sixth_protocol` has put it into a copy of the package, and nowhere else."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("moretta.protocols.fedsam") else ["test_fedsam.py"]
