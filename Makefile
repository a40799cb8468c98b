# Each target first makes what it needs, the virtual environment included. No root, no other tools than Python and g++.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# DeepSpeed compiles an operator, and looks for ninja on the PATH.
export PATH := $(CURDIR)/$(BIN):$(PATH)
# It is compiled against this environment's torch, so it is kept here: a folder shared with others is rebuilt in turns.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.venv/torch_extensions
# Without bytecode files, each of the many processes that tests and the demo start compiles all sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint clean

demo: $(READY)
	$(BIN)/python examples/compare.py

# Two processes with one thread each, for two cores. On these, a third process makes the tests that start ranks a
# quarter slower: ranks of different tests then take the cores from one another. The tests of one file share what they
# have launched.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

clean:
	rm -rf .venv .hypothesis .pytest_cache .ruff_cache build dist runs *.egg-info

# torch goes first: DeepSpeed's build looks at the one that is installed. DeepSpeed's operator is compiled while pip
# installs the rest; it would else be compiled in the first run on the CPU, whose ranks would wait for it. pip leaves
# bytecode to the first import: to compile all modules takes it over a minute, and most of them are never imported.
INSTALL := $(BIN)/pip install --no-compile --constraint constraints.txt
COMPILE := from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Builder; Builder().load()

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) deepspeed
	DS_ACCELERATOR=cpu $(BIN)/python -c "$(COMPILE)" & compiling=$$!; $(INSTALL) --editable '.[test]' && wait $$compiling
	touch $@
