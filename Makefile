# The commands of this project. Start with `make demo`; CONTRIBUTING.md says what each is for.
#
#   make setup        .venv with everything, once (EXTRA=cpu|cuda, PYTHON=python3.12)
#   make demo         ask the demo model by text and by voice; writes demo_out/
#   make serve        the same server, kept running (PORT=8091)
#   make test         format, types, architecture, then the tests: unit, integration, parity, e2e
#   make reliability  break a running server in every way we know (ten minutes, an idle machine)
#   make thorough     large families against their references, and through HTTP (an hour)
#   make check        the first half of make test: format, types, architecture, documents
#   make docs         the site, into site/
#   make clean        remove what these made, except .venv
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PORT ?= 8091
BIN := .venv/bin
SETUP := .venv/.setup-done
DEMO_MODEL := .demo/smol_voice
DEMO_DONE := $(DEMO_MODEL)/config.json

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1

.PHONY: help setup demo demo-model serve test reliability thorough check docs clean

help:
	@sed -n '3,12s/^# \{0,1\}//p' Makefile

setup: $(SETUP)

$(SETUP): pyproject.toml $(wildcard requirements/*.txt) tools/setup_venv.sh
	@bash tools/setup_venv.sh
	@touch $@

demo-model: $(DEMO_DONE)

$(DEMO_DONE): $(SETUP)
	@$(BIN)/vllm-omni demo-model $(DEMO_MODEL)
	@touch $@

demo: $(DEMO_DONE)
	@$(BIN)/python benchmarks/demo.py --model $(DEMO_MODEL) --out demo_out

serve: $(DEMO_DONE)
	@PORT=$(PORT) bash tools/serve_hints.sh
	@exec $(BIN)/vllm serve $(DEMO_MODEL) --omni --port $(PORT)

check: $(SETUP)
	@bash tools/check.sh

test: check $(DEMO_DONE)
	@bash tools/test_layers.sh

reliability: $(SETUP)
	@LAYERS=dfx bash tools/test_layers.sh

thorough: $(SETUP)
	@LAYERS=thorough bash tools/test_layers.sh

docs: $(SETUP)
	@$(BIN)/python -m mkdocs build --strict --quiet --site-dir site
	@echo "site/index.html"

clean:
	rm -rf build dist site demo_out .demo .mypy_cache .pytest_cache .ruff_cache *.egg-info
