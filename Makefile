# Every target makes its environment first; a second call only runs the target.
#   make train            train a small transformer on two ranks through a hook
#   make test             build and run the tests
#   make check            the checks of a change since BASE (the merge base with main); ALL=1 for all
#   make durations        run all tests, and store how long they take; an hour
#   make test-integrations   test hooks in training frameworks, in the listed versions; five minutes
#                         (LATEST=1: in their newest releases)
#   make distributed-suite   PyTorch's own tests of DDP, with our hook attached; ten minutes
#   make wrapper-suite    PyTorch's own distributed tests, with wrapped process groups; four minutes
#   make transport-suite  PyTorch's own distributed tests, with our backend; four minutes
#   make lint             ruff, mypy, import-linter, clang-format (make format fixes some errors)
#   make docs             build the documents' site in build/docs; any warning is an error
#   make docs-links       check the documents' links to other sites; needs a network
#   make bench            run the benchmarks; results go to benchmarks/results
#   make bench-loss       loss after 1,000 steps with each hook, three seeds; hours, can be interrupted
#   make bench-loss-sharded   the same on sharded models, of four ranks; hours, can be interrupted
#   make bench-loss-local   the same with an exchange once in 15 or 30 steps; an hour, can be interrupted
#   make bench-link       steps over links of 200 Mbit/s and 1 Gbit/s; root, iproute2, 15 minutes
#   make bench-far        the same at 200 Mbit/s and 50 ms; root, iproute2, half an hour
#   make bench-round-trips   steps over links of given delays; root, iproute2, ten minutes
#   make bench-auto       what auto chooses over links; root, iproute2, half an hour
#   make bench-attach     attaching over links of given delays; root, iproute2, ten minutes
#   make bench-wan        time to a loss over a slow and far link; root, iproute2, two hours
#   make bench-joining    the cost of a new rank for the others; root, iproute2, five minutes
#   make bench-elastic    ranks that are killed, stopped or cut off; root, iproute2, 45 minutes
#   make bench-sharded    sharded models over links of 200 Mbit/s; root, iproute2, 15 minutes
#   make bench-measured-link   links of given rates as bench measures them; root, iproute2, ten minutes
#   make bench-plan       predictions of plan for these steps; a minute
#   make bench-throttle   ThrottledProcessGroup against such links; root, iproute2, ten minutes
#   make bench-wire       the library's own transport against TCP and Gloo; root, iproute2, ten minutes
#   make cuda-compile     compile and inspect the CUDA kernels; needs nvcc, not a GPU
#   make gpu              smoke, times, tests, counters, sanitizers and benchmarks on a GPU, with the
#                         installed Python, torch and nvcc, and no network; at most nine minutes
#                         (ARGS=--dry-run: test all parts without a GPU)
#   make gpu-carry PYTHON=python3.12   build for make gpu on another machine, into build/carried
#   make wheel            build a wheel for the installed torch, in dist
#   make test-torch TORCH=2.15.0   run the tests against another torch, in its own environment
#   make test-asan, make test-tsan   tests of hooks on a build with a sanitizer; ten minutes
#   make modes            every hook in every mode; ten minutes
#   make kill-and-resume  train with each hook that has memory, kill it, resume; eight minutes
#   make soak             memory over a million cycles of each kind of autograd hook; five minutes
#   make soak-hooks       200 runs of each hook in stages, with delays and failures; half an hour
#   make elastic-histories   10,000 random histories of elastic training, in virtual time; five minutes
#   make wire-histories   random histories of the transport's links with sanitizers, and planted bugs; an hour
#   make training-histories   2,000 random histories of training with hooks, and planted faults; ten minutes
#   make error-feedback   test the claims of error feedback, in runs of 20,000 steps; ten minutes
#   make balance          1,000 random histories with error feedback, which loses nothing; an hour
#   make choice-evidence ARGS=reach   whether the tests that make check chooses notice faults; hours
#   make long-runs        long runs whose files have changed since they last passed, up to 20 minutes
#   make results          write docs/results.md from the stored results of the long runs
#   make clean            remove the environments and all build outputs
# Settings: PYTHON, TORCH, ARGS (passed to the command).

PYTHON ?= python3
# The torch that the project is developed and tested on; docs/torch_versions.md lists the others.
TORCH ?= 2.13.0
CUDA_TORCH ?= 2.14.1
ARGS ?=

VENV ?= .venv
# Where the environments of test-torch are.
TORCH_VENVS ?= build/venvs
PIP = $(VENV)/bin/python -m pip --quiet --disable-pip-version-check
# The long runs import helpers of the tests, and write results as the benchmarks do.
LONG_RUN = PYTHONPATH=$(CURDIR)/tests/support:$(CURDIR)/benchmarks:$(PYTHONPATH) $(VENV)/bin/python tests/long_runs
# Records a digest of the files with which a full long run has passed.
PASSED = $(if $(ARGS),,$(LONG_RUN)/called_for.py --passed $@)
NATIVE = setup.py build_support.py $(shell find csrc cuda -type f)

.PHONY: train test check durations choice-evidence wheel test-integrations docs docs-links docs-pages long-runs distributed-suite wrapper-suite transport-suite lint format bench bench-loss bench-loss-sharded bench-loss-local bench-link bench-far bench-round-trips bench-auto bench-attach bench-joining bench-wan bench-elastic bench-sharded bench-measured-link bench-plan bench-throttle bench-wire results cuda-compile gpu gpu-carry test-torch test-asan test-tsan modes kill-and-resume soak soak-hooks balance error-feedback elastic-histories wire-histories training-histories clean
.DELETE_ON_ERROR:

# Two files at a time, in the order of tests/support/cases.py: the longest first. A process that dies
# ends the run: a new one would run the same case again.
PARALLEL = --numprocesses 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

train: $(VENV)/built
	$(VENV)/bin/python -m torch_commhook train $(ARGS)

test: $(VENV)/built
	$(VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

# The checks of a change since the commit BASE or the merge base with main; with ALL=1, all checks.
check:
	$(PYTHON) tests/check.py $(if $(BASE),--base $(BASE)) $(if $(ALL),--all) $(ARGS)

durations: $(VENV)/built
	$(VENV)/bin/python -m pytest $(PARALLEL) --store-durations $(ARGS)

# It changes sources: run it in a clone.
choice-evidence: $(VENV)/built
	$(PIP) install coverage
	$(LONG_RUN)/choice_evidence.py $(ARGS)

# Lets an environment import the packages of $(VENV).
ABOVE_VENV = cd $(1)/lib/python3*/site-packages && \
  echo "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python3*/site-packages)')" > below.pth

# The frameworks have an environment of their own, which imports that of the tests.
FRAMEWORKS = tests/integrations/requirements.txt
INTEGRATIONS = .venv-integrations$(if $(LATEST),-latest)
test-integrations: $(VENV)/built $(INTEGRATIONS)/installed
	$(INTEGRATIONS)/bin/python -m pytest $(PARALLEL) -m "" tests/integrations $(ARGS)

$(INTEGRATIONS)/installed: $(VENV)/installed $(FRAMEWORKS)
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(call ABOVE_VENV,$(INTEGRATIONS))
	$(INTEGRATIONS)/bin/python -m pip --quiet --disable-pip-version-check install \
	  $(if $(LATEST),--upgrade $$(sed -n 's/==.*//p' $(FRAMEWORKS)),-r $(FRAMEWORKS))
	touch $@

wheel: $(VENV)/built
	$(VENV)/bin/python setup.py --quiet wheel $(ARGS)

# Sphinx has an environment of its own, which imports that of the tests and its build. Sphinx shows
# the warnings of a page only when it reads the page, so it reads all pages (--fresh-env).
SITE = .venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet --fresh-env \
  --conf-dir docs/site --doctree-dir build/docs-doctrees
docs: docs-pages
	$(SITE) --builder html build/docs-pages build/docs $(ARGS)

docs-links: docs-pages
	$(SITE) --builder linkcheck build/docs-pages build/docs-links $(ARGS)

docs-pages: $(VENV)/built .venv-docs/installed
	.venv-docs/bin/python docs/site/pages.py build/docs-pages

.venv-docs/installed: $(VENV)/installed docs/site/requirements.txt
	$(PYTHON) -m venv .venv-docs
	$(call ABOVE_VENV,.venv-docs)
	.venv-docs/bin/python -m pip --quiet --disable-pip-version-check install -r docs/site/requirements.txt
	touch $@

distributed-suite: $(VENV)/built
	$(LONG_RUN)/distributed_suite.py $(ARGS)
	$(PASSED)

wrapper-suite: SUITE = wrapper
transport-suite: SUITE = transport
wrapper-suite transport-suite: $(VENV)/built
	$(LONG_RUN)/distributed_suite.py --suite $(SUITE) $(ARGS)
	$(PASSED)

long-runs: $(VENV)/built
	$(LONG_RUN)/called_for.py --run $(ARGS)

bench: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_bucket.py $(ARGS)
	$(VENV)/bin/python benchmarks/bench_codec.py --processes 5 $(ARGS)
	$(VENV)/bin/python benchmarks/bench_hook.py $(ARGS)
	$(VENV)/bin/python benchmarks/bench_modes.py $(ARGS)
	$(VENV)/bin/python benchmarks/bench_dispatch.py $(ARGS)
	$(VENV)/bin/python benchmarks/bench_process_group.py $(ARGS)

bench-loss: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_loss.py $(ARGS)

bench-loss-sharded: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_loss_sharded.py $(ARGS)

bench-loss-local: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_loss_local.py $(ARGS)

bench-link: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_link.py $(ARGS)

bench-far: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_link.py --rates 200mbit --delay 25 $(ARGS)
	$(VENV)/bin/python benchmarks/bench_link.py --rates 200mbit --delay 25 --streamed $(ARGS)

bench-attach: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_attach.py $(ARGS)

bench-round-trips: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_round_trips.py $(ARGS)

bench-auto: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_auto.py $(ARGS)

bench-wan: $(VENV)/built $(INTEGRATIONS)/installed
	$(INTEGRATIONS)/bin/python benchmarks/bench_wan.py $(ARGS)

bench-joining: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_joining.py $(ARGS)

bench-elastic: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_elastic.py $(ARGS)

bench-sharded: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_sharded.py $(ARGS)

bench-measured-link: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_measured_link.py $(ARGS)

bench-plan: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_plan.py $(ARGS)

results: $(VENV)/built
	PYTHONPATH=$(CURDIR)/tests/support:$(CURDIR)/tests/long_runs $(VENV)/bin/python benchmarks/results_page.py $(ARGS)

bench-throttle: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_throttle.py $(ARGS)

bench-wire: $(VENV)/built
	$(VENV)/bin/python benchmarks/bench_wire.py $(ARGS)

lint: $(VENV)/linters
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	@$(VENV)/bin/clang-format --dry-run --Werror $(shell find csrc cuda examples tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.inl')

format: $(VENV)/linters
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(shell find csrc cuda examples tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.inl')

# torch comes first: the build uses the installed torch, which needs numpy.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install torch==$(TORCH) numpy setuptools wheel ninja
	touch $@

$(VENV)/built: $(VENV)/installed $(NATIVE)
	$(VENV)/bin/python setup.py --quiet develop --extras test
	touch $@

$(VENV)/linters: $(VENV)/built
	$(PIP) install ruff mypy clang-format import-linter
	touch $@

# Operators whose reference kernels also run on CUDA: checks of metadata, copies that NCCL sends, and
# PowerSGD's products, which cuBLAS computes.
CUDA_REFERENCE_ONLY = check_hook_result broadcast_coalesced low_rank_left low_rank_gather_left \
  low_rank_right low_rank_right_error low_rank_product sum_rows

# The kernels are compiled into a separate folder, so that the build in place stays.
cuda-compile:
	$(MAKE) .venv-cuda/installed VENV=.venv-cuda TORCH=$(CUDA_TORCH)
	COMMHOOK_CUDA=1 TORCH_CUDA_ARCH_LIST="8.0;9.0+PTX;10.0" .venv-cuda/bin/python setup.py --quiet build_ext --build-lib build/cuda
	.venv-cuda/bin/python cuda/check_build.py build/cuda/torch_commhook/lib --reference-only $(CUDA_REFERENCE_ONLY)
	PYTHONPATH=$(CURDIR)/tests/support .venv-cuda/bin/python tests/long_runs/called_for.py --passed $@

# Uses the installed Python: it has the torch for this machine's driver, and perhaps no network.
gpu:
	$(PYTHON) -m benchmarks.gpu $(ARGS)

# Needs a Python and a torch in the versions of the machine that has the GPU.
gpu-carry:
	$(PYTHON) -m benchmarks.gpu.carried

# A copy of the tree, without files that the tree no longer has. It keeps its build, and files that are
# the same keep their times, so that only changed files are compiled.
INDEX_OF = GIT_INDEX_FILE=$(abspath $(1)/build)
COPY_TREE = mkdir -p $(1)/build && $(INDEX_OF)/all git add --all && tree=$$($(INDEX_OF)/all git write-tree) && \
  $(INDEX_OF)/index git --work-tree=$(1) read-tree --reset -u $$tree

TORCHES = torch_commhook/cli/doctor/tested_torches.json
# Of the tree that is copied. Results that another torch has stored leave it as it was.
COMMIT = $(shell git rev-parse --short=8 HEAD)$(shell git diff --quiet HEAD -- . ':!$(TORCHES)' || echo -dirty)

# Another torch needs an environment of its own, and its own build in place, which stays beside it.
TORCH_VENV = $(TORCH_VENVS)/torch-$(TORCH)
TORCH_TREE = $(TORCH_VENVS)/tree-$(TORCH)
test-torch:
	$(call COPY_TREE,$(TORCH_TREE))
	mkdir -p $(TORCH_VENVS) && rm -f $(TORCH_VENV)/built
	COMMHOOK_CUDA=$${COMMHOOK_CUDA:-0} $(MAKE) -C $(TORCH_TREE) test TORCH=$(TORCH) VENV=$(abspath $(TORCH_VENV)) \
	  ARGS="$(or $(ARGS),--store-torch=$(CURDIR)/$(TORCHES) --commit=$(COMMIT))"

# A sanitizer needs its own build in place too.
test-asan: SANITIZER = address
test-tsan: SANITIZER = thread
test-asan test-tsan: $(VENV)/built
	$(call COPY_TREE,build/$@)
	cd build/$@ && COMMHOOK_SANITIZE=$(SANITIZER) COMMHOOK_CUDA=0 $(abspath $(VENV))/bin/python setup.py --quiet build_ext --inplace
	cd build/$@ && $(abspath $(VENV))/bin/python tests/long_runs/sanitizers/run.py $(SANITIZER) $(ARGS)
	$(PASSED)

modes: SCRIPT = all_modes
kill-and-resume: SCRIPT = kill_and_resume
soak: SCRIPT = soak_autograd_hooks
soak-hooks: SCRIPT = soak_hooks
balance: SCRIPT = balance
error-feedback: SCRIPT = error_feedback_runs
elastic-histories: SCRIPT = elastic_histories
wire-histories: SCRIPT = wire_histories
training-histories: SCRIPT = training_histories
modes kill-and-resume soak soak-hooks balance error-feedback elastic-histories wire-histories training-histories: $(VENV)/built
	$(LONG_RUN)/$(SCRIPT).py $(ARGS)
	$(PASSED)

clean:
	rm -rf build dist .venv .venv-* torch_commhook.egg-info
	find torch_commhook -name '*.so' -delete
