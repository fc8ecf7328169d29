# Everything a developer types. `make` alone lists it. CI (.ci/run) calls the same targets and nothing else.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up-done
SOURCES := protocol node bootstrap tests

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow chaos chaos-short docker-base docker-test docker-short check format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  ARGS='...' is handed to the command: make test ARGS='tests/protocol -x', make demo ARGS='--peers 3'"

demo: $(STAMP) ## train a small model with a swarm of peers on this machine
	$(BIN)/stretto demo $(ARGS)

# Two at a time where nothing waits for real processes; those that do would disturb each other.
test: $(STAMP) ## run the tests
ifeq ($(strip $(ARGS)),)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not integration"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "integration and not slow"
else
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)
endif

test-slow: $(STAMP) ## the tests that `make test` leaves out, 10 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

chaos: $(STAMP) ## real peers behind slow lines, killed, stopped, coming and going: 100 minutes, as root; reports in chaos-reports/
	@mkdir -p chaos-reports
	@code=0; for scenario in faults uneven partition join 'churn --every 60'; do \
	  OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.run $$scenario --report chaos-reports/$${scenario%% *}.json $(ARGS) || code=1; \
	done; exit $$code

chaos-short: $(STAMP) ## the same in three minutes, each fault once, as root
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/chaos/test_chaos.py --capture=no $(ARGS)

docker-base: ## stand-in base images, for machines that reach no image registry, as root
	docker/base.sh $(ARGS)

docker-test: $(STAMP) ## build the image and let swarms of containers run, as root; report in docker-report.json
	$(BIN)/python -m tests.docker.run $(ARGS)

docker-short: $(STAMP) ## start docker and read the compose files, in a minute, as root
	$(BIN)/python -m tests.docker.run --only quick $(ARGS)

check: $(STAMP) ## formatting, lint, types
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy

format: $(STAMP) ## rewrite the files as `make check` wants them
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

clean: ## remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist chaos-reports docker-report.json protocol/*.so src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -type d -name __pycache__ -prune -exec rm -rf {} +

# One stamp for all that installation depends on. It is written last: a set-up that broke off is done again.
# The headers are looked for first, since without them pip fails after minutes, with pages of compiler output.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard protocol/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Stretto needs Python 3.10 or newer, and '$(PYTHON)' is not that. Name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@include=$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))') && \
	printf '#include <Python.h>\n#include <gmp.h>\n' | cc -E -I"$$include" - >/dev/null 2>&1 || { \
	  echo "Stretto cannot be installed yet: libp2p needs the package fastecdsa, which pip compiles on this machine," \
	       "and one of these is missing: a C compiler (cc), the headers of $(PYTHON) (Python.h), the headers of the" \
	       "GMP library (gmp.h). On Debian or Ubuntu run, as root: apt-get install -y gcc python3-dev libgmp-dev" \
	       "- then run make again." >&2; \
	  exit 1; }
	@echo "Setting up $(VENV): one to five minutes ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m pip check
	@touch $@
