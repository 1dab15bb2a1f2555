"""This package, through its public parts: backends, agents, environments and the trainer."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.shapes import requests, score
from benchmarks.talks import Talk, talks
from benchmarks.worker import Clock, Task, serve
from benchmarks.workers.hf import logprobs
from stateset_agents.backends.base import Backend, Session
from stateset_agents.backends.loading import load_backend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.scoring.function_reward import reward_function
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.experiment import Experiment, load_experiment
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.messages import Completion, Message, SamplingParams
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup, Turn


class Async:
    """A task with an event loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    def wait(self, work: Any) -> Any:
        """What an awaitable gives."""
        return self.loop.run_until_complete(work)


class Generating(Async):
    """A task on a backend alone."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__()
        self.backend: Backend = self.wait(load_backend(job["model"], device="cpu", dtype="fp32"))
        self.wait(self.backend.start())
        running: Any = self.backend
        if running.running.name != job.get("runs", running.running.name):
            raise RuntimeError(
                f"the row is of the {job['runs']} path, this is the {running.running.name} one"
            )

    def close(self) -> None:
        self.wait(self.backend.close())


class Decode(Generating):
    """At most `slots` requests at once; the next takes the place of one that ended."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__(job)
        self.requests = requests(**job["requests"])
        self.slots: int = job["slots"]

    def run(self, repetition: int) -> Mapping[str, float]:
        return {"tokens": self.wait(self._everyone(repetition))}

    async def _everyone(self, repetition: int) -> int:
        free = asyncio.Semaphore(self.slots)

        async def play(number: int) -> int:
            request = self.requests[number]
            params = SamplingParams(max_new_tokens=request.reply, stream=1000 * repetition + number)
            async with free:
                return len((await self.backend.generate(request.ids, params)).token_ids)

        return sum(await asyncio.gather(*(play(number) for number in range(len(self.requests)))))


class Prefill(Generating):
    """Times the first token of every turn; the rest of a reply is sampled outside the clock."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__(job)
        self.talks = talks(job)
        self.episodes = itertools.count()

    def run(self, repetition: int) -> Mapping[str, float]:
        return self.wait(self._rounds(repetition))  # type: ignore[no-any-return]  # an awaitable's own type

    async def _rounds(self, repetition: int) -> Mapping[str, float]:
        clock = Clock()
        requests = self.talks.requests(repetition)
        episodes = [next(self.episodes) for _ in range(self.talks.scenarios)]
        sessions = [Session(episodes[talk.scenario], talk.member) for talk in requests]
        rows: list[list[int]] = [[] for _ in requests]

        async def say(index: int, tokens: int) -> None:
            params = SamplingParams(max_new_tokens=tokens, stream=len(rows[index]) * 1000 + index)
            done = await self.backend.generate(rows[index], params, session=sessions[index])
            rows[index].extend(done.token_ids)

        for turn in range(self.talks.turns):
            for row, talk in zip(rows, requests, strict=True):
                row.extend(talk.parts[turn][0])
            tokens = sum(len(row) for row in rows)
            with clock:
                await asyncio.gather(*(say(index, 1) for index in range(len(rows))))
            if turn + 1 < self.talks.turns:
                await asyncio.gather(*(say(index, self.talks.reply - 1) for index in range(len(rows))))
        for session in sessions:
            await self.backend.release(session)
        return {"wall": clock.wall, "cpu": clock.cpu, "tokens": tokens}


class Speaking:
    """A user who says prepared words, each after the wait of the tools."""

    def __init__(self, replies: Sequence[str], waits: Sequence[float]) -> None:
        self.local = not any(waits)
        self._left = list(zip([*replies, None], waits, strict=True))

    async def reply(self, messages: Sequence[Message]) -> str | None:
        """The next words, or None after the last turn."""
        words, seconds = self._left.pop(0)
        if seconds:
            await asyncio.sleep(seconds)
        return words

    def fork(self) -> Speaking:
        """Nobody branches here."""
        raise NotImplementedError


@reward_function(local=True)
def even(trajectory: Trajectory) -> float:
    """The score that every side uses."""
    return score(" ".join(reply.content for reply in trajectory.replies))


class Training(Async):
    """The trainer with an agent on a model's folder."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__()
        self.talks = talks(job)
        self._users = itertools.count()
        self._folder = tempfile.TemporaryDirectory()
        agent = MultiTurnAgent(
            AgentConfig(
                model_name=job["model"],
                max_new_tokens=self.talks.reply,
                device="cpu",
                dtype=job.get("precision", "fp32"),
                matmul_precision=job.get("matmul_precision", "highest"),
            )
        )
        environment = ConversationEnvironment(
            [self.scenario(number) for number in range(self.talks.scenarios)],
            max_turns=self.talks.turns,
            user=self._user,
            local=not self.talks.wait,
        )
        config = TrainingConfig(
            num_generations=self.talks.group,
            per_device_train_batch_size=self.talks.scenarios,
            gradient_accumulation_steps=1,
            max_steps=1000,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            warmup_ratio=0.0,
            beta=0.0,
            precision=job.get("precision", "fp32"),
            save_steps=0,
            output_dir=self._folder.name,
        )
        self.trainer = MultiTurnGRPOTrainer(agent, environment, even, config)
        self.wait(self.trainer.initialize())

    def scenario(self, number: int) -> Scenario:
        """Number `number` of any many."""
        return Scenario(id=f"scenario-{number}", opening=self.talks.opening(number))

    def _user(self, scenario: Scenario, seed: int) -> Speaking:
        number = int(scenario.id.split("-")[1])
        row = next(self._users) % self.talks.rows
        return Speaking(self.talks.user_words(number), self.talks.waits(row))

    def close(self) -> None:
        self.wait(self.trainer.close())
        self._folder.cleanup()


