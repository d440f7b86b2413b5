"""Secure aggregation: the server learns the sum over a cohort's silos, and no silo's own numbers.

**Theory** (Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017; the graph
is that of Bell et al., CCS 2020). Silo k holds tensors x_k and a weight N_k. It rounds 2^f N_k x_k to integers of the
ring Z_2^b (`moretta.secure_aggregation.encoding`). Every two neighbours agree on a secret seed by X25519
(`moretta.secure_aggregation.agreement`). Up to 50 silos all are neighbours; above, each has only some
(`moretta.secure_aggregation.graph`). For each sum, neighbours expand their seed to a fresh mask
(`moretta.secure_aggregation.masks`): the one whose name sorts first adds it, the other subtracts it. Each silo also
adds a self-mask, which it alone knows. The self-mask's secret is fresh for each upload, and any t of the silo and its
neighbours can reconstruct it from shares (`moretta.secure_aggregation.shamir`)::

    y_k = 2^f N_k x_k + self(k) + sum_{j > k} mask(k, j) - sum_{j < k} mask(j, k)   mod 2^b   (j: neighbours of k)

To anyone without the keys of its masks, each y_k is computationally indistinguishable from uniform (X25519, HKDF,
AES-128-CTR). In the sum over the survivors S the masks between them cancel, exactly and in any order. Their self-masks
and their masks with lost silos are left; the survivors reveal what removes these
(`moretta.secure_aggregation.unmasking`). N_k travels in the same upload, masked alike (unless weights are public), so
the server divides by N = sum_S N_k without having seen any N_k.

    server                              silo k
      AdvertiseKey              -->       draws a key pair
                                <--     KeyAdvert(public key, signature)
      PeerKeys(all adverts)     -->       checks them; agrees on a seed with every neighbour
                                <--     KeysAccepted(digest of the cohort)
      (above 50 silos with a committed part of the graph's seed: `graph`, one exchange more)
      a protocol's own ask      -->       computes x_k, N_k; draws its secret
                                <--     MaskedUpload(y_k, shares of the secret, each sealed for a neighbour)
      (a silo is missing, or there is a roster)
      Survivors(S)              -->       checks S
                                <--     Confirmed(signature of S, keys of its masks with neighbours outside S)
      Unmask(S, signatures, sealed shares of the neighbours in S)
                                -->       checks that it is the same S; opens them
                                <--     SelfMaskShares                       sum -> means, N

**Threat model.** Server and silos are honest but curious: they follow the protocol and look at what they see. Silos may
vanish at any time. With threshold t, the server and fewer than t silos together learn the sum over the other survivors,
and nothing else of them. The difference of two sums of the same uploads would reveal more. So a silo helps to open one
sum of a round's take, over one set of survivors, once in its life (`moretta.secure_aggregation.one_sum`). Each further
take draws its batch anew; whole rows are summed again only over the same silos (`moretta.protocols.common.batches`).
The server sees the sum, the total weight N, which silos were in which sum and when, and the lengths of messages. If a
silo refuses because of its values, the server receives one fixed sentence; the magnitude stays in the silo's own log. A
silo sees the others' names and public keys, and the silos of a sum. A silo that lies about its numbers is not detected;
a result out of honest silos' reach is clipped to their range (`moretta.secure_aggregation.encoding`).

Against a server that deviates: silos never reveal both masks of one silo. They refuse a sum of fewer silos than the
threshold or `Rules.min_survivors`. They never accept a lost silo in a later sum, so a late upload stays hidden. With a
roster (`moretta.secure_aggregation.identity`) every silo signs its keys and the survivors. Silos then cannot receive
different survivors unless 2 t - n of n collude in a complete graph, or with a chance of at most 2^-40 in each set-up of
a sparse one (`moretta.secure_aggregation.graph`). Without a roster silos trust the received keys, and a server that
sends each of them keys of its own making reads every upload. A server that omits silos, down to the threshold, is not
detected. The question that silos answer is part of every mask's label (`moretta.secure_aggregation.sums`); one question
crafted for all is not detected. ``docs/deviations.md`` has the list.

**Dropouts.** A silo lost before its upload arrives is left out; one lost after it has confirmed counts. One lost in
between is left out too, or with a roster ends the sum. Keys stay in use. The sum also ends where fewer than t of a silo
and its neighbours are left. If shares may have been sent, the next take follows. t follows from the number of silos in
a round and does not shrink: three silos with t = 3 cannot lose one.

**Numbers.** Means of K survivors have a fixed-point error of at most K / (2 * 2^f N), stated by `Sum.steps`, beside
float64's own rounding. No sum can wrap: a value outside its range is refused before it is masked.

The scheme ``additive-shares`` (`moretta.secure_aggregation.additive`; CGD's paper, appendix A) gives the same ring
elements without masks. Each silo splits its part into a uniform share for every silo, each silo adds the shares it
holds, and the server adds those sums. Set-up is the same. The server and up to n - 2 silos together learn no more than
the others' sum. The price: each of n silos sends n times the model, and any dropout ends the sum. A silo that answers
after that completes the ended take's sum: the server then has two sums, for two draws of rows.

**A sum that only its members read** (`Aggregator.relay`, `Contributor.read`; CGD). Members that share a secret may each
add one more keystream of it, for this sum and silo. To the role that adds them up the results then look uniform, also
for the weight. The members receive the names of the silos in the sum, and subtract the keystreams.

The scheme ``none`` (`moretta.secure_aggregation.plain`) has the same interface without masks: the server sees
everything, and a single silo is allowed.
"""
