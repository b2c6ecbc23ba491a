# make demo   install into .venv, and compare four policies with stragglers in about a minute
# make picture   the same with three seeds in about three minutes, drawn into the README's figure
# make test   install into .venv and run linter, type checker and tests
# make soak   install into .venv and run the long tests, which make test leaves out
# make native-sanitizers   run the native collectives, ranks as threads, and the sparse engine under the thread, address and
#                          undefined-behaviour sanitizers

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready

NATIVE := $(addprefix paceline/native/,kernels.cpp segment.cpp collectives.cpp mailbox.cpp group.cpp)
SPARSE := $(addprefix paceline/native/sparse/,linear.cpp completion.cpp cut.cpp order.cpp)

.PHONY: demo picture test soak check native-sanitizers clean

demo: $(READY)
	$(BIN)/paceline compare digits --workers 4 --policies all-reduce "k-sync(k=3)" async "local-sgd(every=8)" \
	  --delay "0.5+exp(1)" --delay-unit 8ms --batch-size 16 --optimizer "sgd(lr=0.2)" --epochs 4 --target 0.85

picture: $(READY)
	rm -rf build/picture
	$(BIN)/paceline compare digits --workers 4 --policies all-reduce "k-sync(k=3)" async "local-sgd(every=8)" \
	  --delay "0.5+exp(1)" --delay-unit 10ms --batch-size 16 --optimizer "sgd(lr=0.1)" --epochs 10 --target 0.9 --seeds 3 \
	  --out build/picture
	$(BIN)/paceline report build/picture --figures build/picture/figures
	cp build/picture/figures/error-against-time.png docs/figures/policies.png
	cp build/picture/figures/timeline-1.png docs/figures/waiting.png

test: $(READY) check
	$(BIN)/python -m pytest -n 2 -m "not soak"

soak: $(READY)
	$(BIN)/python -m pytest -n 2 -m soak -raP

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A sanitizer sees what threads of one process do to each other, so the ranks are threads here.
native-sanitizers:
	@mkdir -p build
	for kind in thread address,undefined; do \
	  $(CXX) -std=c++20 -O1 -g -Wall -Wextra -fsanitize=$$kind -fno-sanitize-recover=all -Ipaceline/native \
	    $(NATIVE) tests/native/stress.cpp -o build/stress -pthread && build/stress && \
	  $(CXX) -std=c++20 -O1 -g -Wall -Wextra -fsanitize=$$kind -fno-sanitize-recover=all -Ipaceline/native/sparse \
	    $(SPARSE) tests/native/sparse_stress.cpp -o build/sparse_stress -pthread && build/sparse_stress || exit 1; \
	done

# torch first and alone: a resolver that sees it among other requirements may settle on a GPU build.
$(READY): pyproject.toml constraints.txt setup.py $(wildcard $(foreach folder,paceline/native paceline/native/*,$(folder)/*.cpp $(folder)/*.h $(folder)/*.inc))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Paceline needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
