# Every target sets up what it needs: `make demo` and `make test` work from nothing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint docs zoo overhead

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.ready
	$(BIN)/python benchmarks/demo.py

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p moe_compile

# The pages of docs/measured from their data, then the site, into site/.
docs: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/measured/generate.py
	$(BIN)/mkdocs build --strict --quiet

# Every MoE model of transformers; takes about half an hour.
zoo: $(VENV)/.ready
	$(BIN)/python benchmarks/zoo.py

# Compile time and call time against torch.compile alone; wants an idle machine.
overhead: $(VENV)/.ready
	$(BIN)/python benchmarks/overhead.py
