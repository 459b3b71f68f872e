# make demo, make test, make test-slow, make mutants: each makes .venv first when it is missing.
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

.PHONY: .venv demo test lint test-slow test-gpu mutants clean

.venv: $(COMPLETE)

$(COMPLETE): $(LOCKS)
	@rm -rf .venv && requirements/install.sh .venv $(if $(GPU),gpu,cpu)

demo: .venv
	@$(BIN)/forage demo --seed $(SEED) --retrieval $(RETRIEVAL)

lint: .venv
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

test: lint
	@$(BIN)/python -m pytest -m "not slow and not gpu" --durations=5

# Runs wait for much of their time: the other slow tests run beside them, and are shown afterwards.
SLOW := $(BIN)/python -m pytest -m "slow and not gpu" --durations=10 --timeout=1500
test-slow: .venv
	@others=$$(mktemp); $(SLOW) --ignore=tests/integration >$$others 2>&1 & beside=$$!; \
	trap "kill $$beside 2>/dev/null" EXIT; \
	$(SLOW) tests/integration; code=$$?; \
	wait $$beside || code=1; cat $$others; rm -f $$others; exit $$code

test-gpu:
	@$(MAKE) --no-print-directory GPU=1 .venv
	@$(BIN)/python -m scripts.gpu_checks

mutants: .venv
	@$(BIN)/python -m scripts.mutants

clean:
	@rm -rf .venv .cache .mutants
