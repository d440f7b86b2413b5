"""PBPFL: the server perturbs the model, silos train on it exactly, masks hide their gradients.

Sources: "Practical and Bilateral Privacy-preserving Federated Learning" (`pbpfl.txt`, arXiv 2002.09843), and Feng et
al., "A Practical Privacy-preserving Method in Federated Deep Learning" (`practical.md`), a later version of the same
entry, whose numbering is used. Its last version is "An Accuracy-Lossless Perturbation Method for Defending Privacy
Attacks in Federated Learning" (WWW 2022).

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

  release             R o W without offset: exact predictions, true scales unknown

`claims` lists who learns what; here is why. The server holds the true model. It learns the sum of the silos' terms
(with ``scheme = "none"``, the paper's basic form, each silo's own), and at set-up the mean and deviation of all inputs
and of the targets, over all silos. Under cross-entropy it sees each sample's alpha and its true outputs up to a
constant, hence its softmax.

A silo learns the noisy model, and the common mean and deviation of standardised columns. Parameters that have a free
scale (`scales`; some models have none) are obfuscated, not encrypted. Hidden layers are known up to the network's own
scaling and permutation symmetry, so the function of the trunk is plain. The head's offset has m unknowns, which a silo
with labels fits by least squares. The released model is the true function. Under cross-entropy a silo learns its
samples' true softmax: it receives it, or in the paper's form solves sum_i p_i = 1 for the m unknown xi_s from m rows.
Then one sample gives r_i - r_j and, as r_a is public, all of r where m is below the number of outputs. The printed
exchange hides a softmax of two classes from the server, and none of more (`ratios`). Of two silos, each knows its own
half of every step, and only the perturbation hides the other's gradient. The papers' claim of semantic security (Lemma
6) does not hold: the rank of W survives, and its signs, except those of recurrent channels.

With ``scales = "powers-of-two"`` the mantissas of W below the head survive too, and with them each step there, relative
to the weight it changes. The head's offset then needs no labels. Two consecutive rounds show the factor q_j by which
the scale of each input h_j of the head changed (the nearest power of two to the ratio of the weights that feed it).
Then q_j W^'_ij - W^_ij = r'_i q_j - r_i + (a step / s_j) has two unknowns, and as many equations as the head has
inputs. The head follows to a fraction of a percent, its step approximately. Of two silos, each computes the other's
gradient, at the head approximately.

A server may deviate. Under cross-entropy, one that answered one row with 2^20 read its features out of the sum of all
silos, and so did one whose answers left no gradient of any other row. So a silo refuses what no softmax leads to. The
softmax of all its rows must follow from its predictions by one offset (`softmax`). One that answered a single silo
differently, in a second sum of the same round over the same silos, learned that silo's own gradients of outputs from
the difference. So a silo helps to open the sum of one softmax in a take, and predicts for one model, whether or not
that sum is opened. In another round of the same rows and model the server can still do so.

A silo may deviate. It sends its alpha and outputs in the clear, and all silos' next offset and ring step follow from
them. So the median over silos counts, and a silo that is out of proportion is named and left out (`sizes`).

What a silo learns of the scales. A step turns a row of weights little, so rows of two rounds are matched by direction
and give the ratio of their scales. At best, one unknown factor per hidden channel and the permutation stay hidden for
the whole run, to within the spread of the start. The norm of a row of 30 drawn weights is known beforehand to a
deviation of 8 %, and a normalisation layer's ones exactly. Parties that know the start know all of it. One message gave
more where W was a float32, or fresh from an initialiser of 24 random bits. W then has few values, and W^ / R is one of
them for the true R alone (`scales-from-low-bits` of the audit). So the server holds W in float64 and sends 24 bits of R
o W (41 under float64), and the start is moved by noise of a lattice's step (`moretta.protocols.common.modules`).
Differs from the paper, which does not mention floats.

Modules: `params`, `messages`, `server`, `client`, `ideal`. `perturbation` is the key, `terms` the mathematics at the
head, `softmax` the server's half of the exchange, `ratios` the exchange as printed, `sizes` the sizes behind the key
and the ring, `trunk` the passes below the head. `scales` computes a model's scales: `graph` records the calls of a
model, `rules` and `layers` state what each does to scales and channels, `solver` joins them, `patterns` apply the
result to a tensor, `selfcheck` tries it in numbers.
"""
