"""The plain baselines: FedSGD, FedAvg, local-only and centralised training (McMahan et al., AISTATS 2017).

FedSGD, one round, K silos with N_k rows in their batches and N = sum N_k:

    server -> silos   W                                    the true model
    silo k            g_k = gradient of the mean loss on its batch
    silos -> server   sum_k N_k g_k / N                    through secure aggregation
    server            W <- optimizer step along that mean

FedAvg lets each silo take `local_epochs` epochs of SGD steps of its own and sends W - W_k in the place of g_k.
Under `Local` a silo sends its loss and number of rows each round, and its model at the end, for the comparison;
`Centralised` is FedSGD of one silo that holds everybody's rows.

Who learns what stands in `claims`, as data that reports and pages are written from. In short: every silo sees every
iterate of the model. The server sees the model and, through secure aggregation, only the weighted sum; with ``scheme =
"none"`` it sees each silo's gradient, from which inputs can be reconstructed (Zhu et al., NeurIPS 2019). Of two silos,
each works out the other's update from consecutive models and its own. Where inputs are standardised, all learn the mean
and deviation of each column over all silos (`enrolment`), under `Local` too. Nothing is hidden by these baselines
themselves, but for what follows.

With `dp_noise` and `dp_clip` FedSGD is "DP-FL", differentially private SGD (Abadi et al., CCS 2016; `private` has the
silo's half, `accountant` the epsilon). What is claimed: all models of the run together are (epsilon, delta)-
differentially private for data that differ in one example, added or removed, at one silo.

- Towards whom: ``epsilon`` towards the server, as far as it sees sums only (under ``scheme = "none"`` it sees each
  upload, and each silo adds all of the noise), and whoever is given the models; ``epsilon_to_silos`` towards another
  silo, which can take its own share of the noise off. Silos that collude, with the server or each other, take off
  theirs: ``epsilon_with_noise_of_<k>`` is what is left where the noise of k silos is unknown, for a few k.
- What it assumes: that the noise of ``noise_silos`` silos is in every sum that is opened. Shares are sized by that: by
  the threshold of the secure sum, or `min-survivors` if that is more, which under noise no cohort may fall below
  (`moretta.secure_aggregation.settings.SecureAggregation.sharing_noise`). With more silos in a sum there is more noise
  than is accounted for, sqrt(10 / 8) times the deviation with ten where eight are the fewest. A silo that adds no
  noise, or less, is not caught.
- What is public: batch size, noise, clip norm, delta, releases, and the largest sampling rate of any silo, from which
  the number of rows of the smallest follows. A silo with more rows, or that was away, has a smaller epsilon of its own,
  which its site states (`client.Client.privacy`). All releases count for every silo in the run's own statement.
- What is not covered: the common means and deviations of the set-up, where inputs are standardised (the run's facts say
  so); how long a silo takes; and whatever else is measured on training rows.
- What counts (``releases``): a take of a round from when what opens its sum is asked for, whatever came of it; not the
  same again, as when a resumed run plays rounds over among the same silos (`moretta.protocols.common.releases`). The
  server's count is on disk before it asks. That two sums of one take over different silos have the same noise, and so
  differ by what few silos' noise hides, is no matter of counting: silos are to help to open one of them only.
- Two runs of one id, of which a server that names the id can make as many as it likes, have noises that are
  independent of each other, as these follow from all settings too (`private`). Their epsilons add up.
"""
