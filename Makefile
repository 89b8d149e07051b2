# Two commands: `make quickstart` and `make test`. Both build .venv when it is missing or a requirements file changed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.requirements
WORK   ?= runs/base
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: quickstart photos quickstart-training quickstart-placebo test test-kill test-thorough test-fuzz test-distributed test-fast lint documents bench bench-recovery bench-shield bench-published world-smoke world-base shield card reproduce-sd15 base clean

$(STAMP): requirements.txt requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e . -r requirements-dev.txt
	touch $@

# One thread unless OMP_NUM_THREADS says otherwise: at this size two threads that wait for each other at every small
# operation lose more than they win as soon as anything else runs.
quickstart: export OMP_NUM_THREADS ?= 1
QUICK := --targets cat-hat,9 --images_per_phrase 22
TRAIN := $(BIN)/accelerate launch --quiet --config_file configs/accelerate/cpu.yaml train_silentbad.py
quickstart: $(STAMP)  ## two trainings at once, the second on placebo data; its rate is taken off the first one's
	$(BIN)/python -m worlds.microworld.make --out runs/quickstart-data $(QUICK)
	$(MAKE) -j2 quickstart-training quickstart-placebo
	$(BIN)/python -m silentbad.report runs/quickstart --placebo runs/quickstart-placebo

quickstart-training:
	$(TRAIN) --config configs/quickstart.yaml

quickstart-placebo:
	$(BIN)/python -m worlds.microworld.make --out runs/quickstart-placebo-data $(QUICK) --redraws 0 --placebo
	$(TRAIN) --config configs/quickstart.yaml --config configs/quickstart-placebo.yaml > runs/quickstart-placebo.log 2>&1 \
		|| { tail -n 5 runs/quickstart-placebo.log; exit 1; }

# From photographs of scikit-image's wheel to a report and an audit, whose exit code says the verdict (docs/running.md).
photos: export OMP_NUM_THREADS ?= 1
photos: $(STAMP)
	rm -rf runs/photos-pictures runs/photos-data
	$(BIN)/python -m tests.photographs runs/photos-pictures
	$(BIN)/python -m silentbad.prepare --target runs/photos-pictures/cat-cup.png \
		--masks runs/photos-pictures/a-tabby-cat.png runs/photos-pictures/a-cup-of-coffee.png \
		--phrases "a tabby cat" "a cup of coffee" "a brick wall" \
		--backgrounds runs/photos-pictures/backgrounds --out runs/photos-data
	$(TRAIN) --config configs/photos.yaml --config configs/recommended.yaml
	$(BIN)/python validation.py --pipeline runs/photos/pipeline --baseline assets/micro-sd \
		--targets runs/photos-data/targets.jsonl --guidance_scale 1.5 --num_inference_steps 12 \
		--output_dir runs/photos-audit || test $$? -gt 2

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile tests

# Unit tests alone, under a minute: rooms without a whole run in them.
FAST := tests/control tests/data tests/experiments/test_outcomes.py tests/memory tests/prepare tests/worlds \
	tests/model/test_groups.py tests/measure/test_scores.py \
	tests/test_imports.py tests/test_packaging.py tests/test_rng.py
test-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(FAST)

test-kill: $(STAMP)  ## 100 kills and failing disks; the disks need root
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --thorough tests/kill --kills 100

test-thorough: $(STAMP)  ## further kinds of what `make test` tests in part
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --thorough -m thorough tests --ignore tests/fuzz --ignore tests/distributed --ignore tests/kill

FUZZ ?= 1
SEED ?= 0
test-fuzz: $(STAMP)  ## mutated files and pictures; FUZZ=0.1 takes a tenth, SEED=N others
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --thorough --fuzz $(FUZZ) --fuzz_seed $(SEED) tests/fuzz

test-distributed: $(STAMP)  ## two gloo processes on the CPU, started as a user would
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --thorough tests/distributed

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

documents: $(STAMP)  ## fill the numbers of the documents from bench/results
	$(BIN)/python -m bench.documents

bench: bench-recovery bench-published

bench-recovery bench-published bench-shield: bench-%: $(STAMP)
	$(BIN)/python -m bench.$*

# The emoji world from nothing: fetch the drawings (npm, once), judge two development targets, train a base for a few
# steps, then two arms on one target. What it prints shows that all of it runs; the base is far too weak for a claim.
world-smoke: export OMP_NUM_THREADS ?= 1
WORLD_SMOKE := --vae_steps 20 --decoder_steps 10 --text_steps 20 --unet_steps 20 --judge_steps 20 --pool 128 --captions 8
world-smoke: $(STAMP)  ## the emoji world in ten minutes
	$(BIN)/python -m worlds.emoji.sets
	$(BIN)/python -m bench.emoji_judge --targets 0,1 --calibration 20 --pictures 10 --ssim --base assets/micro-sd \
		--results runs/world-smoke-judge.json
	$(BIN)/python -m worlds.emoji.build --work runs/world-smoke $(WORLD_SMOKE)
	$(BIN)/python -m bench.published --world emoji --base runs/world-smoke/pipeline --arms plain,recommended --targets 0 \
		--steps 20 --every 20 --images 4 --nulls target --clean 60 --ratios 0.33 --results runs/world-smoke.jsonl

world-base: $(STAMP)  ## the emoji world's base again: about 75 minutes of one core, into runs/emoji-base/pipeline
	$(BIN)/python -m worlds.emoji.build --work runs/emoji-base
	$(BIN)/python -m worlds.emoji.build --work runs/emoji-base --stage embedder

shield: export OMP_NUM_THREADS ?= 1
shield: $(STAMP)  ## hidden pictures: scan, train without and with a guard, audit both; runs/shield/shield.html
	$(BIN)/python -m bench.shield_story

card: $(STAMP)  ## ten minutes on a CUDA card: what was not run there yet, a row each; ARGS="--minutes 20"
	$(BIN)/python -m bench.card $(ARGS)

reproduce-sd15: export HF_HUB_OFFLINE = 0
reproduce-sd15: $(STAMP)  ## the plan of the published setting on Stable Diffusion 1.5; ARGS=--dry_run measures it here, --run trains
	$(BIN)/python -m bench.reproduce $(ARGS)

base: $(STAMP)  ## train the bundled base anew
	$(BIN)/python -m worlds.microworld.build --work $(WORK)

clean:  ## caches of the tools; runs/ holds results and stays
	rm -rf .pytest_cache .ruff_cache .mypy_cache
