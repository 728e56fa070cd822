# Needs only make and Python 3.11 or newer; everything else is installed into .venv.
PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
LONG_MINUTES ?= 30
LONG_SEED ?=
BASE ?=
MACHINE ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PROJECTS := $(wildcard packages/*/pyproject.toml)
EDITABLE := $(patsubst %/pyproject.toml,-e %,$(PROJECTS))

.DEFAULT_GOAL := help
.PHONY: help .venv demo test test-slow test-long test-gpu bench bench-compare site lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[.a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  settings:  PYTHON=python3.12  DEMO_ARGS="..."  PYTEST_ARGS="..."  LONG_MINUTES=3  LONG_SEED=1  BASE=HEAD^'

.venv: $(STAMP)  ## the environment with all packages, editable; redone when their requirements change

$(STAMP): constraints.txt requirements-dev.txt requirements-alone.txt $(PROJECTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'Python 3.11 or newer is needed: make PYTHON=python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -r requirements-dev.txt $(EDITABLE)
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -c constraints.txt -r requirements-alone.txt
	@touch $@

demo: $(STAMP)  ## train a small model on real text with every installed transport
	$(BIN)/python examples/train_text.py $(DEMO_ARGS)

test: $(STAMP)  ## the tests, without the slow ones and those for a GPU
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST_ARGS) tests

# pytest ends with 5 where no test is marked slow.
test-slow: $(STAMP)  ## the slow tests
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS) tests || [ $$? -eq 5 ]

# A round of it may take longer than the time after which other tests count as hung.
test-long: $(STAMP)  ## random steps, saves and loads for half an hour, from a seed that is printed
	LONG_MINUTES=$(LONG_MINUTES) LONG_SEED=$(LONG_SEED) $(BIN)/python -m pytest \
	  -o faulthandler_timeout=0 -k long_time $(PYTEST_ARGS) tests/property/test_steps.py

test-gpu: $(STAMP)  ## the tests that need CUDA
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS) tests

bench: $(STAMP)  ## all benchmarks of this commit, kept by asv
	$(BIN)/python -m benchmarks.compare HEAD $(addprefix --machine ,$(MACHINE))

bench-compare: $(STAMP)  ## all benchmarks of this commit and of BASE=...; fails where a count rose
	@[ -n "$(BASE)" ] || { echo 'make bench-compare BASE=COMMIT' >&2; exit 2; }
	$(BIN)/python -m benchmarks.compare $(BASE) $(addprefix --machine ,$(MACHINE))

site: $(STAMP)  ## the pages of what asv has kept, under build/site; needs npm
	$(BIN)/python -m benchmarks.site_of_results

lint: $(STAMP)  ## ruff, mypy and the import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)  ## sort imports, mend what ruff can, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove caches, builds and the demo's output; .venv stays
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache demo build dist
	rm -rf packages/*/dist packages/*/build
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
