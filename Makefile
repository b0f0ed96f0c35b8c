# Every target sets up what it needs; a fresh machine needs only python3 (3.11 or later) and make.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DOCS_READY := .venv/.docs-ready
DOCS_TESTS := $(addprefix tests/test_,docs.py tutorial.py cluster_files.py site.py)

.DEFAULT_GOAL := help
.PHONY: help setup check test docs train clean

help: ## this list
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 16

setup: $(READY) ## the pinned environment in .venv

# Redone only when what it is made from has changed.
$(READY): pyproject.toml constraints.txt
	@echo "installing the pinned environment into .venv: about 2 GB, a few minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(DOCS_READY): $(READY)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

check: $(READY) ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: $(READY) ## the tests; ARGS="-m slow" or any other pytest argument
	$(BIN)/pytest $(ARGS)

# The variable keeps mkdocs-material, which is maintained until May 2027, from praising its successor.
docs: $(DOCS_READY) ## the documentation site in build/site, with all of its examples run
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/pytest -m "not gpu and not nccl" $(DOCS_TESTS)
	@echo "open build/site/index.html"

train: $(READY) ## a small model, colocated and disaggregated; ARGS="CONFIG.toml" or any option
	$(BIN)/distca train --compare $(ARGS)

clean: ## remove everything that was made here
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
