# `make help` lists what there is. tools/setup.sh does the set-up and says what it needs.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
# Most packages are compiled when they are first imported (tools/setup.sh): once, and not in each process.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo test test-all test-programs docs aarch64 wheels gpu-test mutations soak accelerator check bench stub format lint native-tests sanitize clean

VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.tensorstow

# Folders are listed too: their times change when a file is added or removed.
NATIVE := $(shell find csrc) CMakeLists.txt pyproject.toml
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.h')
PYTHON_DIRS := src tests tools docs/conf.py $(wildcard benchmarks examples)

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 22

demo: $(DONE)/demo ## Set everything up and run the demonstration (three to four minutes)
	$(BIN)/python examples/demo

# Whole files, in the order of their names: what a file's tests share is made once. Both runs go at
# once, as copies of the simulated accelerator sleep, and each ends though the other fails.
CORES := $(shell nproc 2>/dev/null || echo 2)
TEST_PROCESSES ?= $(shell echo $$(( $(CORES) < 4 ? $(CORES) : 4 )))

PYTEST = $(BIN)/python -m pytest --durations 30 -n $(TEST_PROCESSES)

test: APART = --ignore tests/programs
test: $(DONE)/test ## Set everything up and run the tests, in TEST_PROCESSES (cores, up to 4)

test-all: $(DONE)/test ## The same, and test-programs in the same processes

test test-all: native-tests
	@mkdir -p build
	$(PYTEST) --dist loadfile --no-loadscope-reorder --ignore tests/gpu $(APART) \
	  > build/tests.log 2>&1 & rest=$$!; \
	PYTHONPATH=tests $(PYTEST) -p simulated.plugin -p unskipped tests/gpu > build/gpu-tests.log 2>&1 & \
	gpu=$$!; tail -n +1 -f --pid=$$gpu build/gpu-tests.log; wait $$gpu; gpu=$$?; \
	tail -n +1 -f --pid=$$rest build/tests.log; wait $$rest; rest=$$?; \
	grep -hE '^(FAILED|ERROR|NOT TESTED) ' build/gpu-tests.log build/tests.log; \
	exit $$((gpu ? gpu : rest))

test-programs: $(DONE)/test ## Run the demo, examples, benchmarks, the wheel and every block of the pages
	$(PYTEST) --dist loadfile --no-loadscope-reorder tests/programs

mutations: $(DONE)/test ## Take each wait for a device away in turn: a test must fail (half an hour)
	PYTHONPATH=tests $(BIN)/python -m mutations.run

KILLS ?= 300

soak: $(DONE)/test mutations aarch64 ## Both, and attack files and system calls, kill training runs, KILLS times (300) each; drop 200 of each; kernels of other processors
	PYTHONPATH=tests $(BIN)/python -m parity.processors
	PYTHONPATH=tests $(BIN)/python -m attacks.soak $(KILLS)
	PYTHONPATH=tests $(BIN)/python -m crash.soak $(KILLS)
	PYTHONPATH=tests $(BIN)/python -m crash.soak --undone $(KILLS)
	TENSORSTOW_ROUNDS=200 $(BIN)/python -m pytest --timeout 3600 tests/faults/test_given_back.py
	$(BIN)/python -m pytest -m soak

gpu-test: $(DONE)/test ## Run what needs an accelerator (skipped without one)
	$(BIN)/python -m pytest tests/gpu

accelerator: ## Run all that a real accelerator is for, from source, and keep what is measured
	tools/accelerator.sh

# Linters and the site take one core each: they run while sanitizers build. What two of them would
# install at once is installed before.
check: $(DONE)/dev $(DONE)/docs ## Run formatters, linters, types, layers, the site and sanitizers
	$(MAKE) --no-print-directory --output-sync=target -j3 lint docs sanitize

bench: $(DONE)/bench ## Measure, print and save the figures
	$(BIN)/python benchmarks/run.py

