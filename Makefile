# The commands for users and contributors: `make demo`, `make test`. CONTRIBUTING.md describes them.
#
# Everything is built in one profile (release) and with `--workspace`, which gives every dependency one set of features,
# so nothing is compiled twice. CARGO_TARGET_DIR, LIBTORCH, ONEFOLD_CACHE and RUST_TEST_THREADS are used if they are set.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
# Each recipe that needs libtorch runs this. The script downloads libtorch the first time, and always prints its path.
WITH_LIBTORCH = LIBTORCH="$$(trainer/libtorch.sh)" && export LIBTORCH &&

# There are more threads than processors, because many tests wait, for example for stores that do not answer.
export RUST_TEST_THREADS ?= $(shell expr 2 \* $$(nproc))

.PHONY: help
help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: requirements
requirements: ## Check that this machine can build Onefold; `make` does this before it builds
	@tests/requirements.sh $(REQUIREMENTS)

# The variable also applies to the prerequisites of these targets.
test test-rust test-python test-random test-failures: REQUIREMENTS := --tests
wheel dist test-delta: REQUIREMENTS := --packages

.PHONY: build
build: requirements ## Build all binaries of users into $(TARGET)/release
	@$(WITH_LIBTORCH) $(CARGO) build --locked --release --workspace --exclude onefold-trainer-tools --bins

.PHONY: tools
tools: requirements ## Build onefold-train-tools, which measures the trainer and checks GPUs
	@$(WITH_LIBTORCH) $(CARGO) build --locked --release --workspace --bin onefold-train-tools

DEMO_BINARIES := onefold-data onefold-ingest onefold-shard onefold-train onefold-demo

.PHONY: demo
demo: requirements ## MovieLens-100K from ratings to a trained model; figures in target/demo/summary.json
	@$(WITH_LIBTORCH) $(CARGO) build --locked --release --workspace $(DEMO_BINARIES:%=--bin %)
	@$(TARGET)/release/onefold-demo --out target/demo

# Sets LIBTORCH, and the NVRTC with which tests compile the GPU kernels.
WITH_TESTS = $(WITH_LIBTORCH) ONEFOLD_NVRTC="$$(trainer/nvrtc.sh)" && export ONEFOLD_NVRTC &&

.PHONY: test
test: build tools ## Run the tests of Rust and Python; a summary at the end
	@$(WITH_TESTS) tests/run.py

.PHONY: test-rust
test-rust: build tools ## Run the tests of the workspace
	@$(WITH_TESTS) tests/run.py rust

.PHONY: test-python
test-python: build tools ## Build the wheel and run the tests of the Python package
	@$(WITH_LIBTORCH) tests/run.py python

# By default, 100 times as many cases as in `make test`, with a random seed, which is printed. proptest fails when it
# rejects more cases than a limit, so the limits increase too. The filter selects only property tests: those of the
# folders in PART, or all.
TIMES ?= 100
SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
PART ?=

.PHONY: test-random
test-random: build tools ## Run property tests with new cases: SEED=… (random), TIMES=100 as many, PART=ingest (all)
	@echo "property tests with SEED=$(SEED) TIMES=$(TIMES) PART=$(PART)"
	@names="$$(tests/property/names.py $(PART))" && $(WITH_TESTS) \
	    export PROPTEST_RNG_SEED=$(SEED) PROPTEST_CASES=$$((256 * $(TIMES))) && \
	    export PROPTEST_MAX_GLOBAL_REJECTS=$$((1024 * $(TIMES))) PROPTEST_MAX_LOCAL_REJECTS=$$((65536 * $(TIMES))) && \
	    tests/run.py rust -- --lib --test it --test distributed -- $$names

# `make test` runs the first two of these tests with smaller numbers.
KILLS ?= 300
STOPS ?= 60
JOBS ?= 100
WORKERS ?= 4
SAMPLES ?= 60000

