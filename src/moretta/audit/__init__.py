"""The audit: attacks on what a run recorded, so that what each role could learn is a measured figure.

    views of a role, background knowledge, public facts        what the run kept apart (`truth`)
                     |                                                       |
        `attack`, in a process of its own (`attacker`)                       |
                     |                                                       |
                     +---- a claim: arrays ---->  `score`, in ours <---------+
                                                  |
                                  score, chance, interval, one sentence

**Threat model.** An attacker is honest but curious: one role, or several that pool what they saw. It has that role's
messages of the recorded rounds, the run's public facts (`evidence.case`), and the background knowledge that the attack
declares. A role's own secrets, such as the server's key under PBPFL, are part of its knowledge and are passed to it by
name. An attack runs in a child process that receives nothing else, not even the run folder's path.

**Scores** are higher the more was learned. Chance is the score of guessing. An attack succeeded if the whole 95 %
interval of its score lies above chance. Otherwise it reports "this attack failed", which never means that a role is
safe: a stronger attack may exist.

`auditor` runs all attacks, and `attacker` is the process of one. `attacks/` has a folder for each protocol, with a file
for each target; those that fit several are in `common/` and ask a protocol's `exposure` what it shows. Installed
packages add attacks of their own (CONTRIBUTING.md). `evidence/` is what all of them use: `attack` defines an attack,
`case` the input of its process, `truth` the scorer's data, `intervals` the statistics.
"""