lint: $(DONE)/dev
	$(BIN)/ruff format --check $(PYTHON_DIRS)
	$(BIN)/ruff check $(PYTHON_DIRS)
	$(BIN)/mypy --strict src examples/demo
	PYTHONPATH=src $(BIN)/lint-imports --no-logo
	$(BIN)/python tools/imports.py
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

docs: $(DONE)/docs ## Build the documentation as a site in build/site, with warnings as errors
	$(BIN)/python tools/site.py build/pages
	$(BIN)/python -m sphinx --fail-on-warning --keep-going -q -c docs build/pages build/site

stub: $(DONE)/native ## Write the native core's stub anew
	$(BIN)/python -m nanobind.stubgen -q -m tensorstow._native -o src/tensorstow/_native.pyi

format: $(DONE)/dev ## Rewrite Python, C++ and the table of packages in the house's format
	$(BIN)/python tools/architecture.py
	$(BIN)/ruff format $(PYTHON_DIRS)
	$(BIN)/ruff check --fix $(PYTHON_DIRS)
	$(BIN)/clang-format -i $(CXX_FILES)

# The native core alone, without Python: fast to build, and sanitizers see all of the process.
CMAKE_TESTS = $(BIN)/cmake -S . -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
  -DSTOW_PYTHON=OFF -DSTOW_TESTS=ON -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
# What sanitizers look at is the same at -Og, which compiles in a fifth of the time.
SANITIZED = -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-Og -g1"
# ninja cannot share make's job server, and says so as an error.
BUILD = env -u MAKEFLAGS $(BIN)/cmake --build
CTEST = $(BIN)/ctest --output-on-failure --no-tests=error --parallel 2
# Thread sanitizer of older compilers stops at addresses that newer kernels hand out at random.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)

# Where the Python module was built: its objects are tested.
native-tests: $(DONE)/native
	$(BIN)/cmake -S . -B build/native -DSTOW_TESTS=ON
	$(BUILD) build/native --target native_tests
	$(CTEST) --test-dir build/native

sanitize: $(DONE)/python
	$(CMAKE_TESTS) -B build/asan $(SANITIZED) -DSTOW_SANITIZE=address,undefined
	$(BUILD) build/asan --target native_tests
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(CTEST) --test-dir build/asan
	$(CMAKE_TESTS) -B build/tsan $(SANITIZED) -DSTOW_SANITIZE=thread
	$(BUILD) build/tsan --target native_tests
	TSAN_OPTIONS=halt_on_error=1 $(FIXED_ADDRESSES) $(CTEST) --test-dir build/tsan --exclude-regex '^formats$$' # one thread

AARCH64 = -DCMAKE_TOOLCHAIN_FILE=tools/zig.cmake -DSTOW_ZIG=$(abspath $(BIN)/python) -DSTOW_TARGET=aarch64-linux-musl

aarch64: $(DONE)/cross ## Build the native tests for aarch64 and run them under qemu-user
	$(CMAKE_TESTS) -B build/aarch64 -DCMAKE_BUILD_TYPE=Release $(AARCH64)
	$(BUILD) build/aarch64 --target native_tests
	$(CTEST) --test-dir build/aarch64

WHEEL_PYTHONS ?= python3.11 python3.12

wheels: $(DONE)/cross ## Build the source archive and wheels for x86-64 and aarch64 into dist/, for WHEEL_PYTHONS
	tools/wheels.sh $(WHEEL_PYTHONS)

# Set-up, one file per finished step, so that nothing is done twice.
$(DONE)/python: tools/setup.sh
	tools/setup.sh python
	@mkdir -p $(DONE) && touch $@

$(DONE)/native: $(DONE)/python $(NATIVE)
	tools/setup.sh native
	@touch $@

$(DONE)/demo $(DONE)/test $(DONE)/dev $(DONE)/bench $(DONE)/docs $(DONE)/cross: pyproject.toml | $(DONE)/native
	tools/setup.sh extra $(@F)
	@touch $@

clean: ## Remove what was built; .venv stays, its native part is built again
	rm -rf build dist tensorstow-demo $(DONE)/native
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
