"""A script of FLARE's Client API. Arguments such as site-2:1=nan say what goes wrong where and in which round."""

import os
import signal
import sys

import nvflare.client as flare
import torch
from net import Net, rows, train

flare.init()
site = flare.get_site_name()
wrong = dict(one.split("=") for one in sys.argv[1:])
x, y = rows(site)
net = Net()
while flare.is_running():
    sent = flare.receive()
    net.load_state_dict(sent.params)
    train(net, x, y)
    params, how = net.cpu().state_dict(), wrong.get(f"{site}:{sent.current_round}")
    if how == "nan":
        params = {name: one * float("nan") for name, one in params.items()}
    elif how == "shape":
        params = {name: one[None] for name, one in params.items()}
    elif how == "missing":
        params = dict(list(params.items())[1:])
    elif how == "integers":
        params = {name: one.to(torch.int32) for name, one in params.items()}
    elif how == "error":
        raise ValueError("of row 4711")
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if "filter" in wrong:  # of FLARE's filters of privacy, which take differences
        given = {name: params[name] - one for name, one in sent.params.items()}
        flare.send(flare.FLModel(params=given, params_type="DIFF", meta={"NUM_STEPS_CURRENT_ROUND": len(x)}))
        continue
    metrics = {"accuracy": int(site[-1]) / 10}
    flare.send(flare.FLModel(params=params, metrics=metrics, meta={"NUM_STEPS_CURRENT_ROUND": len(x)}))
