# Each target does all the set-up it needs. Needs Python 3.11 to 3.14 and a package registry; see `make help`.

PYTHON ?= python3
VENV ?= .venv
# Test processes: one more than cores this process may use, for a quarter of the time a test waits for a process or a
# lease; at most 8 (each holds torch, about 1 GB).
WORKERS ?= $(shell expr $$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN) + 1)
# cpu: torch without CUDA, in an environment that is not there yet: make demo TORCH=cpu
TORCH ?=
CPU_BUILDS := https://download.pytorch.org/whl/cpu
# Further arguments of pytest or of the benchmark: make test ARGS='-k pgd'
ARGS ?=

BIN := $(VENV)/bin
# What a user needs, with figures; and for the other targets what the developers need beside it.
INSTALLED := $(VENV)/.user
STAMP := $(VENV)/.dev
DEMO := .demo

# Bytecode is kept whatever the environment says: without it each of the many processes that the tests start compiles
# everything anew, and pytest rewrites 40,000 lines of tests in every worker (14 CPU seconds each).
export PYTHONDONTWRITEBYTECODE :=

# Colour where the result goes to a terminal, also when make collects the output (-j, -O); NO_COLOR wins.
COLOUR := $(if $(NO_COLOR),,$(if $(MAKE_TERMOUT),FORCE_COLOR=1))

.DEFAULT_GOAL := help
.PHONY: help env demo site docs test bench gpu fidelity fuzz soak slurm scale mutants planted coverage release nightly gpu-piece check lint format settings golden results wheel constraints clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

env: $(STAMP) ## the environment of a developer, in .venv; make demo needs and makes a smaller one

# uv installs in seconds what takes pip minutes. It compiles nothing: 330 MB of Python would take about a minute of CPU,
# extrapolated from timm; the fifth of it that is ever imported is compiled, and kept, by the first process that imports
# it. Where uv cannot be had, or does not find what pip finds (it does not read pip's configuration), pip does it all.
define install
	@echo "make: installing $(1) into $(VENV)" >&2
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv \
	    && $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt \
	        --build-constraint constraints.txt --editable '$(1)'; \
	then :; \
	else \
	    echo "make: uv could not do it, pip is slower" >&2; \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '$(1)'; \
	fi
	@touch $@
endef

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "make: $(PYTHON) is older than Python 3.11; say which one to use: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	$(if $(filter cpu,$(TORCH)),@grep -E '^torch(vision)?==' constraints.txt | xargs $(BIN)/python -m pip install --quiet \
	    --disable-pip-version-check --index-url $(CPU_BUILDS))
	$(call install,.[attacks])

$(STAMP): $(INSTALLED)
	$(call install,.[dev])
	@$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt datasets 2> /dev/null \
	    || $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt datasets 2> /dev/null \
	    || echo "make: without the package datasets its tests are left out" >&2

demo: $(INSTALLED) ## the smoke preset of sfat-cifar10 on scikit-learn's digits, and its first table (about a minute)
	@rm -rf $(DEMO) && mkdir $(DEMO)
	@$(BIN)/fatbench run suite sfat-cifar10 --smoke --db $(DEMO)/fatbench.db
	@[ -t 1 ] || export COLUMNS=$${COLUMNS:-160}; \
	$(COLOUR) $(BIN)/fatbench report sfat-cifar10 --preset smoke --table T3 --format terminal --db $(DEMO)/fatbench.db \
		-c report.published=none -c report.notes=none
	@echo "These networks saw 300 digits for two rounds: it runs, and the numbers say nothing of the methods."
	@echo To see all tables beside the numbers of the paper: $(BIN)/fatbench report sfat-cifar10 --preset smoke --db $(DEMO)/fatbench.db
	@echo To add a method of your own: $(BIN)/fatbench new aggregator my_rule --beside fat-baselines

