# Needs only python3 (>= 3.10) with its venv module; everything else goes into $(VENV).
#
#   make demo        train a small GPT-MoE, kill it, watch it come back
#   make test        the tests, without the slow ones
#   make check       style, types and the tests that take seconds
#   make help        all targets
#
# PYTHON=python3.12  another interpreter      VENV=/some/dir  another place for the environment
# PYTEST="-k moc"    more pytest arguments    DEMO=, BENCH=   arguments of the demo and the benchmark
# CONSTRAINTS=FILE   the versions that pip installs
# WORKERS=4          processes that `make test` runs tests in, file by file; a test may start up to 8 more. One more
#                    than there are cores serves best: some tests wait for a timeout

PYTHON ?= python3
VENV ?= .venv
PYTEST ?=
CONSTRAINTS ?= constraints-cpu.txt
WORKERS ?= 3
DEMO ?=
BENCH ?=

PY := $(VENV)/bin/python
STAMP := $(VENV)/.moe_ckpt_installed

.DEFAULT_GOAL := help
# The newest release of Megatron-Core asks for Python 3.12, but runs on the others too. Tests of what may differ.
MEGATRON_NEW := 0.19.2
LAUNCHED := tests/integration/test_launch_programs.py::test_a_rank_is_killed_and_all_go_on
EXAMPLE := tests/integration/test_examples.py::test_it_runs_without_arguments
VENV_NEW := $(VENV)-megatron-$(MEGATRON_NEW)
STAMP_NEW := $(VENV_NEW)/.moe_ckpt_installed
PY_NEW := MEGATRON_LM="$$MEGATRON_LM_NEW" $(VENV_NEW)/bin/python
TESTS_NEW := $(patsubst %,tests/megatron/test_%.py,bad_input bridge cuda_graphs dense_models exact fused_adam \
  gradient_log inventory localized megatron_cpu megatron_lm moc optimizer_changed param_groups parameters reshard \
  routing topology torch_dist weights_from) '$(EXAMPLE)[with_bridge]'

# torchtitan brings many packages, which other tests are to be without. It needs Python 3.11.
VENV_TITAN := $(VENV)-torchtitan
STAMP_TITAN := $(VENV_TITAN)/.moe_ckpt_installed
TITAN := $(shell $(PYTHON) -c 'import sys; print(int(sys.version_info >= (3, 11)))' 2>/dev/null)

.PHONY: help demo demo-megatron check unit test test-slow test-oldest test-newest test-torchtitan lint types docs bench bench-papers bench-reality setup belongs clean

help: ## Say what there is
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

demo: $(STAMP) ## Train without failures, and with Dense, MoC, MoEvement and Gemini under kills; table and report.html
	@$(PY) recipes/gpt_moe_lightning/demo.py $(DEMO)

demo-megatron: $(STAMP) ## The real Megatron-Core on 4 CPU processes (PP2 x EP2), with and without kills; table
	@$(PY) recipes/gpt_moe_megatron/demo.py $(DEMO)

IN_PARALLEL := -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Without processes and training; test_policies_faults* play thousands of failures.
UNIT := $(filter-out %_faults.py %_faults_memory.py,$(wildcard $(patsubst %,tests/unit/test_%.py,cadence coverage format_* \
  ledger lock operators options placement policies_* reader recovery_plan restore retention run_ledger storage_* tokens \
  tree verify window)))

check: lint types unit ## Style, types, and the tests of `make unit`

unit: $(STAMP) ## Run the tests of policies, ledger, files and storage; less than a minute
	@$(PY) -m pytest -q -n 2 --dist loadfile $(UNIT) $(PYTEST)

test: $(STAMP) $(STAMP_NEW) ## Run the tests; those of what differs between releases of Megatron-Core with two
	@$(PY) -m pytest $(IN_PARALLEL) $(PYTEST)
	@$(if $(PYTEST),,$(PY_NEW) -m pytest $(IN_PARALLEL) $(TESTS_NEW))
	@$(if $(PYTEST),,$(if $(filter 1,$(TITAN)),$(MAKE) --no-print-directory test-torchtitan,true))

test-torchtitan: $(STAMP_TITAN) ## Run the tests of torchtitan's adapter, with torchtitan
	@$(VENV_TITAN)/bin/python -m pytest -q -n $(WORKERS) tests/integration/test_torchtitan.py \
	  '$(EXAMPLE)[with_torchtitan]' '$(LAUNCHED)[titan]' $(PYTEST)

