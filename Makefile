# Every target sets up what it needs; a set-up that is current is not repeated.
# `make test VENV=/elsewhere/venv` uses another environment than .venv.

VENV ?= .venv
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3; do \
	$$each -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)

bin := $(VENV)/bin
installed := $(VENV)/.installed

# The environment of a peer that `make bench` compares with.
peer := $(VENV)/peer
PEER_PYTHON ?= $(shell for each in python3.13 python3.14 python3 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[3-9]*/bin/python; do \
	$$each -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 13))' 2>/dev/null && echo $$each && break; done)

# What `make simulate` runs: seeds 0 to this.
SCHEDULES ?= 1000000

# How many of each kind `make faults` tries; the tests' own figures are for every day.
FAULTS ?= EVENTJET_TEST_UNKNOWNS=1000 EVENTJET_TEST_IDS=100000 EVENTJET_TEST_KILLS=200 EVENTJET_TEST_EVENTS=50000 \
	EVENTJET_TEST_TAKEOVERS=50 EVENTJET_TEST_OUTAGES=20 EVENTJET_TEST_CONTROL_KILLS=20 \
	EVENTJET_TEST_CONCURRENT=10000 EVENTJET_TEST_BAD=10000

.PHONY: setup test simulate faults demo lint format types contract bench clean

setup: $(installed)

$(installed): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with its venv module is needed" \
		"(Debian: apt install python3 python3-venv). Install it and run make again." >&2; exit 2; }
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(bin)/python -m pip install --quiet --constraint constraints.txt --build-constraint constraints.txt \
		--editable ".[spark,dev,testing,otel]" --group dev
	@touch $@

test: setup
	$(bin)/python -m pytest

simulate: setup
	$(bin)/python -m tests.simulation --schedules $(SCHEDULES)

faults: setup
	$(FAULTS) $(bin)/python -m pytest --timeout 1800 --durations 20 -s tests/faults \
		tests/integration/test_unknown_outcomes.py tests/integration/test_hostile_ids.py

demo: setup
	$(bin)/eventjet demo

lint: setup
	$(bin)/ruff check
	$(bin)/ruff format --check

format: setup
	$(bin)/ruff check --fix
	$(bin)/ruff format

types: setup
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/mypy

contract: setup
	$(bin)/lint-imports --no-logo

bench: setup $(peer)/.installed
	$(bin)/python -m pip install --quiet --constraint constraints.txt --group bench
	$(bin)/python -m benchmarks.commands
	$(bin)/python -m benchmarks.catchup

# eventsource-py asks for a newer Python than eventjet does; without one its rows are left out.
$(peer)/.installed: pyproject.toml constraints.txt
	@mkdir -p $(peer)
	@if test -n "$(PEER_PYTHON)"; then \
		{ test -x $(peer)/bin/python || $(PEER_PYTHON) -m venv $(peer); } && \
		$(peer)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip && \
		$(peer)/bin/python -m pip install --quiet --constraint constraints.txt --group bench-eventsource && \
		touch $@; \
	else echo "no Python 3.13 or newer (PEER_PYTHON=), so the benchmarks leave eventsource-py out" >&2; fi

clean:
	rm -rf .venv benchmarks/out .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist spark-warehouse
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
