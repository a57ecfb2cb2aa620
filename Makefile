# Every target sets up what it needs; a second run finds it done. Needs Python 3.11 or newer, make and
# a package registry. `make TORCH=path-or-requirement setup` installs that torch instead of the pinned one.

# Else bare engine/, kernels/ and llm.py import from the current folder.
export PYTHONSAFEPATH = 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup model demo test check proof notebooks wheel clean always

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTHON := $(shell for p in python3.11 python3.12 python3.13; do $$p -c '' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check
PROOFS := $(basename $(notdir $(sort $(wildcard experiments/p[0-9]*.py))))
INSTALL := PYTHONWARNINGS=ignore $(PIP) install -qq --no-compile

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## make .venv and install Tightrope and its tools into it

# A newer pip resolves in a third of the time. Modules are compiled when first imported: compiling
# all of torch and transformers takes longer than installing them.
$(READY): pyproject.toml constraints.txt Makefile $(if $(TORCH),always)
	@test -n "$(PYTHON)" || { echo "Tightrope needs python3.11, python3.12 or python3.13" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV); the first time this takes some minutes"
	@$(INSTALL) -c constraints.txt --upgrade pip
ifneq ($(TORCH),) # pip then keeps it, so neither its pin nor that of the triton it names may contradict it
	@$(INSTALL) "$(TORCH)"
	@grep -v -e '^torch==' -e '^triton==' constraints.txt > $(VENV)/constraints.txt
else
	@cp constraints.txt $(VENV)/constraints.txt
endif
	@$(INSTALL) -c $(VENV)/constraints.txt -e '.[dev]'
	@mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/tightrope # pyright follows a link, not a finder
	@touch $@

model: setup ## fetch the default model into the user's cache, once
	@$(BIN)/python -m tightrope.engine.models.smollm2

demo: model ## write a person as JSON by a schema: plain, guided, guided with forced tokens
	@$(BIN)/tightrope demo

test: model ## run the tests
	@$(BIN)/python -m pytest -q

check: setup ## lint, formatting, types, architecture
	@$(BIN)/ruff check -q
	@$(BIN)/ruff format -q --check
	@$(BIN)/pyright
	@$(BIN)/python -m pytest -q tests/architecture

proof: model ## run the long identities and speed pairs, whose records are committed
	@$(BIN)/python -m pytest -q -m "slow and not gpu" || test $$? = 5 # 5: there are none
	@set -e; for proof in $(PROOFS); do $(BIN)/python -m tightrope.experiments.$$proof; done

notebooks: model ## run the notebooks in full and write their outputs
	@$(BIN)/python -m pytest -q --nbmake --overwrite notebooks

wheel: setup ## build dist/*.whl
	@rm -rf build
	@$(PIP) wheel -qq --no-deps -w dist .

clean: ## remove caches and build output; .venv stays
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .coverage htmlcov
	@find . -name .venv -prune -o -name __pycache__ -exec rm -rf {} +
