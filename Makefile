# Each target does its own set-up in .venv: about three minutes the first time, nothing after that.
# The CPU wheels of the model server and the trainer are for Python 3.11; PYTHON names another one.
PYTHON ?= python3.11
VENV := .venv
RUN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench chaos

demo: $(READY)
	$(RUN)/turnlog demo

test: $(READY)
	$(RUN)/python -m pytest

check: $(READY)
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
	$(RUN)/pyright
	$(RUN)/lint-imports

# Kills servers, engines and databases under working agents 300 times, then proves the log; 15 minutes at most.
# SEED=n repeats one.
chaos: $(READY)
	$(RUN)/python -m tests.chaos.run $(if $(SEED),--seed $(SEED))

bench: $(READY)
	@set -e; for script in $$(grep -l __main__ benchmarks/*.py); do echo "$$script"; $(RUN)/python "$$script"; done

# vLLM's CPU wheel asks for torchvision, torchaudio and torchcodec and gets CUDA builds, which fail to import beside the
# CPU build of torch. It does not need them for text models. The processors of the tests' tiny vision models import
# torchvision: it lies in a folder of its own, where only their servers look (tests/pictured).
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --upgrade pip
	$(RUN)/python -m pip install --editable '.[cpu,megatron,examples]' --group dev
	$(RUN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(RUN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/vision torchvision==0.28.0
	touch $(READY)

# Stock agent harnesses against the server (harnesses/README.md). Needs npm; most of the Python ones ask for 3.12.
HARNESS_PYTHON ?= python3.12
HARNESSES := harnesses/.work

.PHONY: harnesses
harnesses: $(READY) $(HARNESSES)/npm/.ready $(patsubst %,$(HARNESSES)/%/.ready,agents openhands vibe)
	$(RUN)/python harnesses/run.py $(ONLY)

$(HARNESSES)/npm/.ready: harnesses/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --no-audit --no-fund --no-update-notifier
	touch $@

$(HARNESSES)/%/.ready: harnesses/requirements/%.txt
	$(HARNESS_PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --requirement $<
	touch $@
