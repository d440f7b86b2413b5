"""Moretta's secure sum inside Flower: a mod at each site, a strategy at the server, and Flower's messages between them.

What is summed, masked and refused is `moretta.secure_aggregation`'s, and which attempt follows a lost silo is
`moretta.engines.driver`'s. This folder carries their messages as Flower's.

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

A ClientApp is a process for each message, and in a simulation any actor answers. So a site keeps between messages what
its role follows from: two roots of 32 bytes from the operating system (one for each set-up, one for each upload), and
the messages that it was sent. It lies in Flower's `context.state`, which a SuperNode holds in memory. What may happen
once is in the site's folder, written before it is done.

**Threat model**: that of `moretta.secure_aggregation`. In addition, Flower gives a site's process the app that whoever
starts the run has uploaded. Another app may leave this mod out, or read what it keeps. A site that does not trust the
server takes apps of named authors alone (``flower-supernode --trusted-entities``).
"""
