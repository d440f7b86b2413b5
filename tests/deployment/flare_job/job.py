"""job.py plain|secure FOLDER SITES ROUNDS [script=FILE] [views=FOLDER] [WHAT GOES WRONG]: FLARE's recipe, or ours.

It is played in the simulator, or with the word poc by real processes of a server and sites on this machine. With
admin=KIT and roster=FILE it is submitted to a server that runs, under that roster.
"""

import shutil
import sys
from typing import Any

from net import Net
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import PocEnv, ProdEnv, SimEnv

from moretta import SecureAggregation
from moretta.flare import RecordViews, SecureFedAvgRecipe

if __name__ == "__main__":
    kind, folder, sites, rounds, *wrong = sys.argv[1:]
    Recipe: Any = SecureFedAvgRecipe if kind == "secure" else FedAvgRecipe
    options = dict(one.split("=") for one in wrong if "=" in one)
    given: dict[str, Any] = {"min_clients": int(sites), "num_rounds": int(rounds)}
    given["train_script"] = options.get("script", "client.py")
    if kind == "secure":
        given["secure"] = SecureAggregation(roster=options.get("roster"))
        given["record_views"] = options.get("views")
    if any(one.endswith("=kill") for one in wrong):
        given["train_timeout"] = 120
    words = " ".join(one for one in wrong if one != "poc")
    recipe = Recipe(name="job", model=Net(), train_args=words, **given)
    if "filter=PercentilePrivacy" in wrong:
        recipe.add_client_output_filter(PercentilePrivacy(percentile=30, gamma=0.02), tasks=["train"])
    if "views" in options and kind == "plain":
        recipe.add_client_output_filter(RecordViews(options["views"]), tasks=["train"])
    if "admin" in options:
        run = recipe.execute(ProdEnv(options["admin"], login_timeout=300, username="admin@hospitals.org"))
        shutil.copytree(run.get_result(), f"{folder}/result")
    elif "poc" not in wrong:
        recipe.execute(SimEnv(num_clients=int(sites), workspace_root=folder))
    else:
        environment = PocEnv(num_clients=int(sites), extra={"login_timeout": 300})
        try:
            run = recipe.execute(environment)
            shutil.copytree(run.get_result(clean_up=False), f"{folder}/result")
        finally:
            environment.stop(clean_up=True)
