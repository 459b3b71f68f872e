# make demo, make test, make test-slow, make test-soak, make mutants: each makes .venv first when it is missing.
# With GPU=1, .venv is made for NVIDIA GPUs, and so is what runs in it.
SHELL := /bin/bash
PYTHON ?= python3
SEED ?= 0
RETRIEVAL ?= bm25
export PYTHON
BIN := .venv/bin
LOCKS := $(wildcard requirements/*)
GPU ?=
COMPLETE := .venv/.complete$(if $(GPU),-gpu)

.PHONY: .venv demo test lint test-slow test-soak test-gpu mutants clean

.venv: $(COMPLETE)

$(COMPLETE): $(LOCKS)
	@rm -rf .venv && requirements/install.sh .venv $(if $(GPU),gpu,cpu)

demo: .venv
	@$(BIN)/forage demo --seed $(SEED) --retrieval $(RETRIEVAL)

lint: .venv
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

# A file of tests is one worker's; what waits in one leaves the machine to the other.
PYTEST := $(BIN)/python -m pytest
WORKERS ?= 2
BESIDE := -n $(WORKERS) --no-loadscope-reorder

test: lint
	@$(PYTEST) $(BESIDE) -m "not slow and not soak and not gpu" --durations=5

test-slow: .venv
	@mkdir -p .cache && $(PYTEST) $(BESIDE) -m "slow and not soak and not gpu" --durations=10 --timeout=1500

# What takes long, in parts that go on where they were interrupted: make test-soak [PART=name] [FRESH=1]
PART ?= all
FRESH ?=
export CHAOS ?= -m tests.faults.chaos
test-soak: .venv
	@$(PYTEST) -p tests.soak --soak $(PART) $(if $(FRESH),--fresh) -v --durations=10 --timeout=1800

test-gpu:
	@$(MAKE) --no-print-directory GPU=1 .venv
	@$(BIN)/python -m tests.gpu.checks

mutants: .venv
	@$(BIN)/python -m tests.mutants.mutants

clean:
	@rm -rf .venv .cache .mutants
