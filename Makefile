# These are the verbs of this repository. Logic lives in scripts/ and CMake; each verb works from a
# fresh clone.
.DEFAULT_GOAL := help
.PHONY: help setup build check test demo docs lint format asan tsan tsan-grpc bench faults chaos fuzz helm test-images test-kube

help:    ## list the verbs
	@sed -n 's/^\([a-z-]*\): *## /  make \1\t/p' Makefile | expand -t 16

setup:   ## install Debian packages and the pinned Python environment in .venv
	@scripts/setup

build:   ## build everything in build/release and install thalweg (editable) into .venv
	@scripts/build

check:   ## check what has changed since the last commit: format, types, the tests it touches
	@scripts/check $(BASE)

test:    ## build, then run the C++ unit tests and the Python tests
	@scripts/test

demo:    ## train a CNN on Fashion-MNIST through 2 nodes x 2 workers; picture in out/demo
	@scripts/demo

docs:    ## build the documentation site in out/site; check its links
	@scripts/docs

lint:    ## check format, style, types, spelling and clang-tidy; changes nothing
	@scripts/lint

format:  ## rewrite sources in the style that lint checks
	@scripts/format

asan:    ## run the unit tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@scripts/sanitize asan

tsan:    ## run the unit tests of rooms with threads, but without gRPC, under ThreadSanitizer
	@scripts/sanitize tsan

tsan-grpc: ## run the unit tests of the room that speaks gRPC under ThreadSanitizer
	@scripts/sanitize tsan-grpc

helm:    ## check the Helm chart and the manifests (builds helm and others into .tools, once)
	@scripts/helm_check

test-images: ## build the images with buildah, run them and compose.yaml with podman (root; IMAGES=all: training too, 6 GB)
	@scripts/test_images $(IMAGES)

test-kube: ## test chart and jobs on a real Kubernetes of NODES=3 nodes (root; builds it into .tools, once: 24 min)
	@scripts/test_kube $(if $(NODES),--nodes $(NODES))

bench:   ## measure all cases beside their peers into out/bench (root; about 25 min)
	@scripts/bench

faults:  ## attack servers beside a healthy job, run other long tests (long; root)
	@scripts/faults

chaos:   ## disturb a job at random and check every bit (root): make chaos SEED=1 SECONDS=300
	@scripts/chaos "$(SEED)" "$(SECONDS)"

fuzz:    ## let parsers of what peers send read made-up bytes: make fuzz SECONDS=60 for each
	@scripts/fuzz $(SECONDS)
