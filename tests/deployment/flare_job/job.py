"""job.py plain|secure FOLDER SITES ROUNDS [WHAT GOES WRONG]: FLARE's recipe, or ours, in the simulator."""

import sys
from typing import Any

from net import Net
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv

from moretta.flare import SecureFedAvgRecipe

if __name__ == "__main__":
    kind, folder, sites, rounds, *wrong = sys.argv[1:]
    Recipe: Any = SecureFedAvgRecipe if kind == "secure" else FedAvgRecipe
    given = {"min_clients": int(sites), "num_rounds": int(rounds), "train_script": "client.py"}
    if any(one.endswith("=kill") for one in wrong):
        given["train_timeout"] = 120
    recipe = Recipe(name="job", model=Net(), train_args=" ".join(wrong), **given)
    if "filter=PercentilePrivacy" in wrong:
        recipe.add_client_output_filter(PercentilePrivacy(percentile=30, gamma=0.02), tasks=["train"])
    recipe.execute(SimEnv(num_clients=int(sites), workspace_root=folder))
