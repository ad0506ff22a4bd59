# Everything runs in .venv, which `make setup` creates; an argument such as ARGS="-k oft" goes to pytest.
PYTHON ?= $(shell for p in python3.12 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: setup demo test test-fast test-long test-gpu quality lock clean

setup:
	@test -n "$(PYTHON)" || { echo "setup: no python3 on PATH; install Python 3.12 and run again" >&2; exit 1; }
	@$(PYTHON) tools/setup_env.py

demo: setup
	@$(BIN)/python -m recipes.demo

# Two at a time, the longest groups first; then, by itself, what measures time.
test: setup
	$(PYTEST) -m "not gpu and not long and not alone" -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)
	$(PYTEST) -m "alone and not gpu and not long" $(ARGS)

test-fast: setup
	$(PYTEST) -m "not gpu and not long and not slow and not alone" -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

test-long: setup
	ORBIT_SOAK_REQUESTS=10000 ORBIT_FUZZ_EXAMPLES=17000 $(PYTEST) -m "(long or sized) and not gpu" -n 2 --dist loadgroup \
		--no-loadscope-reorder $(ARGS)

test-gpu: setup
	$(PYTEST) -m gpu $(ARGS)

quality: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/python patches/apply.py --check

# Resolves requirements/stack.in afresh; the result is reviewed like any other change.
lock: setup
	$(BIN)/uv pip compile requirements/stack.in --override requirements/overrides.txt --upgrade \
		$(foreach p,llama-cpp-python llm condense-json puremagic sqlite-fts4 sqlite-migrate sqlite-utils,--no-emit-package $p) \
		--python-version 3.12 --no-annotate --custom-compile-command "make lock" -o requirements/stack.txt

clean:
	rm -rf .venv runs build *.egg-info .pytest_cache .ruff_cache
