"""What a program imports to describe its agents and environments loads no model library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository_paths import HELPERS

import stateset_agents

PACKAGE = Path(stateset_agents.__file__).parent
MODULES = [
    *(
        f"stateset_agents.{folder}.{path.stem}"
        for folder in ("core", "cli", "tracking", "reporting")
        for path in sorted((PACKAGE / folder).glob("*.py"))
        if path.stem != "value_function"  # a network, for those who build one
    ),
    "stateset_agents.types.messages",
    "stateset_agents.types.settings",
    "stateset_agents.types.seeds",
    "stateset_agents.evaluation.evaluator",
    "stateset_agents.backends.base",
    "stateset_agents.backends.scripted",
    "stateset_agents.backends.loading",
    "stateset_agents.training.config",
    "stateset_agents.training.components",
    "stateset_agents.training.trl.settings",
]
IMPORT_EACH = """
import importlib, json, sys
heavy = {"torch", "transformers", "tokenizers", "safetensors"}
found = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    if heavy & sys.modules.keys():
        found[name] = sorted(heavy & sys.modules.keys())
        for module in [m for m in sys.modules if m.split(".")[0] in heavy]:
            del sys.modules[module]
print(json.dumps(found))
"""


def test_no_module_of_the_core_loads_torch_or_transformers() -> None:
    command = [sys.executable, "-c", IMPORT_EACH, json.dumps(MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {}


def test_a_trainer_loads_torch_and_nothing_that_only_some_trainings_need() -> None:
    code = """
import sys
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
unneeded = {"transformers", "tokenizers", "aiohttp", "httpx2", "jinja2", "peft", "datasets", "sqlite3"}
rooms = {f"stateset_agents.{room}" for room in ("answers", "claims", "sandbox", "reporting", "environments")}
print(sorted((unneeded | rooms) & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.long
def test_numeric_control_loads_no_language_model_library_and_no_gymnasium() -> None:
    paths = (path.relative_to(PACKAGE.parent) for path in (PACKAGE / "numeric").rglob("*.py"))
    modules = sorted(".".join(path.with_suffix("").parts) for path in paths)
    assert {
        f"stateset_agents.numeric.{name}" for name in ("acquisition.campaign", "autoscaling.grpo.trainer")
    } <= set(modules)
    code = "import importlib, sys\n" + "".join(f"importlib.import_module({name!r})\n" for name in modules)
    code += "print(sorted({'transformers', 'tokenizers', 'gymnasium'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_scripted_agent_answers_without_them() -> None:
    code = """
import asyncio, sys
from stateset_agents import MultiTurnAgent
from stateset_agents.backends.scripted import ScriptedBackend
async def main():
    async with MultiTurnAgent(backend=ScriptedBackend(["Which order?"])) as agent:
        print(await agent.generate_response("refund please"))
asyncio.run(main())
print(sorted({"torch", "transformers"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["Which order?", "[]"]


@pytest.mark.long
def test_a_training_loads_no_optional_package_that_it_does_not_use(tmp_path: Path) -> None:
    code = """
import asyncio, pathlib, sys
from tiny_training import make_trainer
async def main():
    trainer = make_trainer(pathlib.Path(sys.argv[1]), max_steps=1)
    await trainer.train()
    await trainer.close()
asyncio.run(main())
optional = {"peft", "trl", "bitsandbytes", "tensorboard", "wandb", "trackio", "vllm", "openai", "datasets"}
optional |= {"gymnasium", "mcp", "jsonschema", "openenv", "prometheus_client", "tau2", "loguru"}
print(sorted(optional & sys.modules.keys()))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    path = os.pathsep.join([str(HELPERS / "trainings"), str(PACKAGE.parent)])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
