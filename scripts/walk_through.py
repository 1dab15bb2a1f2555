"""The numbers of docs/concepts.md: one scenario, four conversations, one step; `--write` updates the page.

The embedded agent at its retail desk, seed fixed: the same on every run. Blocks go where the page says
```text walk="NAME".
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from pathlib import Path

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.update.batch import assign_credit
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup

PAGE = Path(__file__).parent.parent / "docs" / "concepts.md"
SEED, SCENARIO, WALKED = 0, 5, 3
"""Of the sampling; which training scenario; which member of its group is followed."""
METRICS = (
    "reward/mean",
    "reward/std",
    "success/rate",
    "rollout/turns",
    "tokens/agent",
    "tokens/environment",
    "loss/policy",
    "loss/total",
    "policy/ratio_mean",
    "kl/reference",
    "policy/entropy",
    "optimizer/grad_norm",
    "optimizer/learning_rate",
)


def text_of(message: Message) -> str:
    """`agent    where is my order`, tool calls as the model writes them."""
    calls = [f"{call.name}({', '.join(map(str, call.arguments.values()))})" for call in message.tool_calls]
    role = "agent" if message.role == "assistant" else message.role
    return f"{role:8}{' '.join([message.content, *calls]).strip()}"


def token_table(agent: MultiTurnAgent, walked: Trajectory) -> str:
    """The end of the prompt, the first reply and the tool's answer: each token with its mask and log-prob."""
    raw = agent.backend.tokenizer.hf  # type: ignore[attr-defined]  # the embedded one is transformers'
    first, second = walked.turns[:2]
    start = len(first.prompt_ids) - 2
    end = len(first.prompt_ids) + len(first.completion.token_ids) + len(second.prompt_ids) + 1
    columns = list(zip(walked.token_ids, walked.action_mask, walked.logprobs, strict=True))
    rows = ["place  id   mask  log-prob  token", f"  ... {start} before"]
    for index, (token, bit, logprob) in enumerate(columns[start:end], start):
        value = f"{logprob:8.3f}".replace("-0.000", " 0.000") if bit else "       ."
        rows.append(f"{index:5}  {token:3}  {bit:4}  {value}  {raw.decode([token])}")
    return "\n".join([*rows, f"  ... {len(columns) - end} more"])


def group_table(group: TrajectoryGroup, config: TrainingConfig) -> str:
    """Reward, advantage, and the loss of one token, member by member."""
    rows = ["member  success  reward  advantage  agent tokens  loss of each of its tokens"]
    samples = assign_credit([group], config).samples
    number = len(samples)
    for member, (trajectory, sample) in enumerate(zip(group.trajectories, samples, strict=True)):
        advantage, length = sample.advantages[0], trajectory.num_agent_tokens
        per_token = -advantage / (number * length)
        rows.append(
            f"{member:6}  {trajectory.success!s:7}  {trajectory.reward:6.2f}  {advantage:9.3f}  {length:12}  "
            f"{per_token:+.4f}"
        )
    return "\n".join(rows)


async def walk() -> dict[str, str]:
    """The blocks by name."""
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48))
    desk = RetailDesk()
    scenario = desk.scenarios("train")[SCENARIO]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            max_steps=1,
            num_generations=4,
            per_device_train_batch_size=1,
            lr_scheduler_type="constant",
            warmup_ratio=0,
            seed=SEED,
            output_dir=folder,
        )
        async with MultiTurnGRPOTrainer(agent, desk, EnvironmentReward(), config) as trainer:
            [group] = await trainer.generate_trajectories([scenario])
            walked = group.trajectories[WALKED]
            metrics = await trainer.training_step([group])
            after = [await total_logprob(agent, trajectory) for trajectory in group.trajectories]
    assert walked.outcome is not None
    facts = ("family", "order_id", "item", "status", "days", "arrives", "price")
    earned = [turn.reward or 0.0 for turn in walked.turns]
    return {
        "scenario": "\n".join(
            [f"id       {scenario.id}", f"family   {scenario.family}", f"opening  {scenario.opening}"]
            + [f"context  {fact} = {scenario.context[fact]}" for fact in facts if fact in scenario.context]
        ),
        "conversation": "\n".join(text_of(message) for message in walked.messages),
        "tokens": token_table(agent, walked),
        "reward": "\n".join(
            [f"turn {number}   {reward:+.2f}" for number, reward in enumerate(earned, start=1)]
            + [f"outcome  {walked.outcome.reward:+.2f}   success {walked.outcome.success}"]
            + [f"reward   {walked.reward:+.2f}"]
        ),
        "group": group_table(group, trainer.config),
        "step": "\n".join(
            ["member  advantage sign  log-prob of all it said: before -> after"]
            + [
                f"{member:6}  {'+' if (trajectory.reward or 0) > mean(group) else '-':14}  "
                f"{sum(trajectory.logprobs):8.3f} -> {now:8.3f}"
                for member, (trajectory, now) in enumerate(zip(group.trajectories, after, strict=True))
            ]
        ),
        "metrics": "\n".join(f"{name:24} {metrics[name]:z.4f}" for name in METRICS if name in metrics),
    }


def mean(group: TrajectoryGroup) -> float:
    """Of the group's rewards."""
    return sum(reward or 0.0 for reward in group.rewards) / len(group.rewards)


async def total_logprob(agent: MultiTurnAgent, trajectory: Trajectory) -> float:
    """What the agent's tokens of a trajectory are worth to the weights that it speaks with now."""
    scores = await agent.backend.score(trajectory.token_ids)
    return sum(score for score, bit in zip(scores, trajectory.action_mask[1:], strict=True) if bit)


def with_blocks(page: str, blocks: dict[str, str]) -> str:
    """The page with each block in its fence."""
    return re.sub(
        r'(```text walk="(\w+)"\n).*?^(```$)',
        lambda match: f"{match[1]}{blocks[match[2]]}\n{match[3]}",
        page,
        flags=re.DOTALL | re.MULTILINE,
    )


if __name__ == "__main__":
    values = asyncio.run(walk())
    if "--write" in sys.argv[1:]:
        PAGE.write_text(with_blocks(PAGE.read_text(encoding="utf-8"), values), encoding="utf-8")
    else:
        for name, block in values.items():
            print(f"--- {name}\n{block}\n")
