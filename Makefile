.DEFAULT_GOAL := help
.PHONY: help demo test test-docker check bench results docs clean horovod setup-demo setup-horovod setup-test

PYTHON ?= python3
export PYTHON

BIN := .venv/bin

# Where this is set, each of the many processes that tests start would compile hetctl anew.
unexport PYTHONDONTWRITEBYTECODE

help: ## show this list
	@echo "hetctl: each target sets up what it needs, in .venv"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo "PYTHON=/path/to/python3.11 chooses the interpreter (3.11 or 3.12)."

demo: setup-demo ## train the example ensemble on this machine, and write its report
	@.ci/demo

horovod: setup-horovod ## build Horovod, for TensorFlow members on several GPUs: compiler and MPI come from apt

test: setup-test ## run all tests, those on a real Slurm cluster too
	@.ci/test

test-docker: ## train the example on Slurm 22.05 and 24.11 in Docker containers; needs a Docker engine
	@tests/slurm-docker/run

check: setup-test ## lint, types, direction of imports, and that the docs are complete
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_house.py tests/test_docs.py

bench: setup-test ## how far planners are from the limits; HETCTL_DATA names the folder of measured tables
	$(BIN)/python tests/benchmarks/bench.py

results: setup-test ## replay the papers and measure anew: docs/results.md (takes about half an hour)
	$(BIN)/python tests/benchmarks/results.py

docs: setup-test ## build the documentation into site/
	$(BIN)/mkdocs build --strict --site-dir site

clean: ## remove what was built; .venv stays
	rm -rf build dist site demo *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

setup-demo setup-horovod setup-test: setup-%:
	@.ci/setup $*
