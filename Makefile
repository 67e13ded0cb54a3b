.DEFAULT_GOAL := help
.PHONY: help setup demo test check format up down status lock clean
# Set in some containers; it would double every start-up.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
SEED ?= 0
BIN := .venv/bin

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv with the locked versions (PYTHON=python3.12, VLLM=gpu|cpu|none)
	@PYTHON='$(PYTHON)' VLLM='$(VLLM)' requirements/install.sh

demo: setup  ## run the whole SFT -> GRPO experiment on this machine (SEED=0); its last line is JSON
	@$(BIN)/python -m flows.sft_grpo --config text2sql_racing --seed $(SEED)

test: setup  ## run the tests (ARGS='-k services')
	@$(BIN)/python -m pytest $(ARGS)

check: setup  ## ruff, pyright and the import contracts
	@failed=0; for command in "ruff check" "ruff format --check" pyright "lint-imports --no-cache"; do \
		echo "== $$command"; $(BIN)/$$command || failed=1; \
	done; exit $$failed

format: setup  ## let ruff fix and format the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

up: setup  ## start Prefect, MLflow and a worker, and register the deployments
	@$(BIN)/python -m tasks.services up

down: setup  ## end what `make up` started
	@$(BIN)/python -m tasks.services down

status: setup  ## say what of it runs
	@$(BIN)/python -m tasks.services status

lock: setup  ## remake requirements/*.txt from pyproject.toml (UPGRADE=1 for the newest versions)
	@UPGRADE='$(UPGRADE)' requirements/lock.sh

clean:  ## remove caches of the tools; results in .furlong and .venv stay
	@rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
