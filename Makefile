# Everything here runs on a machine with Python 3.10+ and make: the virtual environment is made on
# first use. PYTHON picks another interpreter, PYTEST_ARGS adds options.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NEWEST := .venv-newest
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
JOBS ?= auto
export TOKENIZERS_PARALLELISM = false

.PHONY: help demo test test-all test-newest lint bench format clean

help:
	@echo "make demo      generate text with a real model on the CPU reference"
	@echo "make test      the test suite, in parallel"
	@echo "make test-all  the same with the slow tests"
	@echo "make test-newest  the CPU core on the newest torch, in a virtual environment of its own"
	@echo "make lint      ruff, mypy --strict, import rules"
	@echo "make bench     the benchmarks of this machine's backends"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/python -m devgraph demo

test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(PYTEST_ARGS)

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) $(PYTEST_ARGS)

$(NEWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --upgrade torch -e ".[test]"
	touch $@

test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest --pyargs devgraph.testing.conformance -n $(JOBS) -m "not slow" \
		--devgraph-backend cpu $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) $(NEWEST) build dist .mypy_cache .ruff_cache .pytest_cache .cache
