"""PBPFL: the server perturbs the model, silos train on it exactly, masks hide their gradients.

Sources: Yang et al., "An Efficient and Privacy-Preserving Federated Learning Scheme" (`pbpfl.txt`), and Feng et al.,
"A Practical Privacy-preserving Method in Federated Deep Learning" (`practical.md`), whose numbering is used.

One round; W are the true weights, R the scales, r = gamma o r_a the offset, h the head's input, alpha_n = sum_j h_nj:

    server            draws R, r_a, gamma afresh; W^ = R o W, plus r_i on row i of the head
    server -> silos   W^, r_a
    silo k            y^ = y + alpha r; gradients of L^, of S_1 .. S_m and of beta (`terms`), one forward
    silos -> server   their weighted sums, through secure aggregation
    server            grad L = R o (grad L^ - sum_s gamma_s grad S_s + |r|^2 grad beta); optimizer step
    release           R o W without offset: exact predictions, true scales unknown

Who learns what. The server: the true model, and the sum of the silos' terms (with ``scheme = "none"``, the paper's
basic form, each silo's own). A silo: the noisy model. Its parameter values are obfuscated, not encrypted: hidden
layers are known up to the network's own scaling and permutation symmetry, so the function of the trunk is plain; the
head's offset has m unknowns, which a silo with labels fits by least squares; the released model is the true function.
The papers' claim of semantic security (Lemma 6) does not hold: rank and signs of W survive.

Rooms: `params`, `messages`, `server`, `client`, `ideal`; `scales` says which scales a model has, `perturbation` is the
key, `terms` the mathematics at the head, `trunk` the passes below it.
"""
