"""BAFFLE: training by forward passes alone.

Source: Feng, Pang, Du, Chen, Yan, Lin, "BAFFLE: A Baseline of Backpropagation-Free Federated Learning", arXiv
2301.12195v3, ECCV.

**Theory.** The n parameters w of a model are moved by a small sigma along K directions d_k that all roles draw from one
seed. Each silo runs its batch forward at w + sigma d_k and uploads the differences of its K losses in a secure sum. The
silos' mean x_k of (L(w + sigma d_k) - ...) / sigma is the derivative along d_k up to sigma, and since E[d d^T] = I,

    g = 1/(K - 1) sum_k x_k d_k,     x_k = (L_k - mean_j L_j) / sigma          (Stein's identity: Eqs. 5, 6)

is an unbiased estimate of the gradient. It lies in the span of K directions, so its squared error is about n / K times
the gradient's square (Theorem 3.1). A round makes some K / n of a true gradient's progress, and K forwards cost K times
a forward. Rademacher directions lose less to the curvature than Gaussian ones
(`moretta.protocols.baffle.silo.directions`); the forms are in `moretta.protocols.baffle.silo.estimate`.

    server                                              silo c
      enrolment; commitments, contributions      <->      (`moretta.protocols.baffle.silo.seeds`)
      Estimate(w, hash, K)                       -->      L_k = loss of its batch at w + sigma d_k, k = 1 .. K
                                                 <--    secure-sum upload of N_c (x_1, .. x_K, loss)
      g = sum_k x_k d_k / (K - 1);  w <- w - Adam or SGD;  average of w

With `directions = "own"` silo c draws d_k from a secret of its own and uploads N_c g_c, as long as the model, so that C
silos have C K directions a round (`moretta.protocols.baffle.silo.estimate`), as in the authors' code. At the epoch
level each silo takes its own steps, by SGD or its own Adam (`moretta.protocols.baffle.silo.recipe`), and uploads the
difference.

With `perturb = "blocks"` one layer after the other moves, and a move runs only the layers after it
(`moretta.protocols.baffle.silo.blocks`): the same exchange, for LeNet at 1/26 to 1/132 of the multiplications.

**Threat model.** `claims` lists who learns what. As in the secure sum, the server learns the silos' mean of K numbers a
round, which with the directions is the estimate of their gradient, and their mean loss; nothing of one silo. Under own
directions it learns the estimate without the directions. Silos hold the model in the clear. Moretta does not claim that
the numbers are indistinguishable from noise (the paper's Fig. 5).
"""
