"""Does it pay to have problems solved in parts? Against direct solving, at equal sampled tokens.

    python -m scripts.decomposed_domains
    python -m scripts.decomposed_domains --domains legs --write  # and its table of docs/evidence

Three domains: arithmetic, leg counting of reasoning-gym, and requests of three errands at the retail desk.
In each a network as small as `embedded:reasoner` is shown problems solved directly and in parts, as many of
both. Two copies of it are then trained by GRPO, one each way, until both have sampled as many tokens, and are
asked for problems that were not shown. What is there already (runs/decomposed-domains/DOMAIN.json) is not
made again.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.decomposed_arithmetic import DecomposedArithmetic
from scripts.desk_errands import RetailErrands
from scripts.page_tables import write_table
from stateset_agents import AgentConfig, MultiTurnAgent, MultiTurnGRPOTrainer, TrainingConfig
from stateset_agents.algorithms.intervals import mean_interval, share_interval
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.decomposed import DecomposedProblems, demonstrate
from stateset_agents.environments.problems import ArithmeticProblems, ReasoningGymProblems
from stateset_agents.environments.retail_desk import HonestAgent
from stateset_agents.evaluation.evaluator import evaluate, success_of_scenarios, tries_of
from stateset_agents.runs.callbacks import Callback
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

Dialogue = tuple[Message, ...]
PAGE = "evidence/decomposition.md"
IN_PARTS = "in parts"
"""The decomposer's prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One environment, both ways, and conversations to begin with."""

    direct: Environment
    parts: Environment
    show: Callable[[Scenario], Awaitable[list[Dialogue]]]
    """Right conversations on a problem, both ways."""
    held_out: Sequence[Scenario]
    split: Callable[[str], list[str]] | None = None
    """Problem -> its parts, by code; None where one part follows from another's answer."""
    has_votes: bool = True
    """True where answers to one problem can be counted against one another."""
    max_new_tokens: int = 96
    num_shown: int = 400
    """Problems that the network is shown."""
    shown_steps: int = 500
    """Steps of 32 conversations in which it is."""

    @property
    def by_code(self) -> Environment | None:
        """In parts that `split` names."""
        if self.split is None:
            return None
        return DecomposedProblems(self.direct, decomposer=self.split, synthesizer=IN_PARTS)

    def asks_right(self, trajectory: Trajectory) -> bool:
        """True where the network asked for the parts that `split` names."""
        assert self.split is not None
        asked = [part["problem"] for part in trajectory.metadata["parts"]]
        return asked == self.split(trajectory.scenario.opening)


def said(words: str, thought: str | None = None) -> Message:
    """A reply."""
    return Message(role="assistant", content=words, reasoning=thought)


def calls(parts: Sequence[str]) -> Message:
    """A reply that asks for these parts."""
    each = tuple(ToolCall(name="solve", arguments={"problem": part}) for part in parts)
    return Message(role="assistant", content="", tool_calls=each)


def arithmetic() -> Domain:
    """Expressions of 3 and 4 operations."""
    settings: dict[str, Any] = {
        "min_operations": 3,
        "max_operations": 4,
        "system_prompt": "",
        "num_train": 3000,
    }
    direct = ArithmeticProblems(**settings)
    parts = DecomposedArithmetic(decompose_prompt=IN_PARTS, **settings)

    async def show(problem: Scenario) -> list[Dialogue]:
        reply = direct.honest_agent(problem).message
        return [
            (*problem.messages(), reply),
            *await demonstrate(parts, problem, parts.honest_agent(problem)),
        ]

    return Domain(
        direct=direct,
        parts=parts,
        show=show,
        held_out=direct.scenarios("test"),
        num_shown=3000,  # shown 400 in 500 steps, it had 2 % of other problems right: nothing to reinforce
        shown_steps=1500,
    )