test-newest: $(STAMP_NEW) ## Run all tests of the Megatron adapter with the newest Megatron-Core
	@$(PY_NEW) -m pytest $(IN_PARALLEL) tests/megatron $(PYTEST)

test-slow: $(STAMP) ## Run the tests that take minutes, and the cases that the others leave out
	@$(PY) -m pytest -q -m slow $(PYTEST)

test-oldest: ## Run the tests with the oldest releases that pyproject.toml accepts (its own environment; gigabytes)
	@$(MAKE) .venv-oldest/.moe_ckpt_installed VENV=.venv-oldest CONSTRAINTS=constraints-oldest.txt
	@.venv-oldest/bin/python -m pytest $(IN_PARALLEL) $(PYTEST)

lint: $(STAMP) ## Check style
	@$(PY) -m ruff check .

types: $(STAMP) ## Check types, strictly
	@$(PY) -m mypy

docs: $(STAMP) ## Build the documentation as a site, without network; warnings are errors
	@$(PY) -m sphinx -q -E -W --keep-going -b html -d build/doctrees -c docs . build/site
	@echo "build/site/index.html"

bench: $(STAMP) ## Measure stall and bytes beside other checkpointers
	@$(PY) benchmarks/stall.py $(BENCH)

bench-papers: $(STAMP) ## The simulator against the papers' tables and figures (docs/simulator_papers.md)
	@$(PY) benchmarks/sim_papers.py $(BENCH)

bench-reality: $(STAMP) ## Kill real runs at drawn moments, and simulate the same from their profiles (15 minutes)
	@$(PY) benchmarks/sim_reality.py $(BENCH)

setup: $(STAMP) ## Only make the environment

# What is installed in the environment is one checkout's sources: another checkout would test those, or take it over.
belongs:
	@at=$$(sed -n 's|.*"url": "file://\([^"]*\)".*|\1|p' $(VENV)/lib/python3*/site-packages/moe_ckpt-*.dist-info/direct_url.json \
	  2>/dev/null | head -n 1); \
	if [ -n "$$at" ] && [ -e "$$at/pyproject.toml" ] && ! [ "$$at" -ef . ]; then \
	  echo "error: the environment $(VENV) has the sources of $$at installed, not those of $(CURDIR)." \
	    "Name another one: make VENV=..." >&2; exit 1; fi

# Made anew when missing or broken, brought up to date when one of the two files has changed.
$(STAMP): pyproject.toml $(CONSTRAINTS) | belongs
	@command -v $(PYTHON) >/dev/null || { echo "error: no '$(PYTHON)' here; name one: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $$($(PYTHON) --version) is too old, 3.10 is needed; name another: make PYTHON=..." >&2; exit 1; }
	@echo "Setting up $(VENV) (once; takes a minute or two) ..."
	@$(PY) -c '' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@$(PY) -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@
	@echo "Done: $$($(PY) -c 'import moe_ckpt, torch; print("moe_ckpt", moe_ckpt.__version__, "with torch", torch.__version__)')"

# Links to the packages of $(VENV); 200 MB are loaded for triton, which the newest Megatron-Core imports.
$(STAMP_NEW): $(STAMP) tests/support/megatron_beside.py
	@echo "Setting up $(VENV_NEW) (once) ..."
	@$(PY) tests/support/megatron_beside.py $(VENV_NEW) $(MEGATRON_NEW) $(CONSTRAINTS)
	@touch $@

# What is in $(VENV) stays there; pip adds what is missing.
$(STAMP_TITAN): $(STAMP)
	@echo "Setting up $(VENV_TITAN) (once) ..."
	@$(PY) -m venv --clear $(VENV_TITAN)
	@$(VENV_TITAN)/bin/python -c 'import pathlib, sys, sysconfig; \
	  pathlib.Path(sysconfig.get_path("purelib"), "base.pth").write_text("\n".join(sys.argv[1:]))' \
	  "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" $(CURDIR)/src
	@$(VENV_TITAN)/bin/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) 'torchtitan>=0.3' triton
	@touch $@

clean: ## Remove the environment and everything that was built
	@rm -rf $(VENV) $(VENV)-megatron-* $(VENV_TITAN) .venv-oldest build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find src tests recipes benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
