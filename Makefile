# Needs Python 3.11 or later and make. Everything is installed into .venv.
#   make train                        two mirrored replicas on the digits (ARGS="--epochs 2" adds flags)
#   make train EXTRAS=gpu             with TensorFlow's CUDA packages
#   make horovod                      Horovod, built for the TensorFlow in .venv: needs a C++ compiler
#
# Tests, from the fastest to the most thorough (tests/selection.py says which test is in which):
#   make quick                        tests without TensorFlow, ten conformance cases: one minute
#   make test                         lint and the tests that every change has to pass: 8 minutes
#   make check                        lint and every test with two replicas or processes: 30 minutes
#   make check-rest                   the tests of make check that make test does not run
#   make conformance                  every case of tests/conformance under every strategy and every
#                                     number of replicas and processes, and all of tests/programs
#   make long                         every test
#   make test-gpu                     checks and benchmarks that need GPUs (docs/gpu.md);
#                                     ARGS=--rehearse runs them on CPU devices
#   ARGS="-k config" adds flags of pytest, HOROVOD= leaves Horovod out. The number of test
#   processes follows the cores and the memory of the machine; ARGS="-n 4" sets it.
#
#   make lint                         ruff, mypy, import contract, private names, budget of lines
#   make docs                         builds the site in build/docs from manuals, pages and docstrings
#   make notebooks                    runs all notebooks in full and stores their outputs
#   make coverage                     make check with a coverage report of the product code; fails
#                                     below COVERAGE=89 percent of the lines. Takes half as long
#                                     again, so only the nightly build runs it, instead of make check
#   make canary                       tests with the newest pre-releases of TensorFlow and Keras
#   make versions                     tests with older and newer versions of Python, TensorFlow and Keras
#   make release                      builds sdist and wheel, and tests the wheel with the lowest and the newest versions
PYTHON ?= python3
EXTRAS ?=
ARGS ?=
HOROVOD ?= horovod
# The least coverage of the product code, in percent, by all tests of make check.
COVERAGE ?= 89
BIN := .venv/bin

# A test process that dies ends the run with the name of its test. If it were replaced, pytest-xdist
# 3.8 could wait forever (https://github.com/pytest-dev/pytest-xdist/issues/1378).
PYTEST := $(BIN)/python -m pytest -n auto --dist loadgroup --max-worker-restart 0

.PHONY: train horovod quick test check check-rest conformance long test-gpu lint docs notebooks \
    coverage canary versions release format clean

train: .venv/installed$(addprefix -,$(EXTRAS))
	$(BIN)/python -m tfdist.train --strategy mirrored $(ARGS)
	@echo "Next:"
	@echo "  source $(BIN)/activate                                   activate this environment"
	@echo "  tensorboard --logdir runs                                   look at the metrics"
	@echo "  python -m tfdist.train --evaluate runs/NAME/model.keras     evaluate the model"
	@echo "  python -m tfdist.train --recipe image_folder --data photos/ train on your own data"

horovod: .venv/installed-horovod

quick: .venv/installed-dev
	$(PYTEST) -m quick tests $(ARGS)

test: lint $(HOROVOD)
	$(PYTEST) -m "not check and not long" $(ARGS)

check: lint $(HOROVOD)
	$(PYTEST) $(ARGS)

check-rest: .venv/installed-dev $(HOROVOD)
	$(PYTEST) -m "check and not long" $(ARGS)

conformance: .venv/installed-dev $(HOROVOD)
	$(PYTEST) -m "" tests/conformance tests/programs $(ARGS)

long: lint $(HOROVOD)
	$(PYTEST) -m "" $(ARGS)

test-gpu: .venv/installed-dev .venv/installed-gpu
	$(BIN)/python -m tests.studies.gpu $(ARGS)

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.private_names
	$(BIN)/python -m tests.prose
	$(BIN)/python -m tests.budget

docs: .venv/installed-docs
	$(BIN)/sphinx-build -q -W --keep-going -c docs . build/docs
	@echo build/docs/docs/index.html

notebooks: .venv/installed-dev $(HOROVOD)
	$(BIN)/python -m tests.run_notebooks $(ARGS)

coverage: lint $(HOROVOD)
	$(PYTEST) --cov --cov-report=term:skip-covered --cov-fail-under=$(COVERAGE) $(ARGS)

versions: .venv/installed-dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -m tests.studies.versions $(ARGS)

canary: .venv/installed-dev
	$(BIN)/python -m tests.studies.canary $(ARGS)

release: .venv/installed-release
	$(BIN)/python -m tests.release

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build *.egg-info

# Remove an incomplete environment (Debian without python3-venv), so that the next run starts again.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "tfdist needs Python 3.11 or later, and '$(PYTHON)' is not: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# A stamp that is older than setup.cfg means that dependencies may have changed: pip runs again.
.venv/installed: .venv/bin/python setup.cfg pyproject.toml
	@echo "installing tfdist into .venv; the first time TensorFlow is downloaded"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[tensorflow]'
	@touch $@

.venv/installed-%: .venv/installed
	@echo "installing tfdist[$*] into .venv"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

# Not built by the rule for the other extras, because pip alone cannot build Horovod.
.venv/installed-horovod: .venv/installed
	@$(BIN)/tfdist install_horovod || \
	    { echo "to test without Horovod: make test HOROVOD="; exit 1; }
	@touch $@
