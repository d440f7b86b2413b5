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
under `Local` too. Nothing is hidden by these baselines themselves, but for what follows.

With `dp_noise` and `dp_clip` FedSGD is "DP-FL", differentially private SGD (Abadi et al., CCS 2016; `private` has the
silo's half, `accountant` the epsilon). What is claimed: all models of the run together are (epsilon, delta)-
differentially private for data that differ in one example, added or removed, at one silo.

- Towards whom: ``epsilon`` towards the server, as far as it sees sums only (under ``scheme = "none"`` it sees each
  upload, and each silo adds all of the noise), and whoever is given the models; ``epsilon_to_silos`` towards another
  silo, which can take its own share of the noise off. Silos that collude, with the server or each other, take off
  theirs. Shares are sized by the fewest silos whose sum may be revealed: raise ``min-survivors`` to the number of silos
  that will be there, and no more noise is added than is accounted for.
- What is public: batch size, noise, clip norm, delta, rounds, and the largest sampling rate of any silo, from which the
  number of rows of the smallest follows. A silo with more rows has a smaller epsilon of its own
  (`accountant.epsilon`). All rounds count for every silo, also where only a part of the silos takes part.
- What is not covered: the common means and deviations of the set-up, where inputs are standardised (the run's facts say
  so); how long a silo takes; and whatever else is measured on training rows.
- A resumed run plays rounds again. As long as the same silos are in their sums, the uploads are the same and say
  nothing new. Where others are lost than before, those rounds were revealed twice and are accounted for once.
"""
