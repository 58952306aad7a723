# Every target sets up what it needs: `make demo` and `make test` work in a fresh clone.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
NEEDS_PYTHON := import sys; found = sys.version_info[:2]; \
	sys.exit(None if (3, 11) <= found < (3, 14) else "hrl needs Python 3.11 to 3.13 and $(PYTHON) is %d.%d; try make install PYTHON=python3.11" % found)
UV_VERSION := 0.13.8
VENV := .venv
BIN := $(VENV)/bin

# Only a machine with an NVIDIA GPU gets the CUDA builds.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
LOCK := requirements/$(if $(HAS_GPU),gpu,cpu).lock
STAMP := $(VENV)/.installed-from-$(notdir $(LOCK))
DEV_STAMP := $(VENV)/.installed-from-dev.lock

# If PIP_FIND_LINKS says where wheels are, uv looks there too; otherwise uv picks the CPU builds of torch.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
BACKEND := $(if $(HAS_GPU)$(strip $(UV_FIND_LINKS)),,--torch-backend cpu)

.PHONY: help install install-dev demo bench docs test test-engines test-one-half test-other-half test-rest test-fast test-fast-one-half test-fast-other-half test-gpu first-light chaos rehearse mutation sbom audit models lint type format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

install: $(STAMP)  ## the virtual environment, from the lock file (a second call does nothing)

$(STAMP): $(LOCK) pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c '$(NEEDS_PYTHON)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(BACKEND) --no-deps -r $(LOCK)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@# Every rank and engine imports torch and vLLM; if Python may not write compiled files then, compile them here.
	@# (Some packages have files for a newer Python, which this one can't compile and never imports; others' warnings of syntax
	@# are not for whoever installs hrl.)
	$(if $(PYTHONDONTWRITEBYTECODE),$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true)
	@touch $@

install-dev: $(DEV_STAMP)  ## the same, and what tests and the documentation need

$(DEV_STAMP): requirements/dev.lock requirements/trackers.lock requirements/stores.lock requirements/environments.lock requirements/agents.lock requirements/optimizers.lock requirements/quantizers.lock $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r requirements/dev.lock
	@# Trackers go into a folder of their own, where only their tests look: other packages import those that they find.
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/trackers -r requirements/trackers.lock
	@# So does a server of S3, which tests run as a process of its own: its client wants an older python-dateutil.
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/stores -r requirements/stores.lock
	@# And environments of others, which want older or newer packages than those that a run has.
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/environments -r requirements/environments.lock
	@# And frameworks for agents, which tests let play episodes.
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/agents -r requirements/agents.lock
	@# And packages of optimizers and of weights in 4 bits, which transformers and peft would import in every process.
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/optimizers -r requirements/optimizers.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(VENV)/quantizers -r requirements/quantizers.lock
	@touch $@

demo: install  ## GRPO teaches a 135M model to add, with vLLM, on this machine
	$(BIN)/python -m hrl.trainer.main_ppo

# A test that starts a process would otherwise have it compile the package anew.
test-engines test-one-half test-other-half test-rest test-fast-one-half test-fast-other-half: export PYTHONDONTWRITEBYTECODE :=

# Three processes at a time, each output in one piece: most of what a test waits for is one core that imports torch, or a deadline.
TOGETHER := $(MAKE) --no-print-directory -j3 -O
# What each test took stays in build/.
PYTEST = $(BIN)/python -m pytest --junitxml=build/$@.xml
FAST := -m "not engine and not gpu and not cluster and not site"
WITHOUT_ENGINES := -m "not engine and not gpu"
ONE_HALF := $(addprefix tests/,workers single_controller runs reward cluster processes)
# Of both halves: what the process that ends first goes on with.
REST := $(addprefix tests/,runs/test_notebooks.py rehearse)
# To collect all others takes half a minute. (tests/conftest.py holds that a file names the marks of its tests.)
WITH_ENGINES = $(shell grep -rlE --include='test_*.py' 'pytest\.mark\.(engine|gpu)' tests | sort)

test: lint  ## everything CI runs
	@echo 'types and tests are checked in three processes; each shows its output when it ends'
	@$(TOGETHER) type test-one-half test-other-half test-engines test-rest

test-fast: install-dev  ## the tests that need no real engine, no Ray, no second rank, no whole run and no built site
	@echo 'tests run in two processes; each shows its output when it ends'
	@$(TOGETHER) test-fast-one-half test-fast-other-half

test-engines:
	$(PYTEST) -m "engine or gpu" $(WITH_ENGINES)

test-one-half:
	$(PYTEST) $(WITHOUT_ENGINES) $(ONE_HALF) $(REST:%=--ignore=%)

test-other-half:
	$(PYTEST) $(WITHOUT_ENGINES) $(ONE_HALF:%=--ignore=%) $(REST:%=--ignore=%)

test-rest:
	$(PYTEST) $(WITHOUT_ENGINES) $(REST)

test-fast-one-half:
	$(PYTEST) $(FAST) $(ONE_HALF)

test-fast-other-half:
	$(PYTEST) $(FAST) $(ONE_HALF:%=--ignore=%)

test-gpu: install-dev  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu

# Needs no install: the first stages run with torch and transformers alone.
first-light:  ## what to run first on a machine with a GPU: an hour at most, one table (docs/first-gpu.md)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m tests.first_light

chaos: install-dev  ## every known fault against real runs: fault, score, seconds, message; NAME="is killed" injects those of that name
	$(BIN)/python -m tests.chaos $(if $(NAME),"$(NAME)")

rehearse: install-dev  ## every file of configs/size on this machine, with tiny models (minutes); NAME="7b_8x80gb" rehearses one
	$(BIN)/python -m tests.rehearse.sizes $(NAME)

sbom: install-dev  ## build/sbom.json: every pinned package with version and licence, as CycloneDX
	mkdir -p build
	$(BIN)/python requirements/sbom.py > build/sbom.json

audit: install-dev  ## known vulnerabilities of every pinned package; asks osv.dev, and a package that it can't ask about is an error
	set -e; for lock in requirements/*.lock; do echo "$$lock"; $(BIN)/uv tool run pip-audit==2.10.1 --strict --vulnerability-service osv --no-deps --disable-pip -r $$lock; done

mutation: install-dev  ## put known mistakes into the maths and count how many the tests notice (minutes)
	$(BIN)/python -m tests.mutation.run

models: install-dev  ## docs/models.md: every causal family of transformers against its own forward (minutes)
	$(BIN)/python -m tests.models.table > docs/models.md.new
	mv docs/models.md.new docs/models.md

bench: install-dev  ## hrl against its peers, installed apart; NAME="gae balance" runs some, whole steps come last (bench/RESULTS.md)
	$(BIN)/python -m bench $(NAME)

docs: install-dev  ## this documentation as a site, in build/docs; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --quiet docs build/docs

lint: install-dev  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: install-dev  ## mypy
	$(BIN)/mypy

format: install-dev  ## let ruff write the format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment and caches, keep runs
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