def legs() -> Domain:
    """reasoning-gym's leg counting: 3 or 4 kinds of animals, up to 3 of each."""
    counting = {"min_animals": 3, "max_animals": 4, "max_instances": 3}
    direct = ReasoningGymProblems({"leg_counting": counting}, system_prompt="", num_train=1500, num_test=150)
    parts = DecomposedProblems(direct, decomposer=IN_PARTS)
    legs_of = importlib.import_module("reasoning_gym.arithmetic.leg_counting").ANIMALS

    def kinds(problem: str) -> list[str]:
        return re.findall(r"\d+ [a-z ]+(?=[,?])", problem.partition("if you have ")[2])

    def count(kind: str) -> int:
        number, _, animals = kind.partition(" ")
        name = animals if animals in legs_of else animals.removesuffix("s")
        return int(number) * int(legs_of[name])

    def sums(numbers: Sequence[int]) -> str:
        totals = [sum(numbers[: place + 1]) for place in range(len(numbers))]
        steps = [
            f"{totals[place]} + {number} = {totals[place + 1]}" for place, number in enumerate(numbers[1:])
        ]
        return " ; ".join(steps)

    def product(kind: str) -> str:
        number = int(kind.split()[0])
        return f"{number} * {count(kind) // number} = {count(kind)}"

    class Counting:
        """Plays all roles."""

        def reply(self, messages: Sequence[Message]) -> Message:
            question = next(message.content for message in messages if message.role == "user")
            if question[0].isdigit():
                return said(f"<answer> {count(question)} </answer>", product(question))
            numbers = [int(message.content) for message in messages if message.role == "tool"]
            if not numbers and messages[0].role == "system":
                return calls(kinds(question))
            thought = [] if numbers else [*map(product, kinds(question))]
            numbers = numbers or [*map(count, kinds(question))]
            return said(f"<answer> {sum(numbers)} </answer>", " ; ".join([*thought, sums(numbers)]))

    async def show(problem: Scenario) -> list[Dialogue]:
        reply = Counting().reply(problem.messages())
        return [(*problem.messages(), reply), *await demonstrate(parts, problem, Counting())]

    return Domain(
        direct=direct,
        parts=parts,
        show=show,
        held_out=direct.scenarios("test"),
        split=kinds,
    )


def errands() -> Domain:
    """Requests of three errands, in wordings of training."""
    direct = RetailErrands(num_train=4000)
    parts = DecomposedProblems(direct, decomposer=IN_PARTS)

    async def show(problem: Scenario) -> list[Dialogue]:
        errands = problem.context["errands"]
        alone = HonestAgent()
        conversation = await direct.start(problem, 0)
        thread, lines = list(conversation.opening), []
        for errand in errands:
            messages = [*conversation.opening[:1], Message(role="user", content=errand["opening"])]
            while (reply := alone.reply(messages)).tool_calls:
                heard = [reply, *(await conversation.step(reply)).messages]
                messages += heard
                thread += heard
            lines.append(f"order {errand['order_id']}: {reply.content}")
        await conversation.close()
        answer = said("\n".join(lines))

        class Desk:
            """Plays all roles."""

            def reply(self, messages: Sequence[Message]) -> Message:
                if messages[0].content != IN_PARTS:
                    return alone.reply(messages)
                if messages[-1].role == "tool":
                    return answer
                return calls([errand["opening"] for errand in errands])

        return [(*thread, answer), *await demonstrate(parts, problem, Desk())]

    def sentences(problem: str) -> list[str]:
        texts: list[str] = []
        for sentence in re.findall(r"[^.?!]+[.?!]+", problem):
            if texts and not re.search(r"\b[A-Z]\d\d\b", sentence):
                texts[-1] += sentence
            else:
                texts.append(sentence.strip())
        return texts

    others = RetailErrands(num_train=150, seed=1).scenarios("train")
    return Domain(
        direct=direct,
        parts=parts,
        show=show,
        held_out=others,
        split=sentences,
        has_votes=False,
        max_new_tokens=128,
        num_shown=4000,
        shown_steps=2500,
    )


