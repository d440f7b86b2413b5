"""Exposure of FedSGD, FedAvg, FedProx, local and centralised training to attacks that fit several protocols."""
