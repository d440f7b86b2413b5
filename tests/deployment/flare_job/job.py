"""job.py plain|secure FOLDER SITES ROUNDS [script=FILE] [WHAT GOES WRONG]: FLARE's recipe, or ours.

It is played in the simulator, or with the word poc by real processes of a server and sites on this machine.
"""

import shutil
import sys
from typing import Any

from net import Net
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import PocEnv, SimEnv

from moretta.flare import SecureFedAvgRecipe

if __name__ == "__main__":
    kind, folder, sites, rounds, *wrong = sys.argv[1:]
    Recipe: Any = SecureFedAvgRecipe if kind == "secure" else FedAvgRecipe
    script = next((one[7:] for one in wrong if one.startswith("script=")), "client.py")
    given = {"min_clients": int(sites), "num_rounds": int(rounds), "train_script": script}
    if any(one.endswith("=kill") for one in wrong):
        given["train_timeout"] = 120
    words = " ".join(one for one in wrong if one != "poc")
    recipe = Recipe(name="job", model=Net(), train_args=words, **given)
    if "filter=PercentilePrivacy" in wrong:
        recipe.add_client_output_filter(PercentilePrivacy(percentile=30, gamma=0.02), tasks=["train"])
    if "poc" not in wrong:
        recipe.execute(SimEnv(num_clients=int(sites), workspace_root=folder))
    else:
        environment = PocEnv(num_clients=int(sites), extra={"login_timeout": 300})
        try:
            run = recipe.execute(environment)
            shutil.copytree(run.get_result(clean_up=False), f"{folder}/result")
        finally:
            environment.stop(clean_up=True)
