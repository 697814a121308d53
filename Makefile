# Every target makes its own .venv and installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test check check-all lint docs bench bench-methods bench-advice bench-theory bench-flow bench-perada clean
help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)  ## Compare eight methods on scikit-learn's digits and write report.html
	$(BIN)/python -m fedtailor.report.demo report.html

test: $(READY)  ## Run the fast tests
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(READY)  ## Format check, lint, types, import directions
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test  ## What CI runs

check-all: lint $(READY)  ## Every test, slow ones too
	$(BIN)/python -m pytest -n 2

docs: $(READY)  ## Run every method and write docs/methods.md
	$(BIN)/python -m fedtailor.advisor.table docs/methods.md

bench: $(READY)  ## Speed and memory, as ratios to bare PyTorch in the same run
	$(BIN)/python -m benchmarks.run

bench-methods: $(READY)  ## Every method on mnist5k, tuned on validation; writes docs/results/methods.md
	$(BIN)/python -m benchmarks.methods

bench-advice: $(READY)  ## Advice against the best in hindsight; writes docs/results/advice.md
	$(BIN)/python -m benchmarks.advice

bench-theory: $(READY)  ## Bounds and estimates against what is measured; writes docs/results/theory.md
	$(BIN)/python -m benchmarks.bounds

bench-flow: $(READY)  ## Where routing by instance pays, in pieces with ARGS="--minutes 30"; writes docs/results/flow.md
	$(BIN)/python -m benchmarks.flow $(ARGS)

bench-perada: $(READY)  ## PerAda's claims, ablations and privacy, in pieces with ARGS="--minutes 30"; writes docs/results/perada.md
	$(BIN)/python -m benchmarks.perada $(ARGS)

clean:  ## Remove what the targets made
	rm -rf .venv runs report.html .pytest_cache .mypy_cache .ruff_cache .hypothesis
