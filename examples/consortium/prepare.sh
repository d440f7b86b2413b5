#!/bin/sh
# What people do before a run: say what columns mean, make keys, compare fingerprints, look whether all fits.
#
#     sh examples/consortium/prepare.sh FOLDER HOST PORT        HOST: by which sites reach the server
#
# Here one script plays all four. Between machines, what is copied here travels by any way, as nothing of it is secret,
# and fingerprints are read out by another, such as the telephone.
set -e
cd "$1"
host=$2 port=$3

# After a word and a colon, what a command prints, up to three blanks: a fingerprint.
said() { sed -n "s/^$1: \(.*\)   (.*/\1/p"; }

set -x
# What do the columns mean? A proposal for one hospital, which asks what it cannot know; server/schema.toml is what
# people made of it.
moretta schema init north/visits.csv --out north/proposed.toml

# The server's kit and key, and each site's identity. All have the same list of who takes part.
server=$(moretta kit new server/kits --host "$host" --port "$port" | said "server's key")
for site in north south east; do
    key=$(moretta keys new --out $site/keys | head -n 1)
    printf '[[silo]]\nname = "%s"\nkey = "%s"\n' $site "$key" >> server/roster.toml
done
for site in north south east; do cp server/roster.toml $site/; done

# Each site makes its key and a request; the server signs it, and the site completes its kit by the reply. Each side
# gives the fingerprint that the other has read out.
for site in north south east; do
    request=$(moretta join $site/kit --silo $site/silo.toml --request | said fingerprint)
    moretta kit sign $site/kit/$site.request --kits server/kits --fingerprint "$request"
    moretta join $site/kit --silo $site/silo.toml --reply server/kits/$site.reply --fingerprint "$server"
done

# Would each site's rows, keys and versions do for this run? The server need not be there for that.
for site in north south east; do
    moretta doctor --silo $site/silo.toml --run server/run.toml
done
