# `make demo` runs the example, `make test` the checks of every day, ten minutes on two cores, and
# `make check` all of them. Nothing is written outside this folder, but for pip's own cache.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo test check lint types quick whole bench-tiny docs browser clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Compiled bytecode halves the start of every child (import prefect: 0.8 s with it, 1.6 s without).
unexport PYTHONDONTWRITEBYTECODE

# Prefect gives a server that it starts itself 20 s, which the first start on a slow machine may need.
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS ?= 120
export PREFECT_HOME := $(CURDIR)/.prefect
export PREFECT_SERVER_ANALYTICS_ENABLED := false
# What frameworks and their friends would otherwise keep in the home folder.
export TORCH_HOME := $(CURDIR)/.cache/torch
export KERAS_HOME := $(CURDIR)/.cache/keras
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export IPYTHONDIR := $(CURDIR)/.cache/ipython

demo: $(STAMP)
	$(BIN)/python flows/evaluate_models.py

# Types are checked beside the tests, which wait now and then.
test: lint
	@$(MAKE) --no-print-directory --jobs=2 types quick

check: lint types whole bench-tiny docs

# constraints.txt is the set that was tested on Python 3.11; some of it has dropped 3.10.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "prefect-gpu needs Python 3.10 or later")'
	[[ -x $(BIN)/python ]] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' \
		$$($(BIN)/python -c 'import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")')
	@touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: $(STAMP)
	$(BIN)/mypy

# Real processes, one Prefect server for all workers, and the browser once. Three for two cores: tests wait
# for almost half of their time. A file is never split: its tests may share a flow run. Files keep the order of
# `testpaths`. Tests on a GPU run one after the other; without one they skip and say why.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

quick: $(STAMP) browser
	$(BIN)/python -m pytest -q -m gpu tests/gpu
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not gpu"

# Programs that people run are independent of each other. The files of the other slow tests run two at a time: some of
# them load the machine by themselves. Tests on a GPU, which hold the device, run alone. None of these is traced: with
# coverage a child takes 4 s of CPU to start, and two hundred of them pass a test's time limit.
whole: $(STAMP) browser
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(PARALLEL) -m "not slow and not gpu"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	$(BIN)/python -m pytest -q -n 3 --dist worksteal -m slow tests/integration/test_programs.py
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=25 -m "slow and not gpu" --ignore tests/integration/test_programs.py
	$(BIN)/python -m pytest -q -m gpu

# Every benchmark at its smallest size, on one server: that it runs, not what it says.
bench-tiny: $(STAMP)
	$(BIN)/python benchmarks/_tiny.py

# The site, in build/site. Warnings are errors: a link to nothing, a page that is not in the navigation.
docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]' \
		$$($(BIN)/python -c 'import sys; print("-c constraints.txt" if sys.version_info >= (3, 11) else "")')
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

# The tests in tests/ui drive Chromium; without one they skip and say why.
browser:
	@for name in chromium chromium-browser google-chrome; do \
		if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	if ! command -v apt-get >/dev/null; then \
		echo "no Chromium and no apt-get: UI tests will skip"; exit 0; \
	fi; \
	as_root=""; \
	if [[ $$(id -u) != 0 ]]; then \
		as_root="sudo -n"; \
		if ! sudo -n true 2>/dev/null; then \
			echo "no Chromium and no right to install it: UI tests will skip"; exit 0; \
		fi; \
	fi; \
	$$as_root apt-get update -qq && $$as_root apt-get install -y -qq chromium \
		|| echo "Chromium could not be installed: UI tests will skip"

clean:
	rm -rf $(VENV) .prefect .cache .coverage .coverage.* htmlcov build dist *.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
