# Needs Python 3.11 or later and make, nothing else. What is installed goes into .venv.
#   make train                        two mirrored replicas on the digits (ARGS="--epochs 2" adds flags)
#   make train EXTRAS=gpu             with TensorFlow's CUDA packages
#   make horovod                      Horovod, built for the TensorFlow in .venv: needs a C++ compiler
#   make test                         lint and the test suite (ARGS="-k config" adds pytest flags);
#                                     HOROVOD= leaves Horovod out
#   make conformance                  every case of tests/conformance under every strategy and every
#                                     number of replicas and processes, and all of tests/programs;
#                                     make test asks those cases of a further number that
#                                     tests/conformance/selection.py names, and the quick programs
#   make long                         every test, also the long forms of what make test asks in short
#   make lint                         ruff, mypy, import contract
#   make docs                         the site, into build/docs, from manuals, pages and docstrings
#   make notebooks                    runs the notebooks in full, and stores their outputs
PYTHON ?= python3
EXTRAS ?=
ARGS ?=
HOROVOD ?= horovod
BIN := .venv/bin

.PHONY: train horovod test conformance long lint docs notebooks format clean

train: .venv/installed$(addprefix -,$(EXTRAS))
	$(BIN)/python -m tfdist.train --strategy mirrored $(ARGS)

horovod: .venv/installed-horovod

test: lint $(HOROVOD)
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)

conformance: .venv/installed-dev $(HOROVOD)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "" tests/conformance tests/programs $(ARGS)

long: lint $(HOROVOD)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "" $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.private_names

docs: .venv/installed-docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/docs
	@echo build/docs/docs/index.html

notebooks: .venv/installed-dev $(HOROVOD)
	$(BIN)/python -m tests.run_notebooks $(ARGS)

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info

# A half-made environment (Debian without python3-venv) must not look finished to the next run.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "tfdist needs Python 3.11 or later, and '$(PYTHON)' is not: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# The stamps are older than setup.cfg when the dependencies may have changed: then pip looks again.
.venv/installed: .venv/bin/python setup.cfg pyproject.toml
	@echo "installing tfdist into .venv; the first time TensorFlow is downloaded"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

.venv/installed-%: .venv/installed
	@echo "installing tfdist[$*] into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

# Not by the rule for the other extras: pip alone cannot build Horovod.
.venv/installed-horovod: .venv/installed
	@$(BIN)/python -m tfdist.install_horovod || \
	    { echo "to test without Horovod: make test HOROVOD="; exit 1; }
	@touch $@
