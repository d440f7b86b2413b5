"""Confined Gradient Descent (`cgd.txt`): each participant keeps a model of its own, and all take the same steps.

**Theory.** Participant l starts at w_l(1) = delta_l * Rand_l, its secret, and never shows any w_l(k). With g_l its mean
gradient over its n_l rows, all step by the weighted sum (Algorithm 1)::

    w_l(k+1) = w_l(k) - alpha_k  sum_j n_j g_j(w_j(k)) / sum_j n_j

so w_l(k) = w_l(1) + D(k), with one D for all. Only the sum leaves a participant, through secure aggregation.

A grid m = m_h x m_v has rows i of participants that hold different columns of the same samples (Algorithm 2, for
networks that begin with a linear layer). First-layer parts are summed over the holders of the same columns, upper
layers over those who have them. In the form ``joint`` a row has one model: its holders' z_ij = X_ij W1_ij are summed
inside the row for the head H_i, which has the labels and the layers above. In the form ``independent``, as printed,
each participant predicts from its own columns and needs the labels.

    aggregator A                                participants
      keys of all and of each group        <->    (`group_keys`, `moretta.secure_aggregation`)
      rows of a row compared               <->    counts, and a digest of ids under the row's key
      Forward                              -->    P_ij: X_ij W1_ij, under the row's masks         (joint)
      Join(their sum)                      -->    H_i: removes the masks; z_i; Delta_i; its gradients
      Backward(Delta_i, sealed)            -->    P_ij: X_ij' Delta_i
      Contribute, group by group           <->    n_l g_l, masked and blinded
      Descend(the sum)                     -->    removes the blind, clips; D <- D - alpha_k G / N
      CatchUp(D and norms, sealed by one)  -->    participants that missed some of it

**Who learns what**: `claims` has the list. In short, A learns who takes part, how many rows an upload is about, each
group's rows where a round uses all of them, and statistics of standardised columns. With `blind` (the default) it reads
no sum and holds nothing that members lack, so a participant can take the role of A, and another can replace it. Every
member of a group learns its layers' D. D alone predicts as well as confined models do, or better. H_i learns z_i, and
with D of all columns the row's raw features. P_ij learns Delta_i, whose rows cluster by label. Of two participants that
share a layer, or a row, each learns the other's part. One leaked w_l(k) reveals all of that participant's iterates.
Where scores on held-out rows are requested, the participants read the sum of all, or A does without blind.
``docs/cgd-leaks.md`` has figures.

**A malicious A** that colludes with one participant gets no key of a group without this one (`group_keys`), and no two
z of one take, whose difference would be raw features (`client.Takes`). That needs a roster, and the same grid at all
participants. Members refuse a sum that A changed. A may still keep sums back, and with a member's help send a D of its
choice.

Differs from the paper:

- The sum is weighted by rows and divided by their number, as the proof of Theorem 1 needs. As printed, a plain sum of
  means, the step is m times as long and diverges at m = 1000.
- `joint` is the reading under which the paper's tables are possible; see ``docs/cgd.md``.
- The rate: `params.CGD.rate`. Biases: `groups.groups_of`. Normalisation layers: `start.centers`.
"""
