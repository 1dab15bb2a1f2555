"""`stateset-agents optimize-prompt`: gepa writes system prompts; is one better on held-out scenarios?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stateset_agents.cli import evaluate
from stateset_agents.cli.output import check_new, print_result
from stateset_agents.cli.run_settings import overrides
from stateset_agents.runtime import event_loop
from stateset_agents.runtime.named_code import library
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

OF_OTHERS = ("--out", "--conversations", "--price-in", "--price-out")
"""Options of `evaluate` that are not this verb's: --out is the new file, beside which conversations stand."""


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when gepa has ended, whatever it found."""
    import yaml

    from stateset_agents.backends.openai.client import ChatClient
    from stateset_agents.core.agent import MultiTurnAgent
    from stateset_agents.evaluation.comparison import compare
    from stateset_agents.evaluation.evaluator import held_out, spread
    from stateset_agents.evaluation.prompt_adapter import INSTALL, PROMPT, PromptAdapter, digest
    from stateset_agents.runs.experiment import read_experiment
    from stateset_agents.tracking.run_folder import replace_file
    from stateset_agents.training.settings.paths import resolve_paths

    vars(args).update(dict.fromkeys(("out", "conversations", "price_in", "price_out")), keeps=True)
    target, folder = Path(args.target), Path(f"{args.target}.gepa")
    check_new(args.target)
    fits = 0 < args.scenarios < args.max_metric_calls
    expect_that(fits, "--scenarios", "be from 1 to below --max-metric-calls", args.scenarios)
    endpoint = evaluate.endpoint_of(args, args.model)
    config = evaluate.experiment(args, None if endpoint else args.model)
    prompt = config.agent.system_prompt
    if not prompt:
        raise ConfigurationError(f"{args.config} has no agent.system_prompt: write the one to begin with")
    names = ("api_key_env", "timeout", "max_new_tokens")
    options = {name: getattr(args, f"reflection_{name}") for name in names}
    reflection = ChatClient(*args.reflection, temperature=None, **options)
    gepa, measure = library("gepa", INSTALL), evaluate.measurement(config, evaluate.temperature(args))
    train = held_out(measure.keywords["environment"], "train", None)
    scored = spread(train, args.scenarios)
    remote = endpoint and endpoint.agent(config, measure.keywords["limits"].max_concurrent)
    agent = remote or MultiTurnAgent(config.agent)
    with event_loop.runner() as loop:
        identity = {**config.environment, "weights": _weights(str(config.agent.model_name))}
        adapter = PromptAdapter(agent, measure, reflection, folder, identity, loop.run)
        beginning = (args.scenarios, prompt, args.model, args.temperature, measure.keywords["seed"], identity)
        if isinstance(agent, MultiTurnAgent):
            loop.run(agent.initialize())
        try:
            optimization = gepa.optimize(
                {PROMPT: prompt},
                trainset=[scenario for scenario in train if scenario not in scored] or scored,
                valset=scored,
                adapter=adapter,
                reflection_lm=adapter.reflect,
                skip_perfect_score=False,  # make_reflective_dataset does, by verdicts: rewards may exceed 1
                max_metric_calls=args.max_metric_calls,
                stop_callbacks=[adapter.check],
                logger=adapter,
                run_dir=str(folder / digest(repr(beginning))),  # another one begins anew
                track_best_outputs=False,
                seed=measure.keywords["seed"],
            )
            best = optimization.best_candidate[PROMPT]
            sides = [loop.run(adapter.play(text)) for text in (prompt, best) if best != prompt]
        finally:
            if isinstance(agent, MultiTurnAgent):
                loop.run(agent.close())
    result: dict[str, Any] = {"prompt": best, "num_prompts": optimization.num_candidates, "comparison": None}
    lines = [f"prompts scored: {optimization.num_candidates}, kept in {folder}"]
    for client in (remote.client, reflection) if remote else (reflection,):
        lines.append(f"{client.model}: {client.num_calls:,} requests, {client.num_tokens:,} tokens")
    if not sides:
        lines.append(f"none did better there than that of {args.config}: no file is written")
    else:
        for label, name, side in zip("AB", (args.config, args.target), sides, strict=True):
            result[label.lower()] = {"model": name, **side.summary()}
            lines += evaluate.side_lines(label, result[label.lower()])
        comparison = compare(*sides)
        result["comparison"] = comparison.summary()
        no = "" if comparison.verdict == "better" else f", not shown to be better than that of {args.config}"
        lines += [*evaluate.comparison_lines(comparison), f"the new prompt stands in {target}{no}"]
        settings = overrides(args.set, {"agent.model_name": None if endpoint else args.model})
        settings |= {f"agent.{PROMPT}": best}
        _, data = read_experiment(args.config, settings, resolve=resolve_paths, others={})
        replace_file(target, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    print_result(result, args, "\n".join(lines))
    return 0


def _weights(model: str) -> list[float]:
    """When a folder's weights were written, which tells them from those that it had before; nothing of a
    name."""
    return [file.stat().st_mtime for file in sorted(Path(model).glob("**/*.safetensors"))]
