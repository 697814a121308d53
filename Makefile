# Every target makes its own .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# requirements.lock holds the exact files for this kind of machine; any other gets the versions of constraints.txt
LOCKED = $(shell $(PYTHON) -c "import platform, sys; print(sys.platform, platform.machine(), *sys.version_info[:2])")

.PHONY: help lock demo test test-gpu check check-all lint docs bench bench-methods bench-advice bench-theory bench-perada bench-sites bench-million bench-peers bench-cluster bench-tables clean
help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
ifeq ($(LOCKED),linux x86_64 3 11)
	$(PIP) --require-hashes --no-deps -r requirements.lock
	$(PIP) -c constraints.txt torch
	$(PIP) --no-deps --no-build-isolation -e .
else
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[dev]'
endif
	@touch $(READY)

lock: $(READY)  ## Write requirements.lock anew: the files that are installed, with their hashes
	$(BIN)/python .ci/lock.py

demo: $(READY)  ## Compare eight methods on scikit-learn's digits and write report.html
	$(BIN)/python -m fedtailor.cli.demo report.html

test: $(READY)  ## Run the fast tests
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"  # tests start processes: compile once

test-gpu: $(READY)  ## Run the device tests on a real device, if torch sees one (CUDA or MPS; else they are skipped)
	FEDTAILOR_TEST_DEVICE=auto $(BIN)/python -m pytest tests/engine/test_device.py

lint: $(READY)  ## Format check, lint, types, import directions
	$(BIN)/ruff format --check src tests benchmarks .ci
	$(BIN)/ruff check src tests benchmarks .ci
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/lock.py --check

check: lint test  ## What CI runs

check-all: lint $(READY)  ## Every test, slow ones too
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

docs: $(READY)  ## Write docs/summary.md, then run every method and write docs/methods.md
	$(BIN)/python -m fedtailor.runs.summary docs/summary.md
	$(BIN)/python -m fedtailor.advisor.table docs/methods.md

bench: $(READY)  ## Speed and memory, as ratios to bare PyTorch in the same run
	$(BIN)/python -m benchmarks.run

bench-methods: $(READY)  ## Every method on mnist5k, tuned on validation; writes docs/results/methods.md
	$(BIN)/python -m benchmarks.methods

bench-advice: $(READY)  ## Advice against the best in hindsight; writes docs/results/advice.md
	$(BIN)/python -m benchmarks.advice

bench-theory: $(READY)  ## Estimates of R² and of groups against the truth; writes docs/results/theory.md
	$(BIN)/python -m benchmarks.heterogeneity

bench-sites: $(READY)  ## Bytes, seconds and memory of a run across sites, beside Flower's own FedAvg; writes docs/results/sites.md
	$(BIN)/python -m benchmarks.sites

bench-million: $(READY)  ## A million clients, kept, killed, resumed and found again; writes docs/results/million.md
	$(BIN)/python -m benchmarks.million $(ARGS)

bench-peers: $(READY)  ## The same FedAvg here, in bare PyTorch and in Flower's simulation; writes docs/results/peers.md
	$(BIN)/python -m benchmarks.peers $(ARGS)

bench-tables: $(READY)  ## A million rows read beside pandas, a comparison on a wide table; writes docs/results/tables.md
	$(BIN)/python -m benchmarks.tables

bench-cluster: $(READY)  ## The cluster engine beside Flower's simulation, two nodes beside one; writes docs/results/cluster.md
	$(BIN)/python -m benchmarks.cluster

bench-perada: $(READY)  ## How long a round of PerAda takes beside Ditto's; writes docs/results/perada-speed.md
	$(BIN)/python -m benchmarks.perada_speed

clean:  ## Remove what the targets made
	rm -rf .venv runs report.html .pytest_cache .mypy_cache .ruff_cache .hypothesis
