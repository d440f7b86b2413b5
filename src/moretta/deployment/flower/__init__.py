"""Moretta's secure sum inside Flower: a mod at each site, a strategy at the server, and Flower's messages between them.

`moretta.secure_aggregation` decides what is summed, masked and refused, and `moretta.engines.driver` which attempt
follows a lost silo. This folder carries their messages in Flower's.

    SecureFedAvg, over a Grid                    secure_sum(), before the app's functions
      AskName                              -->       its name, from silo.toml
                                         <--     SiloName(name)
      SumTerms, AdvertiseKey                -->       checks the terms against silo.toml
                                         <--     KeyAdvert                             once a set-up: `agreement`
      PeerKeys                           -->
                                         <--     KeysAccepted
      arrays, config, AskSum             -->       the app trains; its reply never leaves the site
                                         <--     MaskedUpload, UploadNames             once a round
      Survivors, Unmask                  -->     as in every secure sum
                                         <--     SelfMaskShares

A ClientApp is a process for each message, and in a simulation any actor answers. So between messages a site keeps the
origin of its role: two roots of 32 bytes from the operating system (one for each set-up, one for each upload), and the
received messages. They are in Flower's `context.state`, which a SuperNode holds in memory. Actions that may happen only
once are recorded in the site's folder beforehand. A process that answers again, such as an actor, has kept the seeds of
a set-up; it looks them up by a digest of the root and the messages, so another state has others.

**Threat model**: that of `moretta.secure_aggregation`. In addition, a site runs the app that the starter of the run has
uploaded. Another app may omit this mod, or read its memory. A site that does not trust the server accepts apps of named
authors only (``flower-supernode --trusted-entities``).
"""
