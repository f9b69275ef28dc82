# Everything runs in .venv, which is made on first use and again when pyproject.toml or constraints.txt changes.

PYTHON ?= python3
SLOW ?= 0
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := $(VENV)/.docs

# SLOW=0 leaves the slow tests out, SLOW=1 runs all tests, SLOW=only runs nothing but the slow ones.
SELECT_0 := -m "not slow"
SELECT_1 :=
SELECT_only := -m slow

ifeq ($(filter $(SLOW),0 1 only),)
$(error SLOW is '$(SLOW)': write SLOW=0, SLOW=1 or SLOW=only)
endif

export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test browser lint docs bench bench-quick clients clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s  %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(STAMP)  ## Train, make Bayesian, compare: a table, two figures and report pages, in under a minute
	$(BIN)/laplace demo

test: $(STAMP) browser  ## Run the tests (SLOW=1 for all of them, SLOW=only for the slow ones, PYTEST_ARGS=... for more)
	$(BIN)/python -m pytest -n 2 $(SELECT_$(SLOW)) $(PYTEST_ARGS)

browser:  ## Install Chromium from Debian for the tests of report pages, which are skipped where that fails
	@command -v chromium >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1 || \
	      { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1; }; } || \
	    echo "No Chromium here: the tests in a browser are skipped."; }

lint: $(STAMP)  ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: $(DOCS)  ## Build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)  ## Time and memory of fit and prediction, last layer and all weights, beside laplace-torch and curvlinops
	$(BIN)/python benchmarks/last_layer.py
	$(BIN)/python benchmarks/all_weights.py
	$(BIN)/python benchmarks/beside_curvlinops.py

bench-quick: $(STAMP)  ## Compare a few speed ratios with the committed ones, in under two minutes (QUICK=--report: never fail if busy)
	$(BIN)/python benchmarks/quick.py $(QUICK)

clients: $(STAMP)  ## Run the tests of laplace-torch and of libraries that use it against this package (CLIENTS=... for some)
	$(BIN)/python benchmarks/clients.py $(CLIENTS)

clean:  ## Remove the environment, caches, the built documentation and what the demo drew
	rm -rf $(VENV) build dist site laplace-demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --no-compile -q -c constraints.txt --no-deps bayesian-torch  # it asks for torchvision, and runs without
	@touch $@

$(DOCS): $(STAMP)
	$(BIN)/pip install --no-compile -q -c constraints.txt -e '.[docs]'
	@touch $@