.PHONY: test-failures
test-failures: build ## Preprocessing service: KILLS=300 and STOPS=60 of workers, a sweep of JOBS=100, bytes from a store
	@$(WITH_LIBTORCH) export ONEFOLD_TEST_KILLS=$(KILLS) ONEFOLD_TEST_STOPS=$(STOPS) ONEFOLD_TEST_JOBS=$(JOBS) && \
	    export ONEFOLD_TEST_WORKERS=$(WORKERS) ONEFOLD_TEST_SAMPLES=$(SAMPLES) && \
	    tests/run.py rust -- --test service -- --include-ignored --test-threads 1 \
	    killed_and_stopped_processes_change_nothing batches_of_a_sweep_are_computed_once workers_fetch_a_dataset_once

.PHONY: test-browser
test-browser: build ## Look at the status page of a preprocessing service with Chromium, which must be installed
	@ikjt/service/tests/browser.py

.PHONY: test-torchrec
test-torchrec: build ## What needs PyPI's torch, torchdata and TorchRec: plans, loaders, models (installs 2.3 GB the first time)
	@$(WITH_LIBTORCH) ONEFOLD_TORCHREC="$$(sharding/torchrec.sh)" && export ONEFOLD_TORCHREC && \
	    $(CARGO) test --locked --release --workspace --test e2e --test distributed -- --ignored torchrec
	@$(WITH_LIBTORCH) python/test.sh --torch

.PHONY: test-delta
test-delta: requirements ## Compile onefold-ingest with the feature `delta` (Rust 1.95), and test Delta Lake tables
	@$(WITH_LIBTORCH) $(CARGO) test --locked --release --workspace --features onefold-ingest/delta --test it -- delta

.PHONY: acceptance
acceptance: build ## 30 runs that fail at random (FAILURES=…), and 200 plans of jobs that changed (REPLANS=…), with SEED=…
	@$(WITH_LIBTORCH) tests/acceptance/run_failures.py --bin $(TARGET)/release --seed $(SEED)
	@tests/acceptance/replans.py --bin $(TARGET)/release --seed $(SEED)

.PHONY: wheel
wheel: requirements ## Build the wheels `onefold`, `onefold-train` and its libtorch into target/wheels, for this machine's glibc and newer ones
	@$(WITH_LIBTORCH) $(CARGO) build --locked --release --workspace --bin onefold-train
	@$(WITH_LIBTORCH) python/wheel.sh $(TARGET)/wheels --features delta
	@$(WITH_LIBTORCH) python/train/wheel.py --program $(TARGET)/release/onefold-train --out $(TARGET)/wheels
	@$(WITH_LIBTORCH) python/train/wheel.py --libtorch --out $(TARGET)/wheels

# Compiles everything again, with options that keep the paths of this machine out of the programs.
.PHONY: dist
dist: requirements ## Build wheels and a tarball for other machines into target/packages (compiles in target/dist)
	@$(WITH_LIBTORCH) dist/dist.py --build $(TARGET)/dist --out $(TARGET)/packages

.PHONY: try-dist
try-dist: ## Install the packages of `make dist` in a root directory without a compiler, and use them
	@$(WITH_LIBTORCH) dist/try.sh $(TARGET)/packages

.PHONY: bench
bench: ## Run the criterion benches
	@$(WITH_LIBTORCH) $(CARGO) bench --locked --workspace

.PHONY: lint
lint: ## Formatting, clippy and rustdoc, warnings as errors
	@$(CARGO) fmt --all --check
	@tests/same_features.py
	@$(WITH_LIBTORCH) $(CARGO) clippy --locked --release --workspace --all-targets -- -D warnings
	@$(WITH_LIBTORCH) RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --release --workspace --no-deps --document-private-items

.PHONY: docs
docs: ## Check all links, and render the manual with mdBook into target/book (installs mdBook the first time)
	@tests/links.py
	@docs/mdbook.sh build docs --dest-dir "$(abspath $(TARGET))/book"

.PHONY: reference
reference: build tools ## Write the reference pages of the commands, from --help, and complete that of their JSON output
	@docs/commands.py --binaries $(TARGET)/release
	@PYTHONPATH=$$(python/environment.sh) docs/json_output.py --binaries $(TARGET)/release

.PHONY: fuzz
fuzz: ## Fuzz what is read from disk and the network, SECONDS_EACH=60 for each target (installs cargo-fuzz the first time)
	@ikjt/fuzz/run.sh $(or $(SECONDS_EACH),60)

.PHONY: libtorch
libtorch: ## Print where libtorch is, fetching it the first time
	@trainer/libtorch.sh
