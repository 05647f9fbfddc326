# Two commands do it all on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test lint clean

install: $(STAMP)

$(STAMP): pyproject.toml ci/install.sh
	PYTHON=$(PYTHON) bash ci/install.sh $(VENV)
	touch $@

demo: install
	$(BIN)/oscar demo

# What serves a model wants all cores and its time limits; the rest runs side by side.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -m "not model" -n 2 --dist worksteal
	$(BIN)/python -m pytest tests -m model

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy oscar_vllm

clean:
	rm -rf $(VENV)
