# Everything here runs on a machine with Python 3.10+ and make: the virtual environment is made on
# first use. PYTHON picks another interpreter, PYTEST_ARGS adds options.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# As in pyproject.toml.
OLDEST_TORCH := 2.11
OLDEST_TRANSFORMERS := 5.10
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# Where torch comes from first: without an NVIDIA GPU the CPU build, 200 MB instead of gigabytes of
# CUDA. Empty means pip's own index.
TORCH_INDEX ?= $(shell nvidia-smi -L >/dev/null 2>&1 || echo https://download.pytorch.org/whl/cpu)
NPU := .cache/torch-npu
PYTEST_ARGS ?=
JOBS ?= auto
export TOKENIZERS_PARALLELISM = false
# Bytecode is kept, whatever the environment says: the tests start dozens of processes that import
# torch, and each would compile it for seven seconds.
export PYTHONDONTWRITEBYTECODE =

OTHER_VERSIONS := newest oldest transformers-newest transformers-oldest
.PHONY: help demo test fuzz test-all test-npu $(OTHER_VERSIONS:%=test-%) $(OTHER_VERSIONS:%=install-%) lint docs bench format clean

help:
	@echo "make demo      generate text with a real model on the CPU reference"
	@echo "make test      the test suite, in parallel"
	@echo "make test-all  the same with the slow tests"
	@echo "make test-npu  the Ascend part of it, on torch-npu over a simulated driver (needs g++)"
	@echo "make test-newest  the conformance suite of the CPU and the tests of piecewise, on the newest torch"
	@echo "make test-oldest  the same on the oldest torch that devgraph takes"
	@echo "make test-transformers-newest  the tests of its integration on the newest transformers"
	@echo "make test-transformers-oldest  the same on the oldest that devgraph takes"
	@echo "make fuzz      random work against eager for MINUTES (10), with new seeds"
	@echo "make lint      ruff, mypy --strict, import rules, spelling"
	@echo "make docs      the documentation as a site, with search and the API reference"
	@echo "make bench     the benchmarks of this machine's backends"

# Only what is imported is compiled, when it is: compiling all takes half of the time of an install
# and 200 MB. What warns when it is compiled is an error in the tests, so theirs is compiled before.
INSTALL := -m pip install --quiet --no-compile
COMPILED := -m pip install --quiet
# $(call torch,PYTHON,WHAT) installs torch alone from TORCH_INDEX, then what it needs, and torch itself
# where TORCH_INDEX does not answer, from pip's own index.
define torch
	@test -z "$(TORCH_INDEX)" || $(1) $(INSTALL) --quiet --no-deps --retries 0 --timeout 15 \
		--index-url $(TORCH_INDEX) $(2) || \
		echo "$(TORCH_INDEX) gave no torch: taking that of pip's own index, which may bring CUDA"
	$(1) $(INSTALL) $(2)
endef

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) --upgrade pip
	$(call torch,$(BIN)/python,-c constraints.txt torch)
	$(BIN)/python $(INSTALL) -c constraints.txt -e ".[demo]"
	touch $@

$(STAMP): $(DEMO_STAMP)
	$(BIN)/python $(COMPILED) -c constraints.txt -e ".[dev]"
	touch $@

demo: $(DEMO_STAMP)
	$(BIN)/python -m devgraph demo

# Each worker has a core: threads of their own would take turns on it.
test test-all test-npu $(OTHER_VERSIONS:%=test-%): export OMP_NUM_THREADS = 1
test: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m "not slow and not npu" $(PYTEST_ARGS)
	$(MAKE) --no-print-directory test-npu

test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) -m "not npu" $(PYTEST_ARGS)
	$(MAKE) --no-print-directory test-npu NPU_MARKS=npu

# torch-npu changes torch, and transformers cannot be imported beside one without a driver. So it has
# a folder and a session of its own; without it or g++ the session's tests are skipped and say why.
NPU_MARKS = npu and not slow
NPU_TESTS = devgraph/testing/conformance tests/npu tests/sim/ascend tests/fuzz tests/marks \
	$(NEUTRAL:%=tests/api/test_%.py) tests/policy/test_breakable.py tests/policy/test_policy.py
# Tests of programs and their state, on the backend under test.
NEUTRAL = backend capture cases_state graph inputs named owned planted pool prove reach
test-npu: $(STAMP)
	@test -d $(NPU)/torch_npu || ! command -v g++ >/dev/null || \
		$(BIN)/python $(COMPILED) --no-deps --target $(NPU) "torch-npu==$$($(BIN)/python \
			-c 'import torch; print(".".join(torch.__version__.split(".")[:2]))').*" || \
		echo "torch-npu cannot be had for this torch and Python: its tests are skipped"
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH=$(CURDIR):$(CURDIR)/$(NPU) $(BIN)/python -m pytest \
		-n $(JOBS) -m "$(NPU_MARKS)" -o devgraph_backend=npu -p tests.sim.ascend.activated \
		$(NPU_TESTS) $(PYTEST_ARGS)

MINUTES ?= 10
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz.driver $(MINUTES)

.venv-newest/.installed: TORCH := torch
.venv-oldest/.installed: TORCH := torch==$(OLDEST_TORCH).*
.venv-newest/.installed .venv-oldest/.installed: .venv-%/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python $(INSTALL) --upgrade pip
	$(call torch,.venv-$*/bin/python,--upgrade "$(TORCH)")
	.venv-$*/bin/python $(COMPILED) "$(TORCH)" -e ".[test]"
	touch $@

# Another transformers lies in a folder before the packages of the environment, beside its torch. The
# newest ignores the bound of pyproject.toml, so that a release that breaks something is seen.
.cache/transformers-newest/.installed: TRANSFORMERS := transformers
.cache/transformers-oldest/.installed: TRANSFORMERS := transformers==$(OLDEST_TRANSFORMERS).*
.cache/transformers-newest/.installed .cache/transformers-oldest/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/python $(COMPILED) --target $(@D) "$(TRANSFORMERS)"
	touch $@

install-newest install-oldest: install-%: .venv-%/.installed
install-transformers-newest install-transformers-oldest: install-%: .cache/%/.installed

test-transformers-newest test-transformers-oldest: test-%: .cache/%/.installed
	PYTHONPATH=$(CURDIR)/.cache/$* $(BIN)/python -m pytest tests/integrations/transformers tests/zoo \
		-n $(JOBS) -m "not slow" $(PYTEST_ARGS)

test-newest test-oldest: test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest --pyargs devgraph.testing.conformance -n $(JOBS) -m "not slow" \
		--devgraph-backend cpu $(PYTEST_ARGS)
	.venv-$*/bin/python -m pytest tests/policy/test_piecewise.py -n $(JOBS) $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

docs: .venv-docs/.installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "the site: .cache/site/index.html"

.venv-docs/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(INSTALL) --upgrade pip
	.venv-docs/bin/python $(INSTALL) --group docs
	touch $@

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) .venv-newest .venv-oldest .venv-docs build dist .mypy_cache .ruff_cache .pytest_cache .cache
