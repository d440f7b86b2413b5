"""Several protocols on one run file, from the same seed, and how far their weights end apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moretta.assembly import federation_of
from moretta.config import PROTOCOLS, RunFile
from moretta.errors import ParameterError
from moretta.evaluation import largest_relative_difference
from moretta.protocols.training import Training
from moretta.report import read_run
from moretta.run_folder import read_model

REFERENCE = "fedsgd"
MODEL = "model.safetensors"


def variants(run_file: RunFile, protocols: Sequence[str]) -> dict[str, RunFile]:
    """Return the run file once for each protocol: its own settings for its own, the shared ones for the others.

    Raises `moretta.errors.ParameterError` for a protocol that is not known or named twice.
    """
    shared = {
        name: getattr(run_file.protocol, name)
        for name in run_file.protocol.model_fields_set & set(Training.model_fields)
    }
    found: dict[str, RunFile] = {}
    for name in protocols:
        if name not in PROTOCOLS:
            raise ParameterError(f"--protocols {name}: expected some of {', '.join(PROTOCOLS)}")
        if name in found:
            raise ParameterError(f"--protocols names {name} twice")
        own = run_file.protocol if name == run_file.protocol.name else PROTOCOLS[name](**shared)
        found[name] = run_file.model_copy(update={"protocol": own})
    return found


def rehearse(run_files: Sequence[RunFile]) -> None:
    """Raise what any of the runs would raise before its first round, while none has begun."""
    for run_file in run_files:
        federation_of(run_file, None).rehearse(run_file.run.rounds, run_file.run.seed)


def refuse_existing(folders: Sequence[Path]) -> None:
    """Raise `moretta.errors.ParameterError` if any of the folders has something in it, before a run begins."""
    for folder in folders:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ParameterError(f"{folder} exists and is not empty; name another folder by --out")


def weight_differences(folders: Sequence[Path]) -> dict[str, float]:
    """Return the largest relative difference of each run's weights from FedSGD's, where both are there.

    By protocol, or by run folder where several are of one protocol; what they differ from is the first run of FedSGD.
    Raises `moretta.errors.ParameterError` for a folder that holds no finished run.
    """
    protocols = [read_run(folder).protocol for folder in folders]
    if REFERENCE not in protocols:
        return {}
    first = protocols.index(REFERENCE)
    reference = read_model(folders[first] / MODEL)
    differences: dict[str, float] = {}
    for number, (name, folder) in enumerate(zip(protocols, folders, strict=True)):
        if number != first and (folder / MODEL).exists() and name != "cgd":  # whose file is no model but D
            ours = read_model(folder / MODEL)
            if {key: value.shape for key, value in ours.items()} == {key: v.shape for key, v in reference.items()}:
                label = name if protocols.count(name) == 1 else str(folder)
                differences[label] = largest_relative_difference(ours, reference)
    return differences