class Step(Training):
    """A whole step: rollouts, scores, update, new weights for the rollouts."""

    def run(self, repetition: int) -> Mapping[str, float]:
        return reported(self.wait(self.trainer.step()))


class Rollout(Training):
    """The rollouts of a step alone; scenarios change with the repetition."""

    def run(self, repetition: int) -> Mapping[str, float]:
        first = (repetition + 1) * self.talks.scenarios
        scenarios = [self.scenario(first + number) for number in range(self.talks.scenarios)]
        groups = self.wait(self.trainer.generate_trajectories(scenarios))
        return {"tokens": sum(play.num_agent_tokens for group in groups for play in group.trajectories)}


class Update(Training):
    """The update alone, on conversations that are given."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__(job)
        requests = self.talks.requests()
        # In a process of its own: what the full logits take would be there for the update to use again.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            scores = pool.submit(logprobs, job["model"], [talk.ids for talk in requests]).result()
        groups: dict[int, list[Trajectory]] = {}
        for talk, row in zip(requests, scores, strict=True):
            groups.setdefault(talk.scenario, []).append(trajectory(talk, [0.0, *row]))
        self.groups = [
            TrajectoryGroup(key=str(key), trajectories=tuple(members)) for key, members in groups.items()
        ]

    def run(self, repetition: int) -> Mapping[str, float]:
        return reported(self.wait(self.trainer.training_step(self.groups)))


def trajectory(talk: Talk, scores: Sequence[float]) -> Trajectory:
    """A given conversation as if it had been sampled, with the policy's own log-probs."""
    turns: list[Turn] = []
    row: list[int] = []
    for delta, reply in talk.parts:
        row += delta
        completion = Completion(
            message=Message(role="assistant", content=""),
            prompt_ids=tuple(row),
            token_ids=tuple(reply),
            logprobs=tuple(scores[len(row) : len(row) + len(reply)]),
            finish_reason="length",
        )
        turns.append(Turn(prompt_ids=tuple(delta), completion=completion))
        row += reply
    scenario = Scenario(id=f"scenario-{talk.scenario}", opening="")
    return Trajectory(scenario=scenario, member=talk.member, turns=tuple(turns), reward=talk.reward)


def reported(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Tokens and the split of a step's time; raises RuntimeError where nothing was trained."""
    if metrics.get("optimizer/skipped") or not metrics["optimizer/grad_norm"]:
        raise RuntimeError("nothing was trained: all advantages are 0")
    return {
        "tokens": metrics["tokens/agent"],
        "rollout": metrics["time/rollout"],
        "update": metrics["time/update"],
    }


class Demo(Async):
    """`make demo`'s training, one step a repetition, from the embedded model on."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        config = load_experiment(job["file"], {"training.output_dir": self._folder.name})
        self.trainer = Experiment(config, measures=False).trainer
        self.wait(self.trainer.initialize())

    def run(self, repetition: int) -> Mapping[str, float]:
        metrics = self.wait(self.trainer.step())
        conversations = metrics["rollout/conversations"]
        return {
            **reported(metrics),
            "conversations": conversations,
            "successes": round(conversations * metrics["success/rate"]),
        }

    def close(self) -> None:
        self.wait(self.trainer.close())
        self._folder.cleanup()


TASKS: dict[str, Callable[[Mapping[str, Any]], Task]] = {
    "decode": Decode,
    "prefill": Prefill,
    "rollout": Rollout,
    "step": Step,
    "turns": Step,
    "update": Update,
    "demo": Demo,
}


def make(job: Mapping[str, Any]) -> Task:
    """The task that a job asks for."""
    return TASKS[job["task"]](job)


if __name__ == "__main__":
    serve(make)
