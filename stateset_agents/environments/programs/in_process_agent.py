"""An agent program of your own in the trainer's event loop: a task for each conversation, and no process.

Everything but the start is as in `external_program.py`: endpoint, rows, limits, verdict.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import step_conversation
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.core.rollout.time_limited_environment import TimeLimitedEnvironment
from stateset_agents.environments.programs.program_environment import (
    API_KEY,
    FAILED,
    ProgramEnvironment,
    read_verdict,
)
from stateset_agents.runtime.named_code import NamedCall, library
from stateset_agents.runtime.tasks import end_task
from stateset_agents.runtime.user_code import format_error, is_async, is_module_of_user
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory

_CLIENTS: Mapping[str, tuple[str, str]] = {
    "client": ("openai", "AsyncOpenAI"),
    "anthropic_client": ("anthropic", "AsyncAnthropic"),
}
"""Argument of a program -> package and class of the official client."""


class InProcessAgent(ProgramEnvironment):
    """Runs your async function once for every conversation; its requests are the conversation.

        async def run(client, scenario):
            answer = await client.chat.completions.create(model="any", messages=[...])
            return {"reward": 1.0, "success": True}

        InProcessAgent(run, "tasks.jsonl")

    `run` asks by name for what it wants to have: `client`, an `openai.AsyncOpenAI`, and `anthropic_client`,
    an `anthropic.AsyncAnthropic`, of this conversation's own endpoint; `base_url` and `api_key` (texts), of
    which any other client is made; `scenario`, a copy of its own; and `seed`, which all conversations of a
    group share. It returns its verdict, a dict with `reward` (a number), `success` (true or false) and
    `metadata`, each of which may be absent, or an `Outcome`; None where the reward function has to know.

    All conversations share the process. Before a training, `probe` plays two of them one after the other and
    then interleaved, and refuses a program that one of them changes for the other. One that raises has
    broken; one that is cut and then raises, or goes on for ten seconds, has failed its task, as in
    `ExternalProgram`.
    """

    def __init__(
        self,
        run: Callable[..., Awaitable[Any]] | str,
        scenarios: Iterable[Scenario | Mapping[str, Any]] | str | Path | Mapping[str, Any],
        *,
        max_turns: int = 20,
        ignore: Sequence[str] = (),
        untrained: Sequence[str] = (),
        local: bool = False,
        probe: bool = True,
    ) -> None:
        """
        Args:
            run: The program, or its name, "module:function".
            scenarios: Scenarios as `ConversationEnvironment` takes them.
            max_turns: Maximum replies of the agent.
            ignore: Fields of requests that count as absent, as in `ExternalProgram`.
            untrained: Sub-agents that are answered and not trained, by the `model` that their requests name.
            local: Say True where its words depend on the scenario, the seed and the replies alone, so that a
                run is repeatable.
            probe: Say False where its words vary by themselves, by a clock or a search: then no training can
                tell that from conversations that share something, and nothing is probed.
        """
        super().__init__(scenarios, max_turns=max_turns, ignore=ignore, untrained=untrained, local=local)
        names = (*_CLIENTS, "base_url", "api_key", "scenario", "seed")
        self._call = NamedCall("run", run, names, positional=("client", "scenario"))
        function = self._call.function
        if not is_async(function):
            raise ConfigurationError(
                f"run must be written `async def`, got {function!r:.80}: a program that blocks would hold up "
                "all others; run it by ExternalProgram"
            )
        self._clients = [name for name in _CLIENTS if name in self._call.wanted]
        for name in self._clients:
            package = _CLIENTS[name][0]
            library(package, f"{name} of run needs {package} installed: pip install {package}")
        self.probe = self._probe if probe else None

    async def _run(self, scenario: Scenario, seed: int, url: str) -> _ProgramTask:
        clients = {name: _client(name, url) for name in self._clients}
        arguments = {"base_url": url, "api_key": API_KEY, "scenario": copy.deepcopy(scenario), "seed": seed}
        return _ProgramTask(self._call.call({**clients, **arguments}), list(clients.values()))

    # Whether conversations are independent: each is played by itself, again with the same replies, and once
    # more beside the other. Replies are repeated, not sampled anew, so that what differs is the program's.

    async def _probe(self, engine: ComputationalEngine) -> None:
        """Raises ConfigurationError where two conversations, interleaved, are not what each is by itself, or
        where one changes what the other finds."""
        agent, limits = engine.agent, engine.limits
        environment = TimeLimitedEnvironment(self, limits.turn_timeout)
        player = ComputationalEngine(
            agent, self, EnvironmentReward(), deterministic=engine.deterministic, limits=limits
        )
        state = partial(_shared_state, self._call.function)
        before = state()
        talks: list[Trajectory] = []
        for scenario in (self.scenarios("train") * 2)[:2]:
            (group,) = await player.rollout([scenario], seed=0, step=0, temperature=0.0, sizes=[1])
            talks += group.trajectories
        _refuse_change(before, first_state := state(), may_fill=True)
        alone = [[step async for step in _replay(environment, talk)] for talk in talks]
        _refuse_change(first_state, state())
        for talk, items in zip(talks, alone, strict=True):
            if talk.outcome is not None:
                feedback = [turn.feedback for turn in talk.turns if not turn.is_summary]
                openings = [  # a system message also has the agent's own prompt
                    tuple(message for message in opening if message.role != "system")
                    for opening in (talk.opening, items[0])
                ]
                first = [openings[0], *feedback, talk.outcome]
                _refuse_other_words(first, [openings[1], *items[1:]], "played again")
        together: list[list[Any]] = [[] for _ in talks]
        async with AsyncExitStack() as opened:
            replays = [
                await opened.enter_async_context(aclosing(_replay(environment, talk))) for talk in talks
            ]
            for _ in range(max(map(len, alone), default=0)):
                for items, replay in zip(together, replays, strict=True):
                    if (item := await anext(replay, None)) is not None:
                        items.append(item)
                    _refuse_change(first_state, state())
        for by_itself, beside in zip(alone, together, strict=True):
            _refuse_other_words(by_itself, beside, "beside another conversation")


async def _replay(environment: TimeLimitedEnvironment, talk: Trajectory) -> AsyncGenerator[Any]:
    """The program's messages before and after each of a conversation's replies, and at last its outcome or
    what broke it."""
    try:
        conversation = await environment.start(talk.scenario, talk.seed)
        try:
            yield conversation.opening
            for turn in talk.turns:
                if not turn.is_summary:
                    yield (await step_conversation(turn.completion, conversation)).messages
            yield await conversation.outcome()
        finally:
            await conversation.close()
    except EnvironmentFailure as error:
        yield str(error)


class _ProgramTask:
    """One run of the program: a task, which may be cancelled at any `await`."""

    def __init__(self, work: Awaitable[Any], clients: Sequence[Any]) -> None:
        self._task = asyncio.ensure_future(work)
        self._clients = clients

    @property
    def is_running(self) -> bool:
        return not self._task.done()

    async def ended(self) -> None:
        await asyncio.wait([self._task])

    def ending(self) -> tuple[str, str]:
        if self._error is not None:
            return "the program raised", format_error(self._error)
        return "the program returned", f"{self._task.result()!r:.200}"

    @property
    def _error(self) -> BaseException | None:
        return asyncio.CancelledError("of itself") if self._task.cancelled() else self._task.exception()

    def outcome(self, *, is_cut: bool) -> Outcome:
        if self._error is not None:
            if is_cut:
                return FAILED
            raise EnvironmentFailure(": ".join(self.ending())) from self._error
        value = self._task.result()
        outcome = value if isinstance(value, Outcome) else read_verdict({} if value is None else value)
        if outcome is None or str(outcome.reward) in ("nan", "inf", "-inf"):
            raise EnvironmentFailure(
                'the program must return {"reward": NUMBER, "success": True or False, "metadata": {...}}'
                f", any of them absent, an Outcome or None, got {value!r:.200}"
            )
        return outcome

    async def stop(self) -> None:
        try:
            await end_task(self._task)
        finally:
            for client in self._clients:
                await client.close()


def _client(name: str, url: str) -> Any:
    """An official client of a conversation's endpoint, for which no proxy and no certificate is read."""
    package, kind = _CLIENTS[name]
    module = library(package, "{error}")
    http = module.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    url = url if package == "openai" else url.removesuffix("/v1")
    return getattr(module, kind)(base_url=url, api_key=API_KEY, http_client=http, timeout=None)


