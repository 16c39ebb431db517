# make demo · make test · make test-all · make lint
# TORCH=2.13.0 (or another file of requirements/) chooses a release for demo and test.

PYTHON ?= python3
TORCH ?= default
RELEASES := 2.15.0 2.14.1 2.13.0
RUN := .venv/$(TORCH)/bin/python

.PHONY: demo test test-all environment

demo: environment
	$(RUN) examples/demo.py

test: environment
	$(RUN) -m pytest -n 2

test-all:
	for release in $(RELEASES); do $(MAKE) test TORCH=$$release || exit 1; done

environment:
	@$(PYTHON) tools/environment.py $(TORCH)
