# Short names for scripts; each does its own set-up. The build itself is CMake's.
.DEFAULT_GOAL := help
.PHONY: help demo test red-test gpu-test bench gpu-bench plots format fuzz clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20
demo: ## build, then attention on real data, checked and timed
	@scripts/demo.sh
test: ## build and run every test that needs no GPU
	@scripts/test.sh cpu
red-test: ## show that the tests notice broken kernels
	@scripts/red-test.sh
gpu-test: ## build with CUDA and run every test, on a machine with a GPU
	@scripts/test.sh cuda
bench: ## Strobe and PyTorch on the CPU, same tensors, same process
	@scripts/bench.sh cpu
gpu-bench: ## Strobe and its peers on the GPU
	@scripts/bench.sh cuda
plots: ## figures from bench/results
	@scripts/bench.sh plots
format: ## clang-format over every source
	@scripts/format.sh
fuzz: ## libFuzzer targets, FUZZ_SECONDS (60) each
	@scripts/fuzz.sh
clean: ## remove what was built
	rm -rf build
