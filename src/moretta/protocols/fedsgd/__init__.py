"""FedSGD, FedAvg, FedProx, and the baselines: local-only and centralised training (McMahan et al. 2017).

FedSGD, one round, K silos with N_k rows in their batches and N = sum N_k:

    server -> silos   W                                    the true model
    silo k            g_k = gradient of the mean loss on its batch
    silos -> server   sum_k N_k g_k / N                    through secure aggregation
    server            W <- optimizer step along that mean

In FedAvg each silo takes `local_epochs` epochs of its own SGD steps, and uploads W - W_k instead of g_k. FedProx (Li et
al., MLSys 2020) adds mu / 2 |w - W|^2 to the loss of each of those steps; with mu = 0 it is FedAvg, bit for bit.
Differs from the paper: FedProx averages a few drawn silos with equal weights, here all that take part by rows. There
silos stop at any gamma-inexact solution, here each takes the same number of epochs. Under `Local` a silo sends its loss
and its batch's number of rows each round, and its model at the end, for the comparison. `Centralised` is FedSGD of one
silo that holds all rows.

`claims` states who learns what. In short, of all but the baselines: every silo sees every iterate of the model. The
server sees the model, and through secure aggregation only sums over the silos, weighted by rows: of gradients or weight
changes, losses and running statistics. It also sees the sum's number of rows, and with class weights their mean weight.
Under noise it sees the noised sum alone. With ``scheme = "none"`` it sees each silo's upload; from a gradient inputs
can be reconstructed (Zhu et al., NeurIPS 2019). Of two silos, each computes the other's update from consecutive models
and its own. Where inputs are standardised, all learn the mean and deviation of each column over all silos
(`moretta.protocols.common.enrolment`), under `Local` too. Without noise only secure aggregation hides anything here.

With `dp_noise` and `dp_clip` FedSGD is "DP-FL", differentially private SGD (Abadi et al., CCS 2016). `private` has the
silo's half, `moretta.protocols.common.accountant` the epsilon. The claim: all models of the run together are (epsilon,
delta)-differentially private for data that differ in one unit, added or removed. The unit is one example of a silo, or
one group of its examples (`dp-unit`). Under FedAvg and FedProx it is one silo with all its examples.

- Towards whom: ``epsilon`` holds towards the server if it sees sums only (under ``scheme = "none"`` it sees each
  upload, and each silo adds all of the noise), and towards anyone with the models. ``epsilon_to_silos`` holds towards
  another silo, which can subtract its own share of the noise. Silos that collude, with the server or each other,
  subtract theirs: ``epsilon_with_noise_of_<k>`` holds where the noise of k silos is unknown, for a few k.
- Assumption: the noise of ``noise_silos`` silos is in every opened sum. Shares are sized by that number: the threshold
  of the secure sum, or `min-survivors` if that is more; no cohort under noise may be smaller
  (`moretta.secure_aggregation.settings.SecureAggregation.sharing_noise`). More silos in a sum add more noise than the
  accountant assumes: with 10 where eight are the fewest, sqrt(10 / 8) times the deviation. A silo that adds less or no
  noise is not detected.
- Public are batch size, noise, clip norm, delta, releases, and the largest sampling rate of any silo, which reveals the
  number of rows of the smallest. A silo with more rows, or that was away, has a smaller epsilon of its own, which its
  site states (`client.Client.privacy`). The run's own statement counts all releases for every silo.
- Not covered are the common means and deviations of the set-up, where inputs are standardised (the run's facts mention
  them), a silo's computing time, and other measurements of training rows.
- What counts (``releases``): a take of a round, once the opening of its sum is requested, whether or not it opens. A
  take is one draw of the round's rows and noise (`moretta.contract.messages.Stamp`); its attempts repeat them. A
  repetition does not count, as when a resumed run repeats rounds among the same silos
  (`moretta.protocols.common.releases`). The server's count is on disk before it asks. Two sums of one take over
  different silos would have the same noise, and their difference that of few silos; counting does not solve that, so
  silos help to open only one of them.
- Two runs of one id, which a server that names the id can start at will, have independent noises, as these follow from
  all settings too (`private`). Their epsilons add up.
"""
