# Everything a developer types. `make help` lists it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
HELM_VERSION := v3.22.0
PIP_AUDIT_VERSION := 2.10.1
CYCLONEDX_VERSION := 7.5.0
TESTS := $(BIN)/python -m pytest --numprocesses 3 --dist worksteal --durations 30
# Some containers set it. Then every service, command and worker that a test starts compiles all its modules again,
# and pytest those of its plugins.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo quick test proof length fuzz chaos soak mutations screenshots docs check format bench engines jobs rebuild helm constraints advisories sbom protos clean

help:  ## This list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: .venv/installed  ## A .venv with everything, pinned by constraints.txt

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or later is needed, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing blackbox and what it needs into .venv (once, a few minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[spark,embedded,dev]'
	@touch $@

.venv/archives: .venv/installed blackbox/support/class_archive.py blackbox/spark/compiled_modules.py
	@echo "keeping the Java classes of Kafka and Spark for quicker starts (once, half a minute)"
	@$(BIN)/python -m blackbox.embedded.class_archive || echo "Kafka will start as usual"
	@$(BIN)/python -m blackbox.spark.class_archive 2> $@.log || { cat $@.log; echo "Spark will start as usual"; }
	@touch $@

demo: install  ## Real Kafka, real Redis, 10,000 delayed messages and a verdict
	@$(BIN)/blackbox demo

quick: .venv/archives  ## The tests of parts, which start no service (a minute)
	$(TESTS) tests/unit tests/contract

test: .venv/archives  ## The tests, on real servers that they start themselves (about ten minutes on two cores)
	$(TESTS)

proof: .venv/archives  ## Every test, also those that take long, and docs/proof.md (more than an hour)
	BLACKBOX_TEST_PROOF=1 BLACKBOX_TEST_PROOF_PAGE=docs/proof.md $(TESTS)

length: .venv/archives  ## The same with many more requests and faults, on both engines throughout (hours)
	BLACKBOX_TEST_AT_LENGTH=1 BLACKBOX_TEST_KILLS=50 BLACKBOX_TEST_FREEZES=10 BLACKBOX_TEST_CUTS=20 BLACKBOX_TEST_WORKER_KILLS=50 BLACKBOX_TEST_FAILOVERS=10 \
	BLACKBOX_TEST_REQUESTS=100000 BLACKBOX_TEST_PENDING=1000000 BLACKBOX_TEST_IDLE_S=60 \
	$(BIN)/python -m pytest -rP

fuzz: install  ## A million random and mutated records to each engine
	BLACKBOX_TEST_FUZZ=1000000 $(BIN)/python -m pytest -s tests/service/test_fuzz.py

soak: install  ## Half an hour under load with a fault every minute, and docs/soak.md
	$(BIN)/python -m tests.soak --write docs

mutations: install  ## Bugs put into copies of the product: the tests must find each; writes docs/mutations.md
	$(BIN)/python -m tests.mutations --page

chaos: install  ## 2,070 schedules of faults from one seed, and docs/chaos.md (about an hour)
	$(BIN)/python -m tests.chaos --write docs/chaos.md

screenshots: install  ## Pictures of the page under load, into docs/page (two minutes; needs Chromium)
	$(BIN)/python -m tests.screenshots docs/page

docs: install  ## The generated parts of the reference pages, from the code
	$(BIN)/python -m tests.docs

check: .venv/archives  ## The whole gate: format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(TESTS)

format: install  ## Format, and correct what ruff can correct
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install  ## Throughput beside the raw work, a simple loop and other systems, into build/bench (over an hour; ETF1=program)
	$(BIN)/python -m bench $(if $(ETF1),--etf1 $(ETF1))

engines: install  ## Both engines side by side, as services (about 12 minutes)
	$(BIN)/python -m bench.engines

jobs: install  ## How long ledger, audit and load take, and docs/jobs.md (hours)
	$(BIN)/python -m bench.jobs

rebuild: install  ## How long each engine takes to rebuild a lost Redis, by ended and pending requests (long)
	$(BIN)/python -m bench.rebuild

helm:  ## The helm that the chart's tests use, if none is on PATH
	@command -v helm >/dev/null || go install helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)

constraints: install  ## Pin the newest versions that pyproject.toml allows
	$(BIN)/python -m pip install --quiet pip-tools
	$(BIN)/pip-compile --quiet --upgrade --strip-extras --all-extras --no-emit-index-url \
	    --no-emit-find-links --no-emit-trusted-host --no-header --output-file constraints.txt pyproject.toml

protos: install  ## The modules of blackbox/formats/proto, from its .proto files
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. blackbox/formats/proto/*.proto

build/tools: Makefile
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check \
	    pip-audit==$(PIP_AUDIT_VERSION) cyclonedx-bom==$(CYCLONEDX_VERSION)
	@touch $@

# Not a part of `check`: it needs pypi.org itself, and what is known changes without a commit.
advisories: build/tools  ## Known vulnerabilities of the pinned dependencies, as pypi.org lists them
	build/tools/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

sbom: install build/tools  ## What is installed, as CycloneDX, in build/sbom.json
	build/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	    --output-file build/sbom.json $(BIN)/python

clean:  ## Remove what can be made again
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
