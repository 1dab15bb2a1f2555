"""A task of a verifiers taskset: its environment and harness play with the agent, its rewards score it.

python verifiers_task.py shelves --list > tasks.jsonl   # what there is to play
python verifiers_task.py shelves                        # by ExternalProgram, a task on its stdin

Other options are those of verifiers' own `vf-eval`, for both calls the same: --env.taskset.num-tasks 10.
"""

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

import verifiers.v1 as vf
from pydantic_config import cli
from verifiers.v1.cli.resolve import extract_id, narrow_config, plugin_errors, with_positional_taskset
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.interrupt import install_interrupt


def configured(words: list[str]) -> EvalConfig:
    """The settings of `vf-eval` with these options, at the agent's endpoint, all roles on this machine."""
    words = with_positional_taskset(words)
    taskset = extract_id(words, "env.taskset")
    for role, spec in agent_config_fields(vf.env_config_type(taskset, extract_id(words, "env"))()).items():
        here = {f"--env.{role}.runtime.type": "subprocess"}  # else a rented sandbox
        if spec.harness is None and vf.default_harness_id(taskset) == "bash":
            here[f"--env.{role}.harness.id"] = "null"  # else a shell on this machine
        given = {word.partition("=")[0] for word in words}
        words += [word for flag, value in here.items() if flag not in given for word in (flag, value)]
    url = os.environ.get("OPENAI_BASE_URL", "none")
    words += ["--client.base-url", url, "--client.api-key-var", "OPENAI_API_KEY", "--no-push"]
    sys.argv[1:] = words  # where its parser looks
    try:
        return cli(narrow_config(EvalConfig, words))
    except SystemExit as error:  # it has printed a frame of many lines
        raise ValueError("verifiers refuses these options, see above") from error


def scenario(task: vf.Task) -> dict[str, object]:
    """The line of a task; the hash tells who plays it that it is still the same."""
    number = task.data.idx
    opening = task.data.prompt_text or f"task {number}"
    return {"id": str(number), "opening": opening, "context": {"task": number, "hash": task.hash}}


async def played(env: vf.Env, task: vf.Task, config: EvalConfig) -> vf.Episode:
    """One episode, as verifiers plays it."""
    context = vf.ModelContext(model="agent", client=config.client, sampling=config.sampling)
    async with env.serving():
        return await env.run_episode(task, context)


def verdict(episode: vf.Episode) -> dict[str, object]:
    """The reward, a mean where the agent has several roles; a success has the full score everywhere."""
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    scores = {name: one.score for trace in traces for name, one in trace.rewards.items() if one}
    metrics = {name: value for trace in traces for name, value in trace.metrics.items()}
    return {
        "reward": sum(trace.reward for trace in traces) / len(traces),
        "success": all(score >= 1 for score in scores.values()),
        "metadata": {**metrics, **scores},
    }


def main() -> None:
    """List the tasks, or play the one on standard input."""
    is_list = "--list" in sys.argv
    wanted = {} if is_list else json.loads(sys.stdin.readline())["context"]
    for name, folder in (("PATH", Path(sys.executable).parent), ("PYTHONPATH", sys.path[0])):
        # uv is there, which starts verifiers' chat loop, and the taskset, which its server of tools imports
        os.environ[name] = os.pathsep.join(filter(None, [str(folder), os.environ.get(name)]))
    with contextlib.redirect_stdout(sys.stderr), plugin_errors():
        config = configured([word for word in sys.argv[1:] if word != "--list"])
        env = vf.load_environment(config.env)
        tasks = env.taskset.select(config.select) if is_list else env.taskset.include(idx=[wanted["task"]])
        if not tasks.bounded:
            sys.exit("this taskset is endless: say how many tasks by -n")
    if is_list:
        for task in tasks:
            print(json.dumps(scenario(task)))
        return
    install_interrupt()  # who ends this process ends what verifiers has started, too
    with contextlib.redirect_stdout(sys.stderr):
        task = next(iter(tasks), None)
        if task is None or task.hash != wanted["hash"]:
            sys.exit(
                f"task {wanted['task']} is not the one that was listed: list and play with the same options"
            )
        episode = asyncio.run(played(env, task, config))
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        sys.exit(" ".join(f"{errors[-1].type}: {errors[-1].message}".split()))
    print(json.dumps(verdict(episode)))


if __name__ == "__main__":
    main()
