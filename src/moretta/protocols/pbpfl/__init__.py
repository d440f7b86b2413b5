"""PBPFL: the server perturbs the model, silos train on it exactly, masks hide their gradients.

Sources: "Practical and Bilateral Privacy-preserving Federated Learning" (`pbpfl.txt`, arXiv 2002.09843). Feng et al.,
"A Practical Privacy-preserving Method in Federated Deep Learning" (`practical.md`) is a later version under the same
arXiv number; equations have its numbers. The last version is "An Accuracy-Lossless Perturbation Method for Defending
Privacy Attacks in Federated Learning" (WWW 2022).

One round; W are the true weights, R the scales, r = gamma o r_a the offset, h the head's input, alpha_n = sum_j h_nj:

    server            draws R, r_a, gamma afresh; W^ = R o W, plus r_i on row i of the head
    server -> silos   W^, r_a

  squared error:

    silo k            y^ = y + alpha r (Eq. 9, Lemma 1); gradients of L^, S_1 .. S_m and beta (`terms`), one forward
    silos -> server   their weighted sums, through secure aggregation
    server            grad L = R o (grad L^ - sum_s gamma_s grad S_s + |r|^2 grad beta) (Eq. 29); optimizer step

  cross-entropy, with an exchange in between (`softmax`):

    silo k            y^ = y + alpha r
    silos -> server   z = y^ - max y^ and alpha of every sample, in the clear for each silo
                      (exchange = "ratios": exp(y^_j - y^_i) + lambda_i, as printed, and alpha; `ratios`)
    server            p = softmax(z - alpha r)
    server -> silo k  p, with variant = "probabilities"; with "paper", p exp(-delta) and (1 - exp(delta)) / xi
    silo k            gradients of G and sigma_1 .. sigma_m; with "paper", of beta_s and psi_s too (`terms`)
    silos -> server   their weighted sums, through secure aggregation
    server            grad L = R o (G - sum_s gamma_s sigma_s), with "paper"
                      + sum_s gamma_s xi_s beta_s - sum_s xi_s psi_s inside the brackets; optimizer step

  release             R o W without offset: exact predictions, R stays secret

`claims` lists who learns what; here is why. The server holds the true model. It learns the sum of the silos' terms
(with ``scheme = "none"``, the paper's basic form, each silo's own). At set-up it learns the mean and deviation of all
inputs and of the targets, over all silos. Under cross-entropy it sees each sample's alpha and its true outputs up to a
constant, hence its softmax. The printed exchange of ratios hides the softmax only if there are two classes (`ratios`).

A silo learns the noisy model, and the common mean and deviation of standardised columns. Parameters that have a free
scale (`scales`; some models have none) are obfuscated, not encrypted. Hidden layers are known up to the network's own
scaling and permutation symmetry, so a silo has their function. The head's offset has m unknowns, which a silo with
labels fits by least squares. The released model is the true function. Under cross-entropy a silo learns its
samples' true softmax. It receives the softmax itself; or in the paper's form m rows, each with sum_i p_i = 1, give the
m unknown xi_s. One sample's softmax then gives r_i - r_j. As r_a is public, that is all of r if m is below the number
of outputs. In a run of two silos each knows its own half of every step, and only the perturbation hides the other's
gradient. The papers' claim of semantic security (Lemma 6) does not hold: the perturbation keeps the rank of W, and its
signs except those of recurrent channels.

With ``scales = "powers-of-two"`` the perturbation also keeps the mantissas of W below the head, and so shows each
step's change of a weight there, relative to that weight. A silo then needs no labels to find the head's offset. Two
consecutive rounds show the factor q_j by which the scale of each input h_j of the head changed (the nearest power of
two to the ratio of the weights that feed it). For each output i, q_j W^'_ij - W^_ij = r'_i q_j - r_i + (a step / s_j)
has the unknowns r_i and r'_i, and as many equations as the head has inputs. They give the head to a fraction of a
percent, and its step approximately. Of two silos, each computes the other's gradient, at the head approximately.

A server may deviate from the protocol. Under cross-entropy it could read one row's features out of the sum of all
silos: by answering that row with 2^20, or all other rows so that their gradients are 0. So a silo refuses an answer
that is no softmax, or that does not follow from its predictions by one offset for all rows (`softmax`). The server
could also answer one silo differently in a second sum of the round over the same silos. The difference of the sums
would be that silo's own gradients of outputs. So in each take a silo predicts for one model, and helps to open the sum
of one softmax. In another round of the same rows and model the server can still do this.

A silo may deviate from the protocol. It sends its alpha and outputs in the clear, and all silos' next offset and ring
step depend on their size. So the server uses the median over silos. A silo that is out of proportion is named and left
out (`sizes`).

A silo learns ratios of scales. A step hardly turns a row of weights. So a silo can match rows of two rounds by their
direction, and has the ratio of their scales. At best, one factor per hidden channel and the permutation stay unknown
for the whole run. The start narrows even these: the norm of a row of 30 drawn weights has a deviation of only 8 %, and
a normalisation layer starts with ones. A silo that knows the start knows all scales.

A silo must not learn the scales from the low bits of one message (`scales-from-low-bits` of the audit). If W is a
float32, or fresh from an initialiser of 24 random bits, it has few possible values. Only the true R then makes W^ / R
one of these. So the server holds W in float64 and sends 24 bits of R o W (41 under float64). It also adds to the start
noise as large as the distance of two values (`moretta.protocols.common.modules`). Differs from the paper, which does
not mention floats.

Modules: `params`, `messages`, `server`, `client`, `ideal`. `perturbation` is the key, `terms` the mathematics at the
head, `softmax` the server's half of the exchange, `ratios` the exchange as printed, `sizes` the sizes behind the key
and the ring. `head` finds the last layer, `work` runs a batch to it and back, by `backward` for a large model. `scales`
computes a model's scales: `graph` records the calls of a model, `rules` and `layers` state what each does to scales and
channels, `solver` joins them, `patterns` apply the result to a tensor, `selfcheck` tries it in numbers. `exactness` and
`command` are `moretta check`.
"""