site: $(INSTALLED) ## the page of the committed results: site/index.html
	@$(BIN)/fatbench site results/*.jsonl.xz $(wildcard results/submitted/*.jsonl) -o site

# An environment of its own: torchattacks wants a requests that Sphinx does not. What Sphinx lacks it finds in ours.
docs: $(STAMP) ## the documents as a site: build/docs/index.html; a warning is an error
	@[ -e $(VENV)/docs ] || { $(BIN)/python -m venv --without-pip $(VENV)/docs && \
	    { $(BIN)/uv pip install --quiet --python $(VENV)/docs/bin/python -r docs/requirements.txt 2> /dev/null || \
	    $(BIN)/python -m pip --python $(VENV)/docs/bin/python install --quiet --disable-pip-version-check \
	        -r docs/requirements.txt; } && \
	    $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	        > $$($(VENV)/docs/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_fatbench.pth; } || \
	    { rm -rf $(VENV)/docs; exit 1; }
	@OMP_NUM_THREADS=1 $(VENV)/docs/bin/python -m sphinx --quiet --fail-on-warning docs build/docs

# One thread a process: the arrays are small, and the workers already fill the cores.
test: $(STAMP) ## the tests of a commit; make test ARGS='-k pgd' runs some, make test ARGS='-m slow' the slow ones
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist worksteal \
	    -m 'not slow and not nightly' $(ARGS)

# Minutes on two quiet cores; on a GPU where there is one. Ratios are of CPU time, on a GPU of time.
bench: $(STAMP) ## how fast it is, against what people run: results/bench; make bench ARGS='--rows at_nin'
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks -o results/bench $(ARGS)

# Some minutes, and a network: it fetches the authors' programs, or takes them from clones that are here.
fidelity: $(STAMP) ## the authors' programs beside ours: results/bench; make fidelity ARGS='--clones FOLDER --only sfat'
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fidelity -o results/bench $(ARGS)

# Half an hour or more on one core, and nightly in continuous integration; the tests run the first 80 cases.
fuzz: $(STAMP) ## 10,000 inputs that are a little wrong, none of which may end in a traceback; make fuzz ARGS='--kind suite'
	@OMP_NUM_THREADS=1 $(BIN)/python tests/fuzzing.py $(ARGS)

# As root, who may mount the small disk that is filled.
soak: $(STAMP) ## eight runners, killed, stopped and locked out, end as if undisturbed; make soak ARGS='--minutes 60'
	@OMP_NUM_THREADS=1 nice $(BIN)/python tests/soak.py $(ARGS)

# As root, with Debian's slurm-wlm, slurmctld, slurmd and munge; it ends the SLURM that it starts. Some 20 minutes.
slurm: $(STAMP) ## a real SLURM of three nodes on this machine, and every fault of a site's first day
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m '' tests/test_real_slurm.py $(ARGS)

# Ten gigabytes in build/scale, and half an hour; make scale ARGS='--seeds 1 --times 1' is a tenth of the commands.
scale: $(STAMP) ## what commands cost on 100,000 cells and 10 million numbers; make scale ARGS='--only plan'
	@OMP_NUM_THREADS=1 $(BIN)/python tests/scale.py $(ARGS)
	@[ -n "$(ARGS)" ] || OMP_NUM_THREADS=1 $(BIN)/python tests/scale_growth.py

# Which files, and the tests that guard them: [tool.mutmut] of pyproject.toml. The folder mutants/ keeps what was seen.
mutants: $(STAMP) ## small mistakes in the program, and which the tests do not see; ARGS='fatbench.methods.aggregators.x_sfat*'
	@OMP_NUM_THREADS=1 $(BIN)/python -m mutmut run $(ARGS)
	@$(BIN)/python -m mutmut results

coverage: $(STAMP) ## the lines of fatbench/ that the tests of a commit run, per cent
	@OMP_NUM_THREADS=1 $(BIN)/python -m coverage run --source fatbench -m pytest -q -m 'not slow and not nightly' $(ARGS) >&2
	@$(BIN)/python -m coverage report --format total

# Half an hour. Fewer tests are as good as before if they see as many of these.
planted: $(STAMP) ## forty mistakes, each in a copy of the program, and the test that sees it; make planted ARGS='holm kappa'
	@OMP_NUM_THREADS=1 $(BIN)/python tests/planted.py $(ARGS)

nightly: $(STAMP) ## what is too long for every commit: every test, slurm, fuzz, mutants, planted and soak
	@$(MAKE) test ARGS="-m '' --ignore=tests/test_real_slurm.py"
	@$(MAKE) slurm fuzz mutants planted soak

# Nine minutes at a time; the same command goes on while it ends with 75.
gpu: $(STAMP) ## half an hour on a GPU, worst risks first: results/bench; make gpu ARGS=--rehearse needs none
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.gpu $(ARGS)

# Nine minutes at a time, from the files of results/pieces; the same command goes on while it ends with 75.
gpu-piece: $(STAMP) ## Table 9 of SFAT, one local epoch, on a GPU in pieces; make gpu-piece ARGS='--data FOLDER'
	@OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.piece $(ARGS)

check: lint test ## all that must pass before a commit

lint: $(STAMP) ## ruff, mypy, who imports whom, and every suite file
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -c "from fatbench.suite import asked, files, signatures as s; [s.FILE.read_text(), asked.LISTING.read_text()] == [s.shipped(), files.shipped()] or exit('fatbench/suite/*.json are not what functions and suites say: make settings')"
	@$(BIN)/fatbench check suites/*.yaml

format: $(STAMP) ## put the code into the shape that lint asks for
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

settings: $(STAMP) ## fatbench/suite/*.json: what functions say of their settings, and how many cells suites have
	@$(BIN)/python -c "from fatbench.suite import signatures as s; s.FILE.write_text(s.shipped())"
	@$(BIN)/python -c "from fatbench.suite import asked, files; asked.LISTING.write_text(files.shipped())"

golden: $(STAMP) ## write the files under tests/golden anew; look at the difference before committing it
	@FATBENCH_UPDATE_GOLDEN=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet -k golden

results: $(STAMP) ## the pages of results/ anew, from their templates and the committed rows
	@OMP_NUM_THREADS=1 PYTHONPATH=. $(BIN)/python docs/results_pages.py

wheel: $(STAMP) ## the wheel and the source archive, in dist/
	@$(BIN)/python -m hatchling build

# Up to the upload, which is the workflow's: git push origin vVERSION. The wheel is built twice, and from the archive.
release: $(STAMP) ## check, build and tag a version: make release VERSION=0.1.0
	@docs/release.sh "$(VERSION)" $(BIN)

# pip cannot override what torchattacks asks of requests, uv does (pyproject.toml): neither can have the other's pins.
constraints: $(STAMP) ## newest versions that resolve, as the pins of constraints.txt
	@head -2 constraints.txt > constraints.new
	@echo uv | $(BIN)/uv pip compile --quiet pyproject.toml - --extra dev --extra postgres --upgrade \
	    --python-version 3.11 --no-header --no-annotate \
	    $(foreach name,requests urllib3 idna chardet charset-normalizer,--no-emit-package $(name)) >> constraints.new
	@mv constraints.new constraints.txt

clean: ## remove the environment, the demo and the caches; results stay
	@rm -rf $(VENV) $(DEMO) .rehearsal site build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