# What conversations of a program share: its module's names, closure, defaults and objects, as far as the
# user's own code goes. Of objects of libraries only the identity is compared.

_MEND = (
    "make it anew in each run, or run the program by ExternalProgram (a program whose words vary by "
    "themselves, by a clock or a search: probe=False)"
)


def _refuse_change(old: Mapping[str, Any], new: Mapping[str, Any], *, may_fill: bool = False) -> None:
    """Raises ConfigurationError where a value differs; `may_fill`: what was absent or None may be there now,
    as a client is that the first conversation made for all."""
    for path in sorted(old.keys() | new.keys()):
        before, after = old.get(path), new.get(path)
        if before is after or before == after or (may_fill and before is None):
            continue
        values = (value[1] if isinstance(value, tuple) else value for value in (before, after))
        old_text, text = (" ".join(repr(value).split())[:80] for value in values)
        how = f"from {old_text} to {text}" if text != old_text else f"to another object that reads {text}"
        raise ConfigurationError(f"run changes {path}, which all conversations share, {how}: {_MEND}")


def _refuse_other_words(by_itself: Sequence[Any], otherwise: Sequence[Any], how: str) -> None:
    """Raises ConfigurationError where what a program said, or its verdict, differs."""
    for number, pair in enumerate(zip_longest(by_itself, otherwise)):
        if pair[0] == pair[1]:
            continue
        texts = [repr(item) for item in pair]
        same = next((place for place, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), 0)
        a, b = (text[max(0, same - 30) : same + 70] for text in texts)
        raise ConfigurationError(
            f"run says other things where conversations share a process: step {number} is ...{a}... alone "
            f"and ...{b}... {how}: find what they share and {_MEND}"
        )


