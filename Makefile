# make demo, make wiki, make test, make test-slow, make test-soak, make mutants: each makes .venv first when it is missing.
# `make help` lists all of them.
# GPU=1: for NVIDIA GPUs, in an environment of its own, .venv-gpu; neither touches the other's.
SHELL := /bin/bash
.DEFAULT_GOAL := .venv
PYTHON ?= python3
SEED ?= 0
RETRIEVAL ?= bm25
export PYTHON
LOCKS := $(filter-out requirements/docs.lock,$(wildcard requirements/*))
GPU ?=
VENV := .venv$(if $(GPU),-gpu)
BIN := $(VENV)/bin
COMPLETE := $(VENV)/.complete
DOCS := .venv-docs

.PHONY: help .venv demo wiki test lint test-slow test-soak test-gpu mutants docs clean

help:  ## this list
	@awk -F ':.*  ## ' '/^[.a-z-]+:.*  ## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv: $(COMPLETE)  ## install into .venv (GPU=1: for GPUs, into .venv-gpu)

$(COMPLETE): $(LOCKS)
	@rm -rf $(VENV) && requirements/install.sh $(VENV) $(if $(GPU),gpu,cpu)

demo: .venv  ## train and evaluate the demo (SEED=1, RETRIEVAL=dense)
	@$(BIN)/forage demo --seed $(SEED) --retrieval $(RETRIEVAL)

# QUICK=1: fewer steps and questions; STEPS=80 takes a trained one further.
wiki: .venv  ## a real model, real text (SEED=, RETRIEVAL=, QUICK=1, STEPS=80)
	@$(BIN)/forage demo wiki --seed $(SEED) --retrieval $(RETRIEVAL) \
		$(if $(filter-out 0,$(QUICK)),--quick) $(if $(STEPS),--steps $(STEPS))

lint: .venv  ## ruff, mypy and the import contracts
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

# A file of tests is one worker's; what waits in one leaves the machine to the other.
PYTEST := $(BIN)/python -m pytest
# Fast tests wait more than they compute: three workers keep two cores busy.
WORKERS ?=
BESIDE := --no-loadscope-reorder -n

test: lint  ## lint, and the fast tests
	@$(PYTEST) $(BESIDE) $(or $(WORKERS),3) -m "not slow and not soak and not gpu" --durations=5

test-slow: .venv  ## the end-to-end tests
	@mkdir -p .cache && $(PYTEST) $(BESIDE) $(or $(WORKERS),2) -m "slow and not soak and not gpu" --durations=10 --timeout=1500

# What takes long, in parts that go on where they were interrupted: make test-soak [PART=name] [FRESH=1]
PART ?= all
FRESH ?=
export CHAOS ?= -m tests.faults.chaos
test-soak: .venv  ## what takes hours, in parts (PART=name, FRESH=1)
	@$(PYTEST) -p tests.soak --soak $(PART) $(if $(FRESH),--fresh) -v --durations=10 --timeout=1800

# Part A needs a CUDA torch alone: where there is no environment, PYTHON's.
test-gpu: $(if $(filter A,$(PART)),,.venv)  ## all that needs a GPU, in one call (GPU=1; PART=A or B)
	@$(if $(filter A,$(PART)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(BIN)/python) -m tests.gpu.checks --part $(PART)

mutants: .venv  ## plant known faults; each must turn a test red
	@$(BIN)/python -m tests.mutants.mutants

$(DOCS)/.complete: requirements/docs.lock
	@rm -rf $(DOCS) && $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --require-hashes -r $<
	@touch $@

# Without --quiet, under which mkdocs counts no warning and nothing is strict.
docs: $(DOCS)/.complete  ## build the pages as a site
	@PYTHONPATH=. NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "the site is in .cache/site; to look at it: python3 -m http.server -b 127.0.0.1 -d .cache/site"

clean:  ## remove .venv (GPU=1: .venv-gpu), .venv-docs and all caches
	@rm -rf $(VENV) $(DOCS) .cache .mutants