DOMAINS: Mapping[str, Callable[[], Domain]] = {"arithmetic": arithmetic, "legs": legs, "errands": errands}


def template() -> str:
    """The reasoner's, with calls as the desk's has them."""
    from scripts.embedded_models.recipe import written
    from stateset_agents.embedded.tokenizer import CHAT_TEMPLATE

    words = "{{ message.content or '' }}"
    calls = CHAT_TEMPLATE.partition(words)[2].partition("<|end|>")[0].rstrip("\n-")
    head, _, tail = written("reasoner.jinja").partition(f"{words}<|end|>")
    return f"{head}{words}{calls}<|end|>{tail}"


def build(folder: Path, domain: Domain) -> None:
    """A network that was shown conversations both ways."""
    from scripts.build_embedded import build_recipe
    from scripts.embedded_models import reasoner

    async def show() -> list[Dialogue]:
        chosen = domain.direct.scenarios("train")[: domain.num_shown]
        return [dialogue for problem in chosen for dialogue in await domain.show(problem)]

    dialogues = asyncio.run(show())
    made = reasoner.recipe(seed=0, steps=domain.shown_steps, dialogues=3)
    shown = replace(
        made,
        vocabulary=dialogues,
        phases=[replace(made.phases[0], dialogues=dialogues)],
        context_length=1024,
        max_new_tokens=domain.max_new_tokens,
        chat_template=template(),
    )

    def tell(step: int, steps: int, loss: float) -> None:
        if step % 100 == 0:
            print(f"step {step}/{steps}: loss {loss:.3f}", flush=True)

    build_recipe(folder, shown, on_step=tell)


class Budget(Callback):
    """Ends a training that has sampled so many tokens."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens
        self.sampled = 0

    def on_train_begin(self, trainer: Any) -> None:
        """Remember whom to stop."""
        self.trainer = trainer

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count."""
        self.sampled += int(metrics["tokens/agent"])
        if step % 10 == 0:
            print(f"step {step}: {self.sampled} tokens, reward {metrics['reward/mean']:.3f}", flush=True)
        if self.sampled >= self.left:
            self.trainer.request_stop()


async def measure(agent: MultiTurnAgent, way: Environment, scenarios: Sequence[Scenario], tries: int) -> Any:
    """Success with its interval, tokens of a problem, and the conversations by scenario."""
    played = await evaluate(agent, way, EnvironmentReward(), scenarios, tries=tries)
    by_scenario = tries_of(played.groups)
    trajectories = [each for of_scenario in by_scenario.values() for each in of_scenario]
    tokens = fmean(each.num_agent_tokens for each in trajectories)
    figures = {"success": played.success, "interval": played.interval, "tokens": tokens}
    return figures, by_scenario


def vote(environment: Any, conversations: Sequence[Trajectory]) -> float:
    """1 if the most frequent answer of several conversations is right, the first of equally frequent ones."""
    answers = [environment.answer(trajectory.replies[-1]) or "" for trajectory in conversations]
    [(most, _)] = Counter(answers).most_common(1)
    right = {answer: bool(each.success) for answer, each in zip(answers, conversations, strict=True)}
    return float(right[most])


