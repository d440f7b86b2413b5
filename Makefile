# make demo      three hospitals train on real records, four protocols, one page (under a minute after installation)
# make hospitals made-up tables as hospitals have them: schema, look, alignment, two protocols, predictions (two minutes)
# make consortium  three hospitals and a server over FLARE, from raw files and keys to a judged model (a few minutes)
# make test      everything that CI runs: lint, types, tests
# make test-all  the same and the slow checks
# make fuzz      a million inputs to what reads bytes of others, by coverage (hours; it goes on where it was stopped)
# make dist      the source distribution and the wheel, into dist/, and a look at what is in them
# make docs      the site of pages, into site/
# make wheelhouse  wheels of the package and of all that it needs, into wheelhouse/, for machines without a way out

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
DEMO := runs/demo
HOSPITALS := runs/hospitals
CONSORTIUM := runs/consortium
WHEELHOUSE ?= wheelhouse
EXTRAS ?= flare,onnx,dp,images
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# Tests start hundreds of processes: with bytecode kept, each module is compiled once, whatever the shell asks for.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo hospitals consortium test test-all quick-tests all-tests lint types-of-tests docs fuzz dist wheelhouse clean

demo: .venv/torch.stamp
	@rm -rf $(DEMO)
	$(BIN)/moretta compare examples/wdbc.toml --protocols centralised,local,fedsgd,pbpfl --out $(DEMO)
	@echo "With tables as hospitals have them: make hospitals (examples/hospitals/)"

hospitals: .venv/torch.stamp
	@rm -rf $(HOSPITALS)
	$(BIN)/python examples/hospitals/make.py $(HOSPITALS)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/hospitals/play.sh $(HOSPITALS)
	@echo "$(HOSPITALS)/predictions.csv, $(HOSPITALS)/pbpfl/report.html"

consortium: .venv/flare.stamp
	@rm -rf $(CONSORTIUM)
	$(BIN)/python examples/consortium/deal.py $(CONSORTIUM)
	PATH="$(CURDIR)/$(BIN):$$PATH" sh examples/consortium/play.sh $(CONSORTIUM)

# mypy has one process, so the tests begin beside it.
test: .venv/dev.stamp
	@$(MAKE) --no-print-directory --jobs=2 lint quick-tests

test-all: .venv/dev.stamp
	@$(MAKE) --no-print-directory --jobs=2 lint types-of-tests all-tests

quick-tests: .venv/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" --durations=20

all-tests: .venv/dev.stamp
	HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest -n 2 --dist loadfile --durations=50

lint: .venv/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A minute of a processor from nothing, so not in every `make test`.
types-of-tests: .venv/dev.stamp
	$(BIN)/mypy --config-file tests/mypy.ini

# The pages of docs/, with notebooks that are run, into site/. Any warning fails.
docs: .venv/dev.stamp
	@rm -rf site
	$(BIN)/python -m sphinx -j auto -E -W --keep-going -q -d build/doctrees docs site
	@echo "site/index.html"

# atheris has wheels for Linux on x86-64 alone, so it is in no other target.
fuzz: .venv/fuzz.stamp
	$(BIN)/python tests/fuzzing/fuzz.py

dist: .venv/dev.stamp
	@rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --outdir dist .
	$(BIN)/python release/contents.py dist

# PyTorch for CPUs; the build that PyPI has brings gigabytes of CUDA. build/lib could have modules that are gone.
wheelhouse: .venv/bin/python
	@rm -rf $(WHEELHOUSE) build/lib
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m pip wheel --quiet --disable-pip-version-check \
		--extra-index-url $(TORCH_INDEX) --wheel-dir $(WHEELHOUSE) '.[$(EXTRAS)]'
	@du -sh $(WHEELHOUSE)

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/torch.stamp: .venv/bin/python pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[torch]'
	@touch $@

.venv/flare.stamp: .venv/torch.stamp
	$(PIP) --editable '.[flare]'
	@touch $@

.venv/dev.stamp: .venv/torch.stamp
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps --requirement tests/flower.txt
	@touch $@

.venv/fuzz.stamp: .venv/dev.stamp
	$(PIP) --editable '.[fuzz]'
	@touch $@

clean:
	rm -rf .venv site build dist wheelhouse runs src/*.egg-info