_MAX_VALUES = 100_000
"""Values that are looked at: tables beyond that are read-only, or found by what the program says."""


def _shared_state(function: Callable[..., Any]) -> dict[str, Any]:
    """Path -> value of what the function can reach."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    state: dict[str, Any] = {}
    seen_ids: set[int] = set()
    waiting = deque([(name, function)])
    while waiting and len(state) < _MAX_VALUES:
        path, value = waiting.popleft()
        if isinstance(value, str | bytes | int | float | complex | None):
            state[path] = value
            continue
        state[path] = id(value), value  # equal where it is the same object
        if id(value) not in seen_ids:
            seen_ids.add(id(value))
            waiting += _parts(path, value)
    return state


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values within one, with their paths; none of a library's."""
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r:.80}]", item) for key, item in list(value.items()))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"{path}[{place}]", item) for place, item in enumerate(list(value)))
    elif isinstance(value, set | frozenset):
        yield from ((f"{path}: {item!r:.80}", True) for item in list(value))
    elif isinstance(value, MethodType):
        yield from ((path.rpartition(".")[0], value.__self__), (path, value.__func__))
    elif isinstance(value, FunctionType) and is_module_of_user(value.__module__):
        yield from _names(path, inspect.getclosurevars(value).nonlocals)
        yield from ((f"{path} defaults", defaults) for defaults in (value.__defaults__, value.__kwdefaults__))
        yield from _names(value.__module__, value.__globals__)
    elif isinstance(value, ModuleType) and is_module_of_user(value.__name__):
        yield from _names(value.__name__, vars(value))
    elif is_module_of_user((value if isinstance(value, type) else type(value)).__module__):
        yield from _names(path, getattr(value, "__dict__", {}))
        slots = getattr(type(value), "__slots__", ())
        yield from ((f"{path}.{name}", getattr(value, name)) for name in slots if hasattr(value, name))
        if not isinstance(value, type):
            yield type(value).__qualname__, type(value)


def _names(path: str, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from ((f"{path}.{name}", value) for name, value in list(names.items()) if not name.startswith("__"))
