# Each target sets up .venv by itself; only Python 3.11+ and make are needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint

setup: .venv/ready

.venv/ready: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[test,fast,plot]"
	touch $@

demo: setup
	$(BIN)/python -m herta_gpu.demo

test: setup
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
