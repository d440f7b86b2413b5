"""FedSAM is tried where `test_sixth_protocol` has installed it, and nowhere else."""

from importlib.metadata import entry_points

collect_ignore = [] if entry_points(group="moretta.protocols", name="fedsam") else ["test_fedsam.py"]
