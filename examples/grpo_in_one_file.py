"""GRPO over whole conversations, written out in one file: an agent learns to staff a service desk.

    .venv/bin/python examples/grpo_in_one_file.py
    .venv/bin/python examples/grpo_in_one_file.py --steps 20 --seed 1

For readers who know GRPO from the paper (https://arxiv.org/abs/2402.03300), where a sample is one answer to
one question. Here a sample is a conversation: the agent speaks, a tool or a caller answers, the agent speaks
again, and the reward is for all of it. Begin at `main`, the training, and follow its calls upwards.

`MultiTurnGRPOTrainer` samples the same conversations and computes the same loss; a test compares the two. It
adds retries and time limits, checkpoints, a run folder, packed rows, and other losses and estimators.

Suffixes name axes: P scenarios of a step, G members of a group, B rows, T tokens of a row, V the vocabulary,
N the tokens in B rows that the agent sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from stateset_agents import AgentConfig, EnvironmentReward, MultiTurnAgent, Scenario, Trajectory
from stateset_agents.algorithms.advantages import group_advantages, zero_variance_fraction
from stateset_agents.algorithms.losses import Denominators, LossInputs, LossOutput, Metrics, policy_loss
from stateset_agents.backends.base import Session
from stateset_agents.core.environment import Environment
from stateset_agents.core.rollout.episode import EpisodeSeeds
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.evaluation.evaluator import evaluate, held_out
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Status, TrajectoryGroup, Turn, as_groups

NUM_SCENARIOS, NUM_GENERATIONS = 8, 8  # P and G: 64 conversations a step
NUM_ITERATIONS = 2  # optimiser steps on each step's conversations
MICRO_BATCH = 16  # B, rows of one forward
LEARNING_RATE = 3e-4  # suits half a million weights; large models take a hundredth of it
CLIP, BETA, MAX_GRAD_NORM = 0.2, 0.01, 1.0


async def play(
    agent: MultiTurnAgent, environment: Environment, scenario: Scenario, session: Session, seeds: EpisodeSeeds
) -> Trajectory:
    """One conversation from its opening to its reward, with every token as it was sampled."""
    # The backend decodes when every participant waits for it, so which turns share a batch depends on what
    # was said and never on timing: the same seed gives the same weights again.
    with agent.backend.participate():
        await asyncio.sleep(0)  # all conversations participate before any asks for a turn
        conversation = await environment.start(scenario, seeds.user)
        prompt = agent.template.prompt(conversation.opening, conversation.tools)
        row: list[int] = []  # [T] what the model has read and said
        turns: list[Turn] = []
        while True:
            row += prompt
            # Temperature 1 and no top-k: the loss is about the distribution that the tokens are drawn from.
            sampling = agent.sampling(stream=derive(seeds.agent, len(turns)))
            completion = await agent.reply(row, sampling, session=session, turn=len(turns))
            row += completion.token_ids
            answer = await conversation.step(completion.message)  # a tool's result or the caller's words
            turn = Turn(prompt_ids=tuple(prompt), completion=completion)
            turns.append(replace(turn, feedback=answer.messages, reward=answer.reward))
            if answer.terminated or answer.truncated:
                break
            # Only what is new is tokenised. Rendering the whole conversation again could spell the agent's
            # words in other tokens than it sampled, and those would be trained.
            # A turn cut by length has no end token yet: the delta begins with it.
            end = row[-1] if row[-1] in agent.template.stop_ids else None
            prompt = agent.template.delta(answer.messages, completion.message.tool_calls, end=end)
        outcome = await conversation.outcome()
        await conversation.close()
        await agent.backend.release(session)  # forget its keys and values
    status = Status.TERMINATED if answer.terminated else Status.TRUNCATED
    trajectory = Trajectory(
        scenario=scenario, member=session.member, turns=tuple(turns), status=status, outcome=outcome
    )
    return replace(trajectory, reward=(await EnvironmentReward().score(trajectory)).score)


async def roll_out(
    agent: MultiTurnAgent, environment: Environment, scenarios: Sequence[Scenario], *, seed: int, step: int
) -> list[TrajectoryGroup]:
    """[P] a group of G scored conversations for each scenario; all P * G are played at once."""
    conversations = []
    for episode, scenario in zip(agent.new_episodes(len(scenarios)), scenarios, strict=True):
        user_seed = derive(seed, "user", step, scenario.id)  # the members of a group meet the same caller
        for member in range(NUM_GENERATIONS):
            seeds = EpisodeSeeds(user=user_seed, agent=derive(seed, "agent", step, scenario.id, member))
            conversations.append(play(agent, environment, scenario, Session(episode, member), seeds))
    return as_groups(await asyncio.gather(*conversations))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some of a step's conversations, each in a row of its own."""

    input_ids: Tensor  # [B, T] padded on the right, where causal attention never looks
    action_mask: Tensor  # [B, T - 1] True where the *next* token is one that the agent sampled
    old_logprobs: Tensor  # [N] under pi_old, the policy that sampled
    ref_logprobs: Tensor  # [N] under pi_ref, the policy before training
    advantages: Tensor  # [N] of the conversation that each token belongs to
    trajectory_ids: Tensor  # [N] the number of that conversation within the step


