"""The audit: attacks on what a run recorded, so that what each role could learn is a measured figure.

    views of a role, background knowledge, what is public          what the run kept apart (`truth`)
                     |                                                       |
        `attack`, in a process of its own (`attacker`)                       |
                     |                                                       |
                     +---- a claim: arrays ---->  `score`, in ours <---------+
                                                     |
                                  score, chance, interval, one sentence

**Threat model.** An attacker is honest but curious: one role, or several who put together what they saw. It has that
role's messages of the recorded rounds, what is public of the run (`evidence.public_run`), and the background knowledge
that the attack declares. A role's own secrets, such as the server's key under PBPFL, are part of what it knows and are
given to it by name. It is computed in a child process that is sent nothing else, not even the run folder's path.

**Scores** are higher the more was learned, beside what guessing scores. An attack succeeded where the whole 95 %
interval of its score lies above chance; any other says "this attack failed", which is never to say that a role is safe:
a stronger attack may exist.

`auditor` runs all attacks of the `catalogue`, and `attacker` is the process of one. `attacks/` has them, one a file: a
folder a protocol, and `common/` for those that fit several, which ask a protocol's `exposure` what it shows.
`evidence/` is what all of them stand on: `attack` says what one is, `case` what its process is given, `truth` what a
scorer reads, `trained` what is needed of whoever trained, `intervals` the statistics.
"""