async def compare(
    folder: Path, domain: Domain, budget: int, learning_rate: float, episodes: int
) -> dict[str, Any]:
    """Both ways, as shown and trained, and direct answers by a vote of as many tokens."""
    config = AgentConfig(
        model_name=str(folder / "model"), max_new_tokens=domain.max_new_tokens, allow_hidden_tools=True
    )
    scenarios = domain.held_out[:episodes]
    record: dict[str, Any] = {}
    shares: dict[str, list[float]] = {}
    for name, way in (("in parts", domain.parts), ("direct", domain.direct)):
        async with MultiTurnAgent(config) as agent:
            shown, _ = await measure(agent, way, scenarios, 2)
            print(name, "shown", json.dumps(shown), flush=True)
            counter = Budget(budget)
            training = TrainingConfig(
                max_steps=1000,
                per_device_train_batch_size=4,
                num_generations=8,
                learning_rate=learning_rate,
                lr_scheduler_type="constant",
                warmup_ratio=0.0,  # of steps that the tokens do not pay for: in parts they end within it
                beta=0.01,
                output_dir=str(folder / "runs"),
                progress=False,
            )
            trainer = MultiTurnGRPOTrainer(agent, way, EnvironmentReward(), training, callbacks=[counter])
            try:
                await trainer.train()
            finally:
                await trainer.stop()
            trained, by_scenario = await measure(agent, way, scenarios, 2)
            shares[name] = success_of_scenarios(by_scenario.values())
            record[name] = {"shown": shown, "trained": trained, "sampled": counter.sampled}
            print(name, "trained", json.dumps(record[name]), flush=True)
            if name == "in parts" and domain.by_code is not None:
                record["in parts"]["asked"] = fmean(
                    map(domain.asks_right, itertools.chain(*by_scenario.values()))
                )
                record["by code"], _ = await measure(agent, domain.by_code, scenarios, 2)
            if name == "direct" and domain.has_votes:
                size = max(1, round(record["in parts"]["trained"]["tokens"] / trained["tokens"]))
                _, by_scenario = await measure(agent, way, scenarios, size)
                name = "votes"
                shares[name] = [vote(way, tries) for tries in by_scenario.values()]
                record[name] = {
                    "size": size,
                    "success": fmean(shares[name]),
                    "interval": share_interval(shares[name]),
                    "tokens": size * trained["tokens"],
                }
    for name in ("direct", "votes"):
        if name in shares:
            gains = [ours - theirs for ours, theirs in zip(shares["in parts"], shares[name], strict=True)]
            record[name]["gain"] = fmean(gains)
            record[name]["gain_interval"] = mean_interval(gains)
    return record


def percent(value: float, interval: Sequence[float] | None) -> str:
    """A share with its interval."""
    return f"{100 * value:.1f} %" + (
        "" if interval is None else f" ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"
    )


def table(record: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| | as shown | trained | right parts asked | tokens in training | tokens a problem | parts gain |",
        "|---" * 7 + "|",
    ]
    names = {
        "direct": "direct",
        "votes": f"direct, vote of {record.get('votes', {}).get('size')}",
        "in parts": "in parts",
        "by code": "in parts, a function decomposes",
    }
    for name in filter(record.get, names):
        row = record[name]
        now = row.get("trained", row)
        cells = [
            names[name],
            percent(row["shown"]["success"], row["shown"]["interval"]) if "shown" in row else "",
            percent(now["success"], now["interval"]),
            percent(row["asked"], None) if "asked" in row else "",
            f"{row['sampled']:,}" if "sampled" in row else "none of its own",
            f"{now['tokens']:.0f}",
            percent(row["gain"], row["gain_interval"]) if "gain" in row else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--domains", nargs="+", choices=DOMAINS, default=list(DOMAINS))
    parser.add_argument("--tokens", type=int, default=120_000, help="that each training samples")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="of both trainings")
    parser.add_argument("--episodes", type=int, default=100, help="held-out problems")
    parser.add_argument("--folder", type=Path, default=Path("runs/decomposed-domains"))
    parser.add_argument("--write", action="store_true", help=f"write the tables into docs/{PAGE}")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for name in chosen.domains:
        folder = chosen.folder / name
        file = folder.with_suffix(".json")
        if not file.exists():
            domain = DOMAINS[name]()
            if not (folder / "model" / "recommended.yaml").is_file():
                folder.mkdir(parents=True, exist_ok=True)
                build(folder / "model", domain)
            record = compare(folder, domain, chosen.tokens, chosen.learning_rate, chosen.episodes)
            file.write_text(json.dumps(asyncio.run(record)))
        made = table(json.loads(file.read_text()))
        print(f"{name}\n{made}")
        if chosen.write:
            write_table(PAGE, name, made)


if __name__ == "__main__":
    main()
