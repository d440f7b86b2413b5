"""FedSAM: federated averaging whose silos look for flat minima (Qu et al., ICML 2022).

One round, K silos with N_k rows and N = sum N_k; F_k is the mean loss of silo k:

    server -> silos   W                                    the true model
    silo k            W_k: epochs of SGD from W, each step from w along
                      the gradient of F_k at w + rho g / |g|, g that at w
    silos -> server   sum_k N_k (W - W_k) / N              through secure aggregation
    server            W <- W less that mean

With rho = 0 it is FedAvg, bit for bit.

Differs from the paper: there a few silos are drawn each round and their models averaged alike; here all that take part
are, by rows.

Who learns what: `claims` says it, and it is as under federated averaging. Every silo sees every iterate of the model.
The server sees the model and only the weighted sum of differences; with ``scheme = "none"`` each silo's.
"""
