# make demo   installs into .venv and fine-tunes a real model on a real task (about 4 minutes on 2 cores)
# make bench  measures fullrank beside its peers, into results/
# make recipes  tries out every recipe on a tiny model or a few steps, one process each
# make test   installs into .venv and runs lint, types and tests
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install demo recipes test test-lowest lint types unit bench bench-select clean

install: $(STAMP)

# torch comes first and by its exact version: where pip finds no torch it resolves to the newest build with a whole
# CUDA stack. The stamp makes a second run free; it is older than the files when they change.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("fullrank needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; try make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep -m1 '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install
	$(BIN)/fullrank demo --out runs/demo

recipes: install
	rm -rf runs/recipes && mkdir -p runs/recipes
	cd runs/recipes && ln -sfn ../../recipes recipes
	cd runs/recipes && ../../$(BIN)/python recipes/mine_hard_negatives.py --tiny
	cd runs/recipes && ../../$(BIN)/python recipes/lora_sentence_transformers.py --tiny
	cd runs/recipes && ../../$(BIN)/python recipes/lora_decoder_hf_trainer.py --tiny
	cd runs/recipes && ../../$(BIN)/python recipes/accelerate_loop.py --tiny
	cd runs/recipes && ../../$(BIN)/python recipes/own_documents.py --tiny

test: lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The oldest transformers and sentence-transformers of pyproject.toml, laid over the others: what trains and encodes.
test-lowest: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .lowest \
	  transformers==5.18.0 sentence-transformers==6.0.0
	PYTHONPATH=.lowest $(BIN)/python -m pytest -n 2 -k "not scifact" tests/test_encode.py tests/test_evaluate.py \
	  tests/test_callback.py tests/test_keeper.py tests/test_resume.py tests/test_ecosystem.py tests/test_unison.py \
	  tests/test_taps.py tests/test_select.py

# Each measures itself and its peers in one run and writes results/*.json: under 10 minutes on a quiet machine.
bench: install
	$(BIN)/python scripts/bench_search.py
	$(BIN)/python scripts/bench_growth.py
	$(BIN)/python scripts/bench_evaluate.py
	$(BIN)/python scripts/bench_run.py
	$(BIN)/python scripts/bench_device.py

# Trains a run of 12 checkpoints and evaluates each: about an hour on 2 cores.
bench-select: install
	$(BIN)/python scripts/bench_select.py

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache
