# Short names for scripts; each does its own set-up. The build itself is CMake's.
.DEFAULT_GOAL := help
.PHONY: help demo generate test compat red-test tsan nightly bench plots docs gpu-test gpu-sanitize gpu-bench gpu-training wheel wheel-test release-check build-times format fuzz clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
demo: ## build, then attention on real data, checked, timed and drawn; ARGS go to build/release/bin/strobe_demo
	@scripts/demo.sh $(ARGS)
generate: ## build, then a small GPT writes on from six prompts, over a paged KV cache; ARGS go to build/release/bin/generate
	@scripts/generate.sh $(ARGS)
test: ## build and run every test that needs no GPU
	@scripts/test.sh
compat: ## diffusers, transformers, peft, trl and their like beside the distribution flash-attn
	@scripts/compat.sh $(ARGS)
red-test: ## show that the tests notice broken kernels
	@scripts/red-test.sh
tsan: ## tests under ThreadSanitizer
	@scripts/tsan.sh
nightly: ## everything that needs no GPU, also what takes hours
	@scripts/nightly.sh
bench: ## Strobe and PyTorch on the CPU, same tensors, same process; ARGS go to bench/cpu_bench.py
	@scripts/bench.sh $(ARGS)
plots: ## docs/figures and the tables of docs/performance.md, from bench/results
	@scripts/plots.sh $(ARGS)
docs: ## the documentation site, build/docs/index.html: opens from the file, needs no network to be read
	@scripts/docs.sh $(ARGS)
gpu-test: ## on a machine with a GPU: correctness against float64; ARGS go to tests/gpu/run_gpu_tests.py
	@scripts/gpu.sh test $(ARGS)
gpu-sanitize: ## on a machine with a GPU: compute-sanitizer's four tools over every kernel instance; ARGS go to tests/gpu/sanitize.py
	@scripts/gpu.sh sanitize $(ARGS)
gpu-bench: ## on a machine with a GPU: Strobe and PyTorch's back ends; ARGS go to bench/gpu_bench.py
	@scripts/gpu.sh bench $(ARGS)
gpu-training: ## on a machine with a GPU: training of GPT models end to end; ARGS go to bench/gpt_training.py
	@scripts/gpu.sh training $(ARGS)
wheel: ## dist/: the wheel with its CUDA kernels, the wheel flash-attn, the sdist; checked; ARGS go to scripts/wheel.sh
	@scripts/wheel.sh $(ARGS)
wheel-test: ## as root: the wheels of dist/ on minimal Debian systems, the oldest and the newest; ARGS go to scripts/wheel-test.sh
	@scripts/wheel-test.sh $(ARGS)
release-check: ## all that must hold before a release, but the tests on GPUs (docs/releasing.md)
	@scripts/release-check.sh
build-times: ## how long each CUDA kernel took to compile; ARGS go to scripts/build_times.py
	@scripts/build_times.py $(ARGS)
format: ## clang-format over every source
	@scripts/format.sh
fuzz: ## libFuzzer targets, FUZZ_SECONDS (60) each
	@scripts/fuzz.sh
clean: ## remove what was built
	rm -rf build
