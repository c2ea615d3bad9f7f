# Two commands do everything on a fresh machine with Python: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
OWNER := $(BIN)/python tests/support/processes/environment_owner.py $(VENV) $(CURDIR)

.PHONY: help setup ready demo quick quick-torch quick-more test tests sources test-all gpu test-lesser test-levels sanitize wheels release-check check docs format clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: ## Create .venv and install this checkout, editable, with everything that tests and peers need
	@$(OWNER) 2> /dev/null || rm -f $(VENV)/installed
	@$(MAKE) --no-print-directory $(VENV)/installed

# What the other targets need. Only `make setup` installs into an environment that has the package of another checkout.
ready:
	@test ! -x $(BIN)/python || $(OWNER)
	@$(MAKE) --no-print-directory $(VENV)/installed

# pip installs torch, also from its own index or a local file (PIP_FIND_LINKS). uv installs everything else in a third of pip's
# time; where it cannot (a mirror that only pip knows), pip does. compileall uses all cores and does not mind a template that is
# not Python; of transformers' models only a few are imported.
INSTALL := pip install --quiet --constraint constraints.txt --editable '.[torch,jax,hf,embed,lab,dev]'
$(VENV)/installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile "$$(grep '^torch==' constraints.txt)" "$$(grep '^uv==' constraints.txt)"
	VIRTUAL_ENV=$(abspath $(VENV)) $(BIN)/python -m uv $(INSTALL) || $(BIN)/python -m $(INSTALL) --no-compile
	$(BIN)/python -m compileall -qq -j 0 -x '/(tests?|models|mypy|pip|selenium)/' $(VENV)/lib || true
	@touch $@

demo: ready ## Train four position methods short, test them long, write a report (five minutes on two cores)
	$(BIN)/alibi run quick --out runs/quick

# Each of these files takes a few seconds of a processor or less without what compiles, and together they call most of the library.
# There are two runs, because each imports only what it needs: PyTorch alone, and torch.compile's code, transformers and JAX, whose
# compiled programs stay in build/xla.
QUICK_TORCH := $(addprefix tests/, test_reach.py test_units.py $(addprefix attention/, test_spec.py test_refusals.py \
    test_key_bias.py test_merging.py test_cut_gates.py test_varlen.py test_sink_logits.py \
    $(addprefix backends/, test_cpu.py test_dense.py test_native_decoding.py)) $(addprefix nn/, test_attention.py \
    test_block.py test_cache.py test_cross_attention.py test_gates.py test_gated_cache.py test_parts.py linear/test_fastest.py))
QUICK_MORE := $(addprefix tests/, attention/test_hints.py nn/test_static_cache.py cli/test_embed.py $(addprefix hf/, \
    test_cache.py test_cache_sequences.py test_packed_rows.py) $(addprefix jax/, test_gpu_plan.py test_modules.py) \
    distributed/test_attention.py)

quick: ready ## Run the library's fast tests (90 seconds of one core)
	@$(MAKE) --no-print-directory -j 2 quick-torch quick-more

quick-torch: FILES := $(QUICK_TORCH)
quick-more: FILES := $(QUICK_MORE)
quick-torch quick-more: export JAX_COMPILATION_CACHE_DIR := build/xla
quick-torch quick-more: export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
quick-torch quick-more:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -k 'not compile and not one_graph' $(FILES)

test: ready ## Check formatting, lint, types and architecture, and run the tests
	@$(MAKE) --no-print-directory -j 2 sources tests

test-all: ready check ## The same with full case lists, long fuzzes, the built wheel and sdist, and `test-lesser` (an hour on two cores)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[index,notebooks,onnx,ray,wheels,docs]'
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target build/triton-3.6.0 triton==3.6.0
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile -m "long or not long" --timeout 1800
	@$(MAKE) --no-print-directory test-lesser

test-lesser: ready ## Run the tests with features of this processor hidden: AVX2 only, then AVX-512 without bf16 and VNNI
	for level in avx2 avx512; do \
	    OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --processor $$level || exit 1; \
	done

test-levels: ready ## Test the C++ kernels compiled for every instruction level of this processor (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/attention/backends/test_native_levels.py -m "long or not long" --timeout 1800

sanitize: ready ## Test the C++ kernels under the address and undefined-behavior sanitizers (minutes)
	$(BIN)/python tests/support/fuzz/sanitized.py

gpu: ## Check the Triton kernels on a GPU, attack their certificate and time them: eight minutes, results in runs/gpu
	$(PYTHON) tests/support/interpreter/everything_on_device.py runs/gpu

wheels: ready ## Build and check the wheels of all systems and the sdist, in dist/ (minutes)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[wheels]'
	rm -rf dist
	$(BIN)/python release/wheels.py dist
	$(BIN)/python release/check.py dist
	rm -rf build/hub-kernel
	$(BIN)/python release/hub_kernel.py dist build/hub-kernel

release-check: wheels ## Check everything a release needs: version, CHANGELOG, wheels, and the package from its wheel
	$(BIN)/python release/check.py dist --release

# `tests` includes the architecture test. Both run at the same time in `make test`, because mypy alone leaves a core idle.
tests: ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

sources: ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: sources ## Check formatting, lint, types and architecture (seconds)
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: ready ## Build the site, build/site/index.html, from docs/ and the docstrings; fails on a broken link or a warning
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs build/site

format: ready ## Format the code and apply automatic fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove .venv and caches (never results/ or runs/)
	@test ! -x $(BIN)/python || $(OWNER)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
