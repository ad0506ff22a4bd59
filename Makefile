# Everything runs in .venv, which `make setup` creates; an argument such as ARGS="-k oft" goes to pytest.
PYTHON ?= $(shell for p in python3.12 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: setup demo test test-fast test-gpu quality lock clean

setup:
	@test -n "$(PYTHON)" || { echo "setup: no python3 on PATH; install Python 3.12 and run again" >&2; exit 1; }
	@$(PYTHON) tools/setup_env.py

demo: setup
	@$(BIN)/python -m recipes.demo

test: setup
	$(PYTEST) -m "not gpu" $(ARGS)

test-fast: setup
	$(PYTEST) -m "not gpu and not slow" $(ARGS)

test-gpu: setup
	$(PYTEST) -m gpu $(ARGS)

quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python patches/apply.py --check

# Resolves requirements/stack.in afresh; the result is reviewed like any other change.
lock: setup
	$(BIN)/uv pip compile requirements/stack.in --override requirements/overrides.txt --upgrade \
		$(foreach p,llama-cpp-python llm condense-json puremagic sqlite-fts4 sqlite-migrate sqlite-utils,--no-emit-package $p) \
		--python-version 3.12 --no-annotate --custom-compile-command "make lock" -o requirements/stack.txt

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .ruff_cache
