#!/bin/sh
# Three hospitals and a server on one machine, each in a folder and processes of its own, over NVIDIA FLARE and TLS: from
# raw tables to a judged model and its dossier. One hospital is killed on the way, and comes back.
#
#     python examples/consortium/deal.py runs/consortium && sh examples/consortium/play.sh runs/consortium [PORT]
#
# `make consortium` does both, in an empty folder.
set -e
here=$(cd "$(dirname "$0")" && pwd)
port=${2:-8002}
sh "$here/prepare.sh" "$1" localhost "$port"
cd "$1"

# Whatever ends this script ends what it has started; each of these ends its own processes.
started=
trap 'kill $started 2> /dev/null || true; wait' EXIT
trap 'exit 1' INT TERM

rounds() { cat server/run/history.jsonl 2> /dev/null | wc -l; }
job_of() { ps -A -ww -o pid= -o args= | awk -v kit="$(pwd -P)/$1/kit" 'index($0, kit " ") && / [^ ]*[.]worker_process / { print $1 }'; }

set -x
moretta serve server/run.toml --out server/run --kits server/kits --port "$port" > server/serve.log 2>&1 &
serve=$! started=$!
for site in north south east; do
    moretta join $site/kit --silo $site/silo.toml --once > $site/join.log 2>&1 &
    started="$started $!"
done

# In the middle of the run east's process that computes is killed, and nobody is told. North and south go on as two, as
# the threshold allows. At east `moretta join` starts it anew: it takes up what it had kept, and takes part again.
{ set +x; } 2> /dev/null
until [ "$(rounds)" -ge 20 ] && [ "$(job_of east)" ]; do  # on a busy machine one look may miss the process
    kill -0 $serve || { cat server/serve.log; exit 1; }
    sleep 0.2
done
set -x
kill -9 $(job_of east)
wait $serve
tail -n 1 north/join.log

# How good is the model for a hospital that took no part? Then what people ask who have to answer for it.
moretta evaluate server/run --data west/visits.csv --by ward
moretta predict server/run --data west/visits.csv --out west/predictions.csv
moretta report server/run
moretta dossier write server/run
python "$here/compare.py" .
