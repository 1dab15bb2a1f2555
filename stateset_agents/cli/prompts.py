"""`stateset-agents optimize-prompt`: gepa writes system prompts; is one better on held-out scenarios?"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from stateset_agents.cli import evaluate
from stateset_agents.cli.output import check_writable, display_path, print_result
from stateset_agents.runtime import event_loop
from stateset_agents.runtime.named_code import library
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

OF_OTHERS = ("--out", "--conversations")
"""Options of `evaluate` that have no place here: this verb's files are the new one and gepa's folder."""


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when gepa has ended, whatever it found."""
    args.out = args.conversations = None
    if Path(args.target).exists():
        raise ConfigurationError(f"{args.target} exists: give another file to --out, or remove it")
    check_writable(args.target)
    try:
        return _optimize(args)
    except KeyboardInterrupt:
        print(f"stateset-agents: {evaluate.how_to_go_on(args.argv)}", file=sys.stderr)
        return 130


def _optimize(args: argparse.Namespace) -> int:
    import yaml

    from stateset_agents.backends.openai.client import ChatClient
    from stateset_agents.core.agent import MultiTurnAgent
    from stateset_agents.evaluation import evaluator
    from stateset_agents.evaluation.comparison import compare
    from stateset_agents.evaluation.prompt_adapter import INSTALL, PROMPT, PromptAdapter, digest
    from stateset_agents.runs.experiment import read_experiment
    from stateset_agents.training.components import make_environment, make_reward
    from stateset_agents.training.experiment import EvaluationConfig
    from stateset_agents.training.settings.paths import resolve_paths

    endpoint = evaluate.endpoint_of(args, args.model)
    config = evaluate.experiment(args, None if endpoint else args.model)
    prompt, temperature = config.agent.system_prompt, evaluate.temperature(args)
    if not prompt:
        raise ConfigurationError(f"{args.config} has no agent.system_prompt: write the one to begin with")
    expect_that(
        0 < args.scenarios < args.max_metric_calls,
        "--scenarios",
        f"be from 1 to below --max-metric-calls, {args.max_metric_calls}",
        args.scenarios,
    )
    names = ("api_key_env", "timeout", "max_new_tokens")
    settings = {name: getattr(args, f"reflection_{name}") for name in names}
    reflection = ChatClient(args.reflection_endpoint, args.reflection_model, temperature=None, **settings)
    gepa, folder = library("gepa", INSTALL), Path(args.target).with_suffix(".gepa")
    environment, measured = make_environment(config.environment), config.evaluation or EvaluationConfig()
    evaluator.held_out(environment, measured.split, measured.episodes)  # before anything slow
    train = evaluator.held_out(environment, "train", None)
    scored = evaluator.spread(train, args.scenarios)
    measure = partial(
        evaluator.evaluate,
        environment=environment,
        reward_fn=make_reward(config.reward),
        temperature=temperature,
        seed=measured.seed,
        limits=replace(config.training.rollout_limits(), max_concurrent=measured.max_concurrent),
    )
    agent = endpoint.agent(config, measured) if endpoint else MultiTurnAgent(config.agent)
    identity = {"environment": dict(config.environment)}
    with event_loop.runner() as loop:
        adapter = PromptAdapter(agent, measure, reflection, folder, identity, loop.run)
        optimize = partial(gepa.optimize, adapter=adapter, reflection_lm=adapter.reflect, logger=adapter)
        try:
            if isinstance(agent, MultiTurnAgent):
                loop.run(agent.initialize())
            found = optimize(
                {PROMPT: prompt},
                trainset=[scenario for scenario in train if scenario not in scored] or scored,
                valset=scored,
                skip_perfect_score=False,  # make_reflective_dataset does, by verdicts: rewards may exceed 1
                max_metric_calls=args.max_metric_calls,
                stop_callbacks=[adapter.check],
                run_dir=str(folder / digest(f"{args.scenarios} {prompt}")),  # another beginning begins anew
                track_best_outputs=False,
                seed=measured.seed,
            )
        finally:
            if isinstance(agent, MultiTurnAgent):
                loop.run(agent.close())
        best = found.best_candidate[PROMPT]
        configs = [
            config.model_copy(update={"agent": config.agent.model_copy(update={PROMPT: text})})
            for text in (prompt, best)
            if best != prompt
        ]
        sides = [loop.run(evaluate.play(each, temperature, endpoint)) for each in configs]
    result = {"prompt": best, "num_prompts": found.num_candidates, "comparison": None}
    lines = [f"{found.num_candidates} prompts were scored, and are kept in {display_path(folder)}"]
    lines.append(f"reflection: {reflection.num_calls:,} requests, {reflection.num_tokens:,} tokens")
    if not sides:
        lines.append(f"none did better there than that of {args.config}: no file is written")
    else:
        for label, name, (_, side) in zip("AB", (args.config, args.target), sides, strict=True):
            result[label.lower()] = {**side, "model": name}
            lines += evaluate.side_lines(label, {**side, "model": name})
        comparison = compare(sides[0][0], sides[1][0])
        result["comparison"] = comparison.summary()
        is_better = comparison.verdict == "better"
        keep = "" if is_better else f", and is not shown to be better: keep that of {args.config}"
        lines += [*evaluate.comparison_lines(comparison), f"the new prompt stands in {args.target}{keep}"]
        _, data = read_experiment(args.config, {f"agent.{PROMPT}": best}, resolve=resolve_paths, others={})
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        Path(args.target).write_text(text, encoding="utf-8")
    print_result(result, args, "\n".join(lines))
    return 0
