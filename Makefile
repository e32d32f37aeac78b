# Everything a person needs: `make demo`, `make test`, `make docs`. They set up .venv themselves, once.
#   PYTHON=python3.12   the interpreter to make .venv from (its torch is used when it has a suitable one)
#   JSON=1              the demo's last line is one JSON object
#   ARGS=...            more arguments for the demo, the tests or the benchmark

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# How files are given to the processes: tests/conftest.py
IN_PARALLEL := -n auto --maxprocesses 4 --dist loadfile
DEMO_ARGS := $(if $(filter-out 0,$(JSON)),--json) $(ARGS)

.PHONY: demo test test-trainers test-all lint bench docs clean venv

demo: $(VENV)/ready
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

test: $(VENV)/ready
	@$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow and not soak and not slurm and not trainers" $(ARGS)

test-trainers: $(VENV)/trainers
	@$(BIN)/python -m pytest -m "trainers and not slow" tests/*/test_trainers*.py $(ARGS)

test-all: $(VENV)/ready
	@$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_layout_imports.py

bench: $(VENV)/ready
	@$(BIN)/python bench/recovery.py --quick $(ARGS)
	@$(BIN)/python bench/overhead.py --quick
	@$(BIN)/python bench/rendezvous.py --quick
	@$(BIN)/python bench/durable.py --quick
	@$(BIN)/python bench/data.py --rounds 1 --seconds 0.2

docs: $(VENV)/ready
	@$(BIN)/python tools/docs.py build/docs

venv: $(VENV)/ready

$(VENV)/ready: pyproject.toml constraints.txt tools/venv.py
	@command -v "$(PYTHON)" >/dev/null || { echo "p2pstate: no interpreter '$(PYTHON)'; name one: make demo PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" tools/venv.py $(VENV)

$(VENV)/trainers: $(VENV)/ready constraints-trainers.txt
	@"$(PYTHON)" tools/venv.py $(VENV) trainers

clean:
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
