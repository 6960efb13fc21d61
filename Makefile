# Each target sets up what it needs of .venv by itself; only Python 3.11+ and make are needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-newest test-long lint docs bench

setup: .venv/ready

.venv/ready: pyproject.toml
	@echo "Installing what the tests need into .venv (2 GB), once: some minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[test,fast,plot]"
	touch $@

# The demo needs few packages: 0.5 GB of them, not 2.
.venv/demo: pyproject.toml
	@echo "herta_gpu trains graph models to their proven optimum, without a learning rate or epochs."
	@echo "Installing NumPy, SciPy, numba and matplotlib into .venv (0.5 GB), once: some 20 seconds."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[fast,plot]"
	touch $@

demo: $(if $(wildcard .venv/ready),setup,.venv/demo)
	$(BIN)/python -m herta_gpu.app.demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not long"
	$(BIN)/python -m tests.cuda_device eager lazy -n 2 --dist worksteal

# The same with a newer Python, and the newest NumPy and SciPy that it takes.
NEWEST ?= python3.13
test-newest:
	$(NEWEST) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable ".[test,fast,plot,tables]"
	.venv-newest/bin/python -m pytest -n 2 --dist worksteal -m "not gpu and not long"

# Half an hour and more: what `make test` leaves out, and the device in all of its modes.
test-long: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "long and not gpu"
	$(BIN)/python -m tests.cuda_device long guarded random -n 2 --dist worksteal
	$(BIN)/python -m tests.cuda_device asan tsan

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The pages of docs/ and the API, into site/; a link that leads nowhere, or a parameter without a type
# in a docstring, is an error.
docs: setup
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	$(BIN)/python -m mkdocs build --strict

# A short version, five to ten minutes on two cores; the real data sets where HERTA_DATA names them.
BENCHES := $(if $(HERTA_DATA),primitives convergence time_to_accuracy) scaling sparsify devices
bench: setup
	@$(if $(HERTA_DATA),,echo "HERTA_DATA is not set: generated graphs only.")
	for name in $(BENCHES); do $(BIN)/python bench/$$name.py --quick || exit 1; done
	$(BIN)/python bench/plot.py --quick
