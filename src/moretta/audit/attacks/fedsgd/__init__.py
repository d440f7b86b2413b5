"""What FedSGD, FedAvg, FedProx, local and centralised training show to attacks that fit several protocols."""
