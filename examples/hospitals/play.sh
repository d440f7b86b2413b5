#!/bin/sh
# From raw tables to predictions: three hospitals by rows, a clinic and an insurer by columns.
#
#     python examples/hospitals/make.py runs/hospitals && sh examples/hospitals/play.sh runs/hospitals
#
# `make hospitals` does both.
set -e
cd "$1"
set -x

# What do the columns mean? A proposal, which leaves to a person what it cannot be sure of; then what that person wrote.
moretta schema init north.csv --out proposed.toml
moretta schema check north.csv --schema schema.toml

# What is there? Nothing is trained, and counts below a few are not shown.
moretta look pbpfl.toml --out look.html

# By rows: three tables in three dialects, one model. Then new patients, whose rows are as raw.
moretta train pbpfl.toml --out pbpfl
moretta predict pbpfl --data new.csv --out predictions.csv
moretta report pbpfl

# By columns: each partner learns which of its own patients the other has, and nobody sees an id of the other's.
moretta align begin --rows clinic.csv --id-column patient --secret clinic.secret --out step1.bin
moretta align answer step1.bin --rows insurer.parquet --id-column patient --secret insurer.secret --out step2.bin
moretta align finish step2.bin --rows clinic.csv --id-column patient --secret clinic.secret --alignment clinic-order.json --out step3.bin
moretta align finish step3.bin --rows insurer.parquet --id-column patient --secret insurer.secret --alignment insurer-order.json
moretta train cgd.toml --out cgd
moretta predict cgd --silo row-1 --data both.csv --out both-predictions.csv
moretta report cgd
