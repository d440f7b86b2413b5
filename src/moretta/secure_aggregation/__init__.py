"""Secure aggregation: the server learns what a cohort's silos sum to, and no silo's own numbers.

**Theory** (Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017; the graph
is that of Bell et al., CCS 2020). Silo k holds tensors x_k and a weight N_k. It rounds 2^f N_k x_k to integers of the
ring Z_2^b (`moretta.secure_aggregation.ring`). Every two neighbours agree on a secret seed by X25519
(`moretta.secure_aggregation.agreement`); to 50 silos all are neighbours, above each has some
(`moretta.secure_aggregation.graph`). For each sum they expand it to a fresh mask (`moretta.secure_aggregation.masks`);
the one whose name sorts first adds the mask, the other subtracts it. On top comes a mask that the silo alone knows, of
a secret that is fresh for each upload and that t of the silo and its neighbours can put together from shares
(`moretta.secure_aggregation.shamir`)::

    y_k = 2^f N_k x_k + self(k) + sum_{j > k} mask(k, j) - sum_{j < k} mask(j, k)   mod 2^b   (j: neighbours of k)

Each y_k alone is uniform in the ring. In the sum over the survivors S the masks between them cancel, exactly and in any
order; their masks with those who dropped out and their self-masks are left, and the survivors give what takes them off
(`moretta.secure_aggregation.unmasking`). N_k travels in the same upload, masked alike (unless weights are public), so
the server divides by N = sum_S N_k without having seen any N_k.

    server                              silo k
      AdvertiseKey              -->       draws a key pair
                                <--     KeyAdvert(public key, signature)
      PeerKeys(all adverts)     -->       checks them; agrees on a seed with every neighbour
                                <--     KeysAccepted(digest of the cohort)
      (above 50 silos with a committed part of the graph's seed: `graph_seed`, one exchange more)
      a protocol's own ask      -->       computes x_k, N_k; draws its secret
                                <--     MaskedUpload(y_k, shares of the secret, each sealed for a neighbour)
      (somebody is missing, or there is a roster)
      Survivors(S)              -->       checks S
                                <--     Confirmed(signature of S, keys of its masks with neighbours outside S)
      Unmask(S, signatures, sealed shares of the neighbours in S)
                                -->       checks that it is the same S; opens them
                                <--     SelfMaskShares                       sum -> means, N

**Threat model.** Server and silos are honest but curious: they follow the protocol and look at what they see. Silos may
vanish at any time. With threshold t, the server and fewer than t of them together learn the sum over the other
survivors and nothing else of them. Two sums of the same uploads would be subtracted, so a silo helps to open one sum of
a round's take, over one set of survivors, once in its life (`moretta.secure_aggregation.one_sum`); what is summed again
over others has other rows (`moretta.protocols.common.batches`). Revealed to the server: the sum, the total
weight N, which silos were in which sum and when, the lengths of messages, and the sentence of a silo that refuses (for
a value out of range that names the value's magnitude). A silo sees the others' names and public keys, and who is in a
sum. A silo that lies about its numbers is not caught here; what no silos that follow the protocol could come to is
clipped to what they could (`moretta.secure_aggregation.encoding`).

Against a server that deviates: silos never give both masks of one silo away, refuse a sum of fewer than the threshold
and `Rules.min_survivors`, and never let a silo that was given up back into a sum, so that a late upload stays hidden.
With a roster (`moretta.secure_aggregation.identity`) keys are signed, and the survivors by every one of them, so that
silos cannot be told different ones unless 2 t - n of n in a complete graph collude; in a sparse one chances of 2^-40
take that place (`moretta.secure_aggregation.graph`). Without, silos take keys on trust, and a server that hands each of
them keys of its own making reads every upload. Leaving silos out down to the threshold is not noticed. What silos are
asked is part of every mask's label (`moretta.secure_aggregation.asked`); one question crafted for all is not noticed.
``docs/secure-aggregation.md`` has the whole list.

**Dropouts.** A silo that is lost before its upload arrives is left out, one that is lost after it has confirmed counts;
one that is lost in between is left out too, or with a roster ends the sum. Keys serve on. Where fewer than t of a silo
and its neighbours are left the sum ends as well; what follows is the next take if shares may have left. t follows from
how many silos play a round and does not shrink: three silos with t = 3 cannot lose one.

**Numbers.** Means of K survivors carry a fixed-point error of at most K / (2 * 2^f N), stated by `Sum.steps`, beside
float64's own rounding. No sum can wrap: a value outside its range is refused before it is masked.

The scheme ``additive-shares`` (`moretta.secure_aggregation.additive`; CGD's paper, appendix A) comes to the same ring
elements without masks: each silo splits its part into a uniform share for every silo, all silos add the shares they
hold, and the server adds those sums. Set-up is the same; the server and up to n - 2 silos together learn no more than
the others' sum. The price is n times the model from each of n silos, that any dropout ends the sum, and that a silo
that answers after that is not protected.

**A sum that nobody but its members reads** (`Aggregator.relay`, `Contributor.read`; CGD). Members that share a secret
may each add one more keystream of it, for this sum and silo; whoever adds up is left with uniform ring elements, of the
weight too, and the members, who are told which silos are in the sum, take the keystreams off again.

The scheme ``none`` (`moretta.secure_aggregation.plain`) has the same faces without the masks: the server sees
everything, and a single silo is allowed.
"""