def make_batches(groups: Sequence[TrajectoryGroup], reference: nn.Module) -> tuple[list[Batch], Denominators]:
    """A step's conversations in micro-batches, and the counts that its loss is averaged by."""
    # (reward - mean of the group) / std of the group. The mean replaces a critic: it estimates what this
    # scenario is worth to this policy. Where all members earn the same no behaviour stands out, good or bad:
    # the advantages are exactly 0, and the group has no gradient but the KL's.
    advantages_P_G = group_advantages([group.rewards for group in groups])
    rows = [
        (trajectory, advantage)
        for group, advantages_G in zip(groups, advantages_P_G, strict=True)
        for trajectory, advantage in zip(group.trajectories, advantages_G, strict=True)
        if advantage is not None  # without a reward: it stands in no mean, and teaches nothing
    ]
    rows.sort(key=lambda row: len(row[0].token_ids))  # rows of like length together: little is padded
    # Counted over the step. A mean per micro-batch would weigh a token by the rows that it happens to lie
    # with; shares of one mean add up to the same gradient however the step is cut.
    denominators = Denominators.of([trajectory.num_agent_tokens for trajectory, _ in rows])
    batches = []
    for first in range(0, len(rows), MICRO_BATCH):
        trajectories, advantages = zip(*rows[first : first + MICRO_BATCH], strict=True)
        counts = torch.tensor([trajectory.num_agent_tokens for trajectory in trajectories])
        input_ids = padded([trajectory.token_ids for trajectory in trajectories])
        action_mask = padded([trajectory.action_mask for trajectory in trajectories])[:, 1:].bool()
        # From the rollout, which stored the probabilities that it drew by. A forward could only find them
        # again, at the price of one, and after the first optimiser step it would find another policy's.
        old_logprobs = padded([trajectory.logprobs for trajectory in trajectories])[:, 1:][action_mask]
        with torch.no_grad():
            ref_logprobs = token_logprobs(reference, input_ids, action_mask)
        batch = Batch(
            input_ids=input_ids,
            action_mask=action_mask,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            # One outcome for many turns: each token of the agent is credited with all of it.
            advantages=torch.tensor(advantages).repeat_interleave(counts),
            trajectory_ids=torch.arange(first, first + len(trajectories)).repeat_interleave(counts),
        )
        batches.append(batch)
    return batches, denominators


def padded(rows: Sequence[Sequence[float]]) -> Tensor:
    """[B, T] rows below one another, zeros behind the shorter ones."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def token_logprobs(model: nn.Module, input_ids: Tensor, action_mask: Tensor) -> Tensor:
    """[N] log-probs of the sampled tokens, by one forward over whole conversations."""
    logits = model(input_ids=input_ids).logits[:, :-1]  # [B, T - 1, V] position t predicts token t + 1
    # The words of tools and callers are read but have no loss: the agent did not choose them, and making
    # them likelier would teach it to speak for its callers.
    logprobs = logits[action_mask].log_softmax(dim=-1)  # [N, V]
    return logprobs.gather(-1, input_ids[:, 1:][action_mask][:, None]).squeeze(-1)


def grpo_loss(policy: nn.Module, batch: Batch, denominators: Denominators) -> LossOutput:
    """This batch's share of the step's loss.

    token = -min(ratio * A, clip(ratio, 1 - CLIP, 1 + CLIP) * A) + BETA * KL(pi, pi_ref), ratio = pi / pi_old
    loss = mean over conversations of the mean over the tokens that the agent sampled in each

    The KL is estimated from the sampled tokens, by k3 times the ratio
    (stateset_agents/algorithms/losses.py).
    """
    return policy_loss(
        "grpo",
        LossInputs(
            token_logprobs(policy, batch.input_ids, batch.action_mask),
            batch.old_logprobs,
            batch.advantages,
            batch.trajectory_ids,
            denominators,
            ref_logprobs=batch.ref_logprobs,
        ),
        clip_ratio=CLIP,
        beta=BETA,
    )


async def success(agent: MultiTurnAgent, environment: Environment) -> str:
    """How many of 300 callers, whose words and orders no training scenario has, are served right."""
    scenarios = held_out(environment, "test", 300)
    result = await evaluate(agent, environment, EnvironmentReward(), scenarios)
    low, high = result.interval  # 95 %
    return f"{result.success:.1%} [{low:.1%}, {high:.1%}] of {result.n} held-out conversations succeed"


async def main(steps: int, seed: int) -> None:
    """Measure, train, measure again."""
    environment = RetailDesk(families="learnable", seed=seed)
    config = AgentConfig(model_name="embedded:desk", max_new_tokens=48, device="cpu")
    draw = random.Random(seed)
    async with MultiTurnAgent(config) as agent:
        print("before:", await success(agent, environment))
        # Three copies of the weights: the agent's sample, the policy's learn, the reference's stay.
        policy = agent.backend.master_model()
        reference = copy.deepcopy(policy)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        for step in range(steps):
            scenarios = draw.sample(environment.scenarios("train"), NUM_SCENARIOS)
            groups = await roll_out(agent, environment, scenarios, seed=seed, step=step)
            batches, denominators = make_batches(groups, reference)
            # The first time every ratio is 1; then the policy has moved, and the clip says how far is enough.
            for _ in range(NUM_ITERATIONS):
                metrics = Metrics()
                for batch in batches:
                    output = grpo_loss(policy, batch, denominators)
                    output.loss.backward()  # adds to the gradient of the batches before
                    metrics = metrics + output.metrics
                nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
            schedule.step()
            # The new policy samples what comes next: a clipped ratio makes up for one step, not for a run.
            await agent.backend.update_weights(policy.state_dict(), version=step + 1)
            mean = fmean(trajectory.reward for group in groups for trajectory in group.scored)
            tied = zero_variance_fraction([group.rewards for group in groups])
            kl = metrics.to_dict()["kl/reference"]
            print(f"step {step + 1:3}  reward {mean:+.3f}  tied groups {tied:4.0%}  kl {kl:.3f}", flush=True)
        print("after:", await success(agent, environment))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="rollouts, each with its update (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of scenarios, callers and samples (default 0)")
    asyncio.run(main(**vars(parser.parse_args())))
