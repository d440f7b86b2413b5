"""What FedSGD, FedAvg, local and centralised training show to attacks that fit several protocols."""
