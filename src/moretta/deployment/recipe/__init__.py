"""A FLARE job with any training script, whose server sees no site's result: a recipe, and its two ends.

    SecureFedAvg, FLARE's FedAvg                   the site: FLARE's executor, its filters, `KeepResult` last
      task "train": the model                -->     the script trains; filters of site and job change its result
                                             <--     that there is a result, and the names of its metrics
      AdvertiseKey .. Unmask, as in          -->     `SumClient`, over FLARE's aux messages
      `moretta.secure_aggregation`           <--     the masked result, once

**Threat model**: that of `moretta.secure_aggregation`, of one sum a round. In addition, FLARE has a site run the job
that an admin submits, with its code. Another job, or this one with other code, may send anything. A site's silo.toml
limits only jobs that have `KeepResult`. `docs/flare.md` lists what a site trusts.
"""
