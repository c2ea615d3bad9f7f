# Two commands do everything on a fresh machine with Python: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: help setup demo test tests sources test-all test-levels sanitize check docs format clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/installed ## Create .venv and install the package, editable, with everything that tests and peers need

$(VENV)/installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[torch,jax,hf,embed,lab,docs,dev]'
	@touch $@

demo: setup ## Train four position methods short, test them long, write a report (about five minutes on two cores)
	$(BIN)/alibi run quick --out runs/quick

test: setup ## Formatting, lint, types, architecture, and every test
	@$(MAKE) --no-print-directory -j 2 sources tests

test-all: setup check ## The same with full case lists in every dtype, long fuzzes, the built wheel and sdist (half an hour on two cores)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "long or not long" --timeout 1800

test-levels: setup ## The C++ kernels compiled for every level of instructions that this processor has: cases and random calls (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/attention/backends/test_native_levels.py -m "long or not long" --timeout 1800

sanitize: setup ## The C++ kernels under the address and undefined-behavior sanitizers: cases and random calls (minutes)
	$(BIN)/python tests/support/fuzz/sanitized.py

# `tests` includes the architecture test. Both run at the same time in `make test`, because mypy alone leaves a core idle.
tests: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

sources: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: sources ## Formatting, lint, types, architecture
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: setup ## The pages of docs/ and the API as a site, build/site/index.html; a broken link or a warning fails
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs build/site

format: setup ## Format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv and caches (never results/ or runs/)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
