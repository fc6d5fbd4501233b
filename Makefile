# What a person does here: `make demo`, `make test`. CONTRIBUTING.md says more.
#
# Everything builds in one profile (release) and for the whole workspace, so that nothing is compiled twice.
# CARGO_TARGET_DIR, LIBTORCH, ONEFOLD_GLOO, ONEFOLD_CACHE and RUST_TEST_THREADS are respected when they are set.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
# Evaluated in each recipe that needs it: fetches libtorch and Gloo's headers the first time, prints their paths afterwards.
WITH_LIBTORCH = LIBTORCH="$$(trainer/libtorch.sh)" && ONEFOLD_GLOO="$$(trainer/gloo.sh)" && export LIBTORCH ONEFOLD_GLOO &&

# Many tests wait: for processes that they kill, and for stores that do not answer.
export RUST_TEST_THREADS ?= $(shell expr 2 \* $$(nproc))

.PHONY: help
help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

.PHONY: build
build: ## Build all binaries into $(TARGET)/release
	@$(WITH_LIBTORCH) $(CARGO) build --locked --release --workspace --bins

.PHONY: demo
demo: build ## MovieLens-100K from ratings to a trained model; figures in target/demo/summary.json
	@$(TARGET)/release/onefold-demo --out target/demo

.PHONY: test
test: test-rust test-python ## Run all tests

.PHONY: test-rust
test-rust: build ## Run the tests of the workspace
	@$(WITH_LIBTORCH) ONEFOLD_NVRTC="$$(trainer/nvrtc.sh)" && export ONEFOLD_NVRTC && $(CARGO) test --locked --release --workspace

.PHONY: test-python
test-python: build ## Build the wheel and run the tests of the Python package (installs 90 MB the first time)
	@$(WITH_LIBTORCH) python/test.sh

.PHONY: test-browser
test-browser: build ## Look at the status page of a preprocessing service with Chromium (installs it with apt-get where there is none)
	@ikjt/service/tests/browser.py

.PHONY: test-torchrec
test-torchrec: build ## What needs PyPI's torch, torchdata and TorchRec: plans, loaders, models (installs 2.3 GB the first time)
	@$(WITH_LIBTORCH) ONEFOLD_TORCHREC="$$(sharding/torchrec.sh)" && export ONEFOLD_TORCHREC && \
	    $(CARGO) test --locked --release --workspace --test e2e --test distributed -- --ignored torchrec
	@$(WITH_LIBTORCH) python/test.sh --torch

.PHONY: wheel
wheel: build ## Build the wheels `onefold` and `onefold-train` into target/wheels, for this machine's glibc and newer ones
	@$(WITH_LIBTORCH) python/wheel.sh $(TARGET)/wheels
	@$(WITH_LIBTORCH) python/train/wheel.py --program $(TARGET)/release/onefold-train --out $(TARGET)/wheels

.PHONY: bench
bench: ## Run the criterion benches
	@$(WITH_LIBTORCH) $(CARGO) bench --locked --workspace

.PHONY: lint
lint: ## Formatting, clippy and rustdoc, warnings as errors
	@$(CARGO) fmt --all --check
	@$(WITH_LIBTORCH) $(CARGO) clippy --locked --release --workspace --all-targets -- -D warnings
	@$(WITH_LIBTORCH) RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --release --workspace --no-deps --document-private-items

.PHONY: fuzz
fuzz: ## Fuzz what is read from disk and the network, SECONDS_EACH=60 for each target (installs cargo-fuzz the first time)
	@ikjt/fuzz/run.sh $(or $(SECONDS_EACH),60)

.PHONY: libtorch
libtorch: ## Print where libtorch is, fetching it the first time
	@trainer/libtorch.sh
