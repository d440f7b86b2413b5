"""The registry's entries of FedSGD, FedAvg, FedProx and the two baselines whose training has no secure sum."""

from dataclasses import replace

from moretta.protocols.common.entry import Entry

HERE = "moretta.protocols.fedsgd"

FEDSGD = Entry(
    "fedsgd",
    "FedSGD",
    f"{HERE}.params:FedSGD",
    f"{HERE}.roles:build",
    messages=f"{HERE}.messages",
    claims=f"{HERE}.claims",
    leaves=f"{HERE}.roles:left",
    shows_model=True,
)
FEDAVG = replace(FEDSGD, name="fedavg", label="FedAvg", settings=f"{HERE}.params:FedAvg")
FEDPROX = replace(FEDAVG, name="fedprox", label="FedProx", settings=f"{HERE}.params:FedProx")
LOCAL = replace(
    FEDSGD,
    name="local",
    label="Local only",
    settings=f"{HERE}.params:Local",
    roles=f"{HERE}.roles:build_local",
    baseline=True,
    summed=False,
    shows_model=False,
    many_machines=False,
)
CENTRALISED = replace(
    LOCAL,
    name="centralised",
    label="Centralised",
    settings=f"{HERE}.params:Centralised",
    roles=f"{HERE}.roles:build_centralised",
    pooled=True,
    grids=True,
)

ENTRIES = (FEDSGD, FEDAVG, FEDPROX, LOCAL, CENTRALISED)
