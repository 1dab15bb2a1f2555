"""Four pictures of numeric control, drawn from the code that they show.

    PYTHONPATH=. .venv/bin/python scripts/control_figures.py    # docs/images/control-*.svg

- control-architecture: the modules of GRPOPolicyNetwork in the order in which a forward pass calls them;
- control-advantages: one group's credit by each estimator, and by a critic of the same episodes;
- control-actions: the action space, from the hierarchy to the index;
- control-pipeline: one update, with the arrays that a real one hands on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stateset_agents.numeric.autoscaling.actions import (
    TRAFFIC_WEIGHTS,
    ConfigAction,
    InfrastructureActionSpace,
    ScalingAction,
)
from stateset_agents.numeric.autoscaling.environment import InfrastructureEnv
from stateset_agents.numeric.autoscaling.grpo.network import GRPOPolicyNetwork
from stateset_agents.numeric.credit import Values, credit
from stateset_agents.numeric.environments.base import map_observations
from stateset_agents.numeric.environments.classic import BatchedCartPole
from stateset_agents.numeric.evaluation import evaluate
from stateset_agents.numeric.policy import MlpPolicy, as_tensors
from stateset_agents.numeric.rollout import Rollout, action_keys, collect
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.update import update
from stateset_agents.runs.optimizer import Optimization

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "images"
INK, FAINT, FILL, STRONG = "#374151", "#9ca3af", "#eef2ff", "#4f46e5"
COLOURS = ("#4f46e5", "#059669", "#d97706", "#dc2626", "#0891b2", "#7c3aed", "#65a30d", "#db2777")
WIDTH = 760


def text(x: float, y: float, words: str, *, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, lines: Sequence[str], fill: str = FILL) -> str:
    """A rectangle with its lines in the middle, the first of them bold."""
    drawn = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" fill="{fill}" '
        f'stroke="{FAINT}"/>'
    ]
    top = y + height / 2 - 7.5 * (len(lines) - 1) + 4
    for number, line in enumerate(lines):
        bold = 'font-weight="bold"' if number == 0 and len(lines) > 1 else ""
        drawn.append(text(x + width / 2, top + 15 * number, line, anchor="middle", extra=bold))
    return "".join(drawn)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}" '
        'marker-end="url(#head)"/>'
    )


def svg(title: str, height: float, drawn: Sequence[str]) -> str:
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
    )
    heading = text(16, 24, title, extra='font-weight="bold" font-size="14"')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'font-family="sans-serif" font-size="12" fill="{INK}"><title>{escape(title)}</title>{head}'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>'
        f"{heading}{''.join(drawn)}</svg>\n"
    )


def shape(value: Any) -> str:
    return f"[{', '.join(map(str, value.shape))}]"


# ------------------------------------------------------------------------------ architecture


def calls(network: GRPOPolicyNetwork, rows: int) -> list[tuple[str, nn.Module, str]]:
    """(name, module, shape of its output) of each block, as a forward pass calls them."""
    encoder = network.state_encoder
    lstms = enumerate(encoder.temporal_encoder)
    blocks: dict[str, nn.Module] = {f"state_encoder.temporal_encoder.{i}": lstm for i, lstm in lstms}
    blocks |= {
        f"state_encoder.{name}": getattr(encoder, name) for name in ("attention", "current", "encoder")
    }
    blocks |= {f"transformer.{i}": layer for i, layer in enumerate(network.transformer)}
    blocks |= {"policy_head": network.policy_head}
    if network.value_head is not None:
        blocks["value_head"] = network.value_head
    found: list[tuple[str, nn.Module, str]] = []

    def noting(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            found.append((name, module, shape(output[0] if isinstance(output, tuple) else output)))

        return note

    handles = [module.register_forward_hook(noting(name)) for name, module in blocks.items()]
    window = torch.zeros(rows, encoder.history_length, encoder.num_metrics)
    with torch.inference_mode():
        network(window, window[:, -1])
    for handle in handles:
        handle.remove()
    return found


def architecture(rows: int = 32) -> str:
    """One box per block; behind it what it hands on."""
    network = GRPOPolicyNetwork()
    network.train(False)
    encoder = network.state_encoder
    total = sum(weight.numel() for weight in network.parameters())
    steps, width = encoder.history_length, encoder.num_metrics
    drawn = [box(40, 44, 330, 30, [f"metrics_history [{rows}, {steps}, {width}]"], "#ffffff")]
    y = 74.0
    for name, module, output in calls(network, rows):
        size = sum(weight.numel() for weight in module.parameters())
        lines = [f"{name}: {type(module).__name__}, {size:,} weights", f"→ {output}"]
        if name == "state_encoder.current":  # beside the attention, and joined with it
            drawn += [
                box(410, y - 108, 330, 30, [f"current_metrics [{rows}, {width}]"], "#ffffff"),
                arrow(575, y - 78, 575, y - 44),
                box(410, y - 44, 330, 44, lines),
                arrow(410, y - 10, 370, y + 32),
            ]
        elif name == "value_head":  # beside the other head
            drawn += [arrow(370, y - 14, 410, y + 34), box(410, y + 20, 330, 44, lines)]
        else:
            drawn += [arrow(205, y, 205, y + 20), box(40, y + 20, 330, 44, lines)]
            y += 64
    title = f"GRPOPolicyNetwork with its defaults: {total:,} weights, a batch of {rows} windows"
    return svg(title, y + 24, drawn)


# ------------------------------------------------------------------------------ advantages


def played(policy: MlpPolicy, members: int) -> Rollout:
    environment = BatchedCartPole()
    keys = action_keys(0, 0, 1, members)
    return collect(policy, environment, [3], group_size=members, keys=keys, max_steps=60)


def critic_values(policy: MlpPolicy, rollout: Rollout) -> Values:
    with torch.inference_mode():

        def valued(observations: Any) -> Any:
            return policy.values(as_tensors(observations)).double().numpy()

        steps = len(rollout.rewards)
        flat = map_observations(lambda part: part.reshape(-1, *part.shape[2:]), rollout.observations)
        return Values(valued(flat).reshape(steps, -1), valued(rollout.final_observations))


def advantages(members: int = 8) -> str:
    """One CartPole group; a line per member, a panel per estimator."""
    policy = MlpPolicy(BatchedCartPole().spec, critic=True)
    rollout = played(policy, members)
    panels = {
        name: credit(
            rollout,
            name,
            gamma=0.98,
            values=critic_values(policy, rollout) if name == "gae" else None,
            scaling="population" if name == "group" else "batch",
        ).advantages
        for name in ("group", "step_group", "gae")
    }
    subtitles = {
        "group": "the whole return against the group's",
        "step_group": "return-to-go against living siblings",
        "gae": "an untrained critic's surprise, discounted",
    }
    drawn: list[str] = []
    wide, high, longest = 215.0, 190.0, int(rollout.lengths.max())
    for number, (name, values_TB) in enumerate(panels.items()):
        left, top = 40.0 + number * 240, 80.0
        drawn += [
            text(left, 52, name, extra='font-weight="bold"'),
            text(left, 68, subtitles[name], extra='font-size="11"'),
            f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="none" stroke="{FAINT}"/>',
        ]
        alive = rollout.alive
        low, top_value = float(values_TB[alive].min()), float(values_TB[alive].max())

        def y_of(value: float, low: float = low, high_value: float = top_value, top: float = top) -> float:
            return top + high - high * (value - low) / ((high_value - low) or 1.0)

        if low < 0 < top_value:
            drawn.append(
                f'<line x1="{left}" x2="{left + wide}" y1="{y_of(0):.1f}" y2="{y_of(0):.1f}" '
                f'stroke="{FAINT}" stroke-dasharray="3 3"/>'
            )
        for value in (low, top_value):
            drawn.append(
                text(left - 4, y_of(value) + 4, f"{value:.1f}", anchor="end", extra='font-size="10"')
            )
        for row in range(members):
            length = int(rollout.lengths[row])
            points = " ".join(
                f"{left + wide * step / (longest - 1):.1f},{y_of(float(values_TB[step, row])):.1f}"
                for step in range(length)
            )
            colour = COLOURS[row % len(COLOURS)]
            drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        drawn.append(text(left + wide / 2, top + high + 18, f"step, 1 to {longest}", anchor="middle"))
    lengths = ", ".join(str(int(length)) for length in rollout.lengths)
    drawn.append(text(40, 316, f"Episodes end after {lengths} steps. Credit as it is trained on, scaled."))
    title = f"The credit of {members} CartPole episodes from one start, played by an untrained policy"
    return svg(title, 332, drawn)


# ------------------------------------------------------------------------------ actions


def actions() -> str:
    """The three choices, and the table of indices."""
    space = InfrastructureActionSpace()
    options: Mapping[str, list[str]] = {
        "scaling (replicas)": [
            f"{action.name} {action:+d}" if action else f"{action.name} 0" for action in ScalingAction
        ],
        "config (of a replica)": [action.name for action in ConfigAction],
        "traffic_weight (canary, %)": [", ".join(map(str, TRAFFIC_WEIGHTS))],
    }
    drawn = [box(300, 40, 160, 34, ["action", f"{space.total_actions} indices"])]
    for number, (name, names) in enumerate(options.items()):
        left = 20.0 + number * 248
        drawn += [arrow(380, 74, left + 112, 100), box(left, 100, 224, 26, [name])]
        drawn += [
            text(left + 8, 146 + 15 * row, option, extra='font-size="11"') for row, option in enumerate(names)
        ]
    top, cell, left = 292.0, 26.0, 210.0
    drawn.append(text(20, top - 18, "index at traffic_weight 0; each of the next ten indices has 10 % more"))
    for row, scaling in enumerate(ScalingAction):
        y = top + row * cell
        drawn.append(text(left - 8, y + 17, scaling.name, anchor="end", extra='font-size="11"'))
        for column, config in enumerate(ConfigAction):
            index = space.encode_action(scaling, config, 0)
            fill = STRONG if scaling == 0 and config == ConfigAction.NO_CHANGE else FILL
            colour = 'fill="#ffffff"' if fill == STRONG else ""
            x = left + column * 74
            drawn += [
                f'<rect x="{x}" y="{y}" width="72" height="{cell - 2}" fill="{fill}"/>',
                text(x + 36, y + 16, str(index), anchor="middle", extra=colour),
            ]
    y = top + len(ScalingAction) * cell + 14
    for column, config in enumerate(ConfigAction):
        first, _, rest = config.name.partition("_")
        x = left + column * 74 + 36
        drawn.append(text(x, y, first.lower(), anchor="middle", extra='font-size="10"'))
        drawn.append(text(x, y + 12, rest.lower(), anchor="middle", extra='font-size="10"'))
    return svg("InfrastructureActionSpace: a scaling, a setting and a share of the traffic", y + 30, drawn)


# ------------------------------------------------------------------------------ pipeline


def pipeline(num_groups: int = 4, group_size: int = 8) -> str:
    """One update on the simulated cluster, from seeds to weights."""
    environment = InfrastructureEnv(horizon=120)
    policy = MlpPolicy(environment.spec)
    seeds = list(range(num_groups))
    rollout = collect(
        policy,
        environment,
        seeds,
        group_size=group_size,
        keys=action_keys(0, 0, num_groups, group_size),
        max_steps=60,
    )
    credited = credit(rollout, "step_group", gamma=0.95)
    observations = rollout.observations
    assert not isinstance(observations, Mapping)
    config = ControlConfig(gamma=0.95, max_episode_steps=60, minibatch_size=480, num_iterations=2)
    optimization = Optimization(policy, config, num_updates=config.total_steps)
    metrics = update(policy, optimization, rollout, config).metrics
    weights = sum(weight.numel() for weight in policy.parameters())
    scores = evaluate(policy, environment, range(8))
    stages = [
        (
            "InfrastructureEnv.reset",
            [f"{num_groups} seeds, {group_size} members each", f"{len(rollout.seeds)} rows"],
        ),
        (
            "collect",
            [f"observations {shape(observations)}", f"actions, rewards, alive {shape(rollout.actions)}"],
        ),
        (
            "credit",
            [
                f"step_group: advantages {shape(credited.advantages)}",
                f"{int(credited.trained.sum())} trained steps",
            ],
        ),
        (
            "update",
            [
                f"{weights:,} weights of an MlpPolicy",
                f"{metrics['optimizer/steps']:.0f} optimiser steps on minibatches of whole groups",
            ],
        ),
        ("evaluate", [f"{len(scores.returns)} held-out starts", "the likeliest actions"]),
    ]
    drawn: list[str] = []
    for number, (name, lines) in enumerate(stages):
        y = 44.0 + number * 76
        drawn.append(box(130, y, 500, 56, [name, *lines]))
        if number + 1 < len(stages):
            drawn.append(arrow(380, y + 56, 380, y + 76))
    return svg("One update of ControlTrainer, with the arrays that it hands on", 44 + len(stages) * 76, drawn)


FIGURES: Mapping[str, Callable[[], str]] = {
    "architecture": architecture,
    "advantages": advantages,
    "actions": actions,
    "pipeline": pipeline,
}


def main() -> None:
    torch.set_num_threads(1)
    for name, figure in FIGURES.items():
        (FOLDER / f"control-{name}.svg").write_text(figure(), encoding="utf-8")


if __name__ == "__main__":
    main()
