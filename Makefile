# make demo · make test · make test-all · make fuzz · make lint · make clean
# TORCH=2.13.0 (or another release of requirements/) chooses one for demo and test.

PYTHON ?= python3
TORCH ?= default
RELEASES := $(patsubst requirements/torch-%.txt,%,$(wildcard requirements/torch-*.txt))
# CLEAN=1 makes test-all remove each release's environment, some 5 GB, after use.
CLEAN ?=
RUN := .venv/$(TORCH)/bin/python
OURS := conftest.py examples test tools torch

.PHONY: demo test test-all clean fuzz lint environment

demo: environment
	$(RUN) examples/demo.py

test: environment
	$(RUN) -m pytest -n 2

test-all:
	@for release in $(RELEASES); do \
		$(MAKE) test $(if $(CLEAN),clean) TORCH=$$release || exit 1; \
	done

clean:
	rm -rf .venv/$(TORCH)

# Random programs against eager; reports how many were run.
EXAMPLES ?= 5000
fuzz: environment
	MUTATION_EPILOGUE_EXAMPLES=$(EXAMPLES) $(RUN) -m pytest \
		test/functorch/test_mutation_epilogue_random.py --hypothesis-show-statistics

lint: environment
	$(RUN) -m ruff check $(OURS)
	$(RUN) -m ruff format --check $(OURS)
	$(RUN) -m usort check torch test/functorch
	$(RUN) -m codespell_lib $(OURS) *.md docs Makefile pyproject.toml
	$(RUN) -m mypy tools examples

environment:
	@$(PYTHON) tools/environment.py $(TORCH)
