"""The plain baselines: FedSGD, FedAvg, local-only and centralised training (McMahan et al., AISTATS 2017).

FedSGD, one round, K silos with N_k rows in their batches and N = sum N_k:

    server -> silos   W                                    the true model
    silo k            g_k = gradient of the mean loss on its batch
    silos -> server   sum_k N_k g_k / N                    through secure aggregation
    server            W <- optimizer step along that mean

FedAvg lets each silo take `local_epochs` epochs of SGD steps of its own and sends W - W_k in the place of g_k.
Under `Local` a silo sends its loss and number of rows each round, and its model at the end, for the comparison;
`Centralised` is FedSGD of one silo that holds everybody's rows.

Who learns what: every silo sees every iterate of the model. The server sees the model and, through secure
aggregation, only the weighted sum; with ``scheme = "none"`` it sees each silo's gradient, from which inputs can be
reconstructed (Zhu et al., NeurIPS 2019). Of two silos, each works out the other's update from consecutive models and
its own. Where inputs are standardised, all learn the mean and deviation of each column over all silos (`enrolment`),
under `Local` too. Nothing is hidden by these baselines themselves.
"""
