# Few commands, the same for people and for CI. Each makes the environment it needs first.
#
#   PYTHON  the interpreter a new environment is made with
#   VENV    the environment; one that is already there is used as it is
#   JOBS    test processes
#   TESTS   files or folders of tests

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
TESTS ?= tests

PY := $(VENV)/bin/python
# Neighbors in a file share compiled programs, so each process takes a stretch of the tests.
PYTEST := $(PY) -m pytest -n $(JOBS) --dist worksteal
# Twice quiet: errors only.
PIP := $(PY) -m pip -qq --disable-pip-version-check --no-input install --no-warn-script-location
SOURCES := src tests examples benchmarks
COMMA := ,
OLD_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL := help
# Two targets may install into one environment; pip has no lock for that.
.NOTPARALLEL:
.PHONY: help setup demo test test-full lint format docs bench bench-here compare compare-here campaign clean

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/.made:
	@if [ ! -x "$(PY)" ]; then \
	  "$(PYTHON)" -c "$(OLD_ENOUGH)" 2>/dev/null || { \
	    echo "phijax_rng needs Python 3.11 or newer, and '$(PYTHON)' is: $$("$(PYTHON)" --version 2>&1)" >&2; \
	    echo "Name one, for example: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)" >&2; exit 1; }; \
	  echo "Making $(VENV) with $$("$(PYTHON)" --version)"; \
	  "$(PYTHON)" -m venv "$(VENV)"; \
	fi
	@"$(PY)" -c "$(OLD_ENOUGH)" || { \
	  echo "phijax_rng needs Python 3.11 or newer, and $(VENV) has $$("$(PY)" --version)." >&2; \
	  echo "Remove $(VENV), or name another: make VENV=.venv-new $(or $(MAKECMDGOALS),setup)" >&2; exit 1; }
	@"$(PY)" -m pip --version >/dev/null 2>&1 || "$(PY)" -m ensurepip >/dev/null
	@touch $@

# $(VENV)/.installed-test+compare: the package with its extras `test` and `compare`.
$(VENV)/.installed-%: pyproject.toml $(VENV)/.made
	@echo "Installing phijax_rng[$(subst +,$(COMMA),$*)] into $(VENV)"
	@$(PIP) --editable '.[$(subst +,$(COMMA),$*)]'
	@touch $@

setup: $(VENV)/.installed-dev  ## Install everything a developer needs.
	@touch $(addprefix $(VENV)/.installed-,test lint docs plot)

demo: $(VENV)/.installed-plot  ## Train, be killed half-way, resume, and compare bit for bit.
	$(PY) examples/demo.py

test: $(VENV)/.installed-test  ## Run the tests.
	$(PYTEST) $(TESTS)

test-full: $(VENV)/.installed-test  ## Run what `make test` leaves out: every cut, every page, more examples.
	$(PYTEST) -m "(full or more) and not slow" --hypothesis-profile=full $(TESTS)

lint: $(VENV)/.installed-lint  ## Check format, style and types.
	$(PY) -m ruff format --check $(wildcard $(SOURCES))
	$(PY) -m ruff check $(wildcard $(SOURCES))
	$(PY) -m mypy

format: $(VENV)/.installed-lint  ## Format the code and fix what ruff can fix.
	$(PY) -m ruff format $(wildcard $(SOURCES))
	$(PY) -m ruff check --fix $(wildcard $(SOURCES))

# The variable silences an announcement of the theme, which is no finding.
docs: $(VENV)/.installed-docs  ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

bench:  ## Measure, beside PhiJAX where there is a Python 3.12 or newer.
	@newest=$$(.ci/newest-python 2>/dev/null); \
	if [ -n "$$newest" ]; then $(MAKE) --no-print-directory bench-here VENV=.venv-compare PYTHON="$$newest"; \
	else $(MAKE) --no-print-directory bench-here; fi

bench-here: $(VENV)/.installed-test+compare
	$(PY) -m benchmarks

compare:  ## Run the tests beside PhiJAX (needs a Python 3.12 or newer).
	@newest=$$(.ci/newest-python) && \
	$(MAKE) --no-print-directory compare-here VENV=.venv-compare PYTHON="$$newest"

compare-here: $(VENV)/.installed-test+compare
	$(PY) -c "import phijax"
	$(PYTEST) tests/interop

campaign: $(VENV)/.installed-test  ## Run the long campaigns, which neither of them runs.
	$(PYTEST) -m slow --hypothesis-profile=campaign tests

clean:  ## Remove environments, caches and built pages.
	rm -rf .venv .venv-newest .venv-compare site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
