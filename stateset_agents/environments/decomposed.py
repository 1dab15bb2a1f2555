"""Problems of any environment, solved in parts by three roles.

an environment's problem
  -> decomposer    calls solve(problem), once for each part
  -> solver        a conversation of its own for each part, whose answer is the result of the call
  -> synthesizer   answers the whole, and the environment judges that

A role is played by the agent that talks to the environment, by another agent, or by a function. All that the
first says are turns of one conversation, whose rows are a tree, so that each of its roles trains on the
verdict of the whole.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self, get_args

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import (
    Conversation,
    Environment,
    Observation,
    ReplyLimits,
    expect_environment,
    start_conversation,
)
from stateset_agents.runtime.named_code import NamedCall
from stateset_agents.runtime.user_code import call_user_code
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that, is_whole
from stateset_agents.types.trajectory import Outcome

_TEXTS = read_yaml(Path(__file__).with_name("decomposed.yaml"))
DECOMPOSE: str = _TEXTS["prompt"]
"""The system message of who decomposes, unless another is set."""
SOLVE: Mapping[str, Any] = _TEXTS["tool"]

Role = Literal["decomposer", "solver", "synthesizer"]
"""Role of a turn: the decomposer calls `solve`, the solver answers a part, the synthesizer the problem."""
ROLES: tuple[Role, ...] = get_args(Role)
RolePlayer = str | MultiTurnAgent | Callable[..., Any]
"""A prompt for the agent that talks to the environment, another agent, or a function."""
_OFFERED: Mapping[Role, tuple[str, ...]] = {
    "decomposer": ("problem", "messages"),
    "solver": ("problem", "messages"),
    "synthesizer": ("solutions", "problem", "parts", "messages"),
}
"""Role -> arguments that its function may ask for; one under another name gets the first."""


@dataclass(frozen=True, slots=True)
class SolvedPart:
    """A part that was asked for, and what its solver said."""

    problem: str
    reply: str
    answer: str | None = None
    """The answer in the reply; None where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSettings:
    """What a role reads first, and who plays it: the agent that talks to the environment where nobody else
    is named."""

    prompt: str | None = None
    """System message, empty for none; None leaves that of the problem or the part."""
    agent: MultiTurnAgent | None = None
    function: NamedCall | None = None

    def opening(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The messages, with this prompt in place of their system message."""
        if self.prompt is None:
            return tuple(messages)
        system = (Message(role="system", content=self.prompt),) if self.prompt else ()
        return (*system, *(message for message in messages if message.role != "system"))


Roles = Mapping[Role, RoleSettings]
"""A synthesizer without a prompt, an agent or a function is whoever decomposes, whose thread goes on. Where a
function decomposes, it is the agent that talks to the environment."""


def updated(roles: Roles, players: Mapping[Any, RolePlayer | None]) -> Roles:
    """The roles with other players; None leaves one as it is.

    Raises ConfigurationError for what can play no role, and for a function that asks for an argument which
    there is not.
    """
    changed = dict(roles)
    for role in ROLES:
        player = players.get(role)
        if isinstance(player, str):
            changed[role] = RoleSettings(prompt=player)
        elif isinstance(player, MultiTurnAgent):
            changed[role] = RoleSettings(prompt=roles[role].prompt, agent=player)
        elif player is not None:
            method = "combine" if role == "synthesizer" else "generate"
            function = getattr(player, method, player)
            rule = f"be a prompt, a MultiTurnAgent, a function, or an object with {method}"
            expect_that(callable(function), role, rule, player, length=60)
            call = NamedCall(role, function, _OFFERED[role], positional=_OFFERED[role][:1])
            changed[role] = RoleSettings(function=call)
    return changed


def share_thread(roles: Roles) -> bool:
    """True where whoever decomposes goes on and puts together."""
    return roles["synthesizer"] == RoleSettings() and roles["decomposer"].function is None


def player_of(role: Role, roles: Roles, owner: MultiTurnAgent) -> MultiTurnAgent | None:
    """The agent that plays a role; None for a function. `owner` has those for which nobody is named."""
    settings = roles["decomposer" if role == "synthesizer" and share_thread(roles) else role]
    return None if settings.function is not None else settings.agent or owner


def seen_by(
    agent: MultiTurnAgent | None, trained: Sequence[Role], roles: Roles, owner: MultiTurnAgent
) -> Roles:
    """The roles as `agent` finds them that talks to the environment and plays those of `trained` that are
    its own; all others are played elsewhere. `owner` has those for which nobody is named."""
    changed = dict(roles)
    for role in ROLES[:2] if share_thread(roles) else ROLES:
        if (player := player_of(role, roles, owner)) is not None:
            elsewhere = None if player is agent and role in trained else player
            changed[role] = replace(roles[role], agent=elsewhere)
    return changed


@dataclass(slots=True, kw_only=True, eq=False)
class OneReply:
    """A question and the one reply to it, which nobody judges."""

    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] = ()
    reply_limits: ReplyLimits = field(default_factory=lambda: ReplyLimits(with_reasoning=True))

    async def step(self, reply: Message) -> Observation:
        """Take the reply."""
        return Observation(terminated=True)

    async def outcome(self) -> Outcome:
        """No verdict."""
        return Outcome(reward=None)

    def fork(self) -> OneReply:
        """An independent copy."""
        return replace(self)

    async def close(self) -> None:
        """Nothing is held."""


@dataclass(slots=True, kw_only=True, eq=False)
class DecomposedConversation:
    """One problem; the agent is shown what the role reads that it is to play next."""

    whole: Conversation
    """The environment's own conversation, which hears the answer to the problem alone."""
    roles: Roles
    answer: Callable[[Message], str | None]
    max_calls: int
    seed: int
    is_judged: bool = True
    opening: tuple[Message, ...] = ()
    thread: tuple[Message, ...] = ()
    """All that who decomposes has read and said."""
    part: Conversation | None = None
    """The conversation of the part that a solver is asked now."""
    part_messages: tuple[Message, ...] = ()
    """All that its solver has read and said."""
    waiting: tuple[ToolCall, ...] = ()
    """Calls of the last reply that have no result, that of `part` first."""
    is_decomposed: bool = False
    """True from when the decomposer's calls have their results."""
    heard: tuple[Message, ...] = ()
    """Results and questions since the agent's last turn."""
    earned: float | None = None
    """Rewards of the whole's turns since the agent's last one."""
    turn_roles: tuple[Role, ...] = ()
    """[turns of the agent]"""
    parts: tuple[SolvedPart, ...] = ()
    finished: tuple[tuple[Message, ...], ...] = ()
    """Conversations of the parts that are solved."""
    num_calls: int = 0
    tokens_elsewhere: Counter[Role] = field(default_factory=Counter)
    """Role -> tokens that other agents sampled."""
    ended: Observation | None = None
    final_answer: str | None = None

    @property
    def role(self) -> Role:
        """The role whose turn it is; in a shared thread a reply without a call is the synthesizer's."""
        if self.part is not None:
            return "solver"
        return "synthesizer" if self.is_decomposed and not share_thread(self.roles) else "decomposer"

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The part's own, `solve` for who decomposes, none for who puts together alone."""
        if self.part is not None:
            return self.part.tools
        return (SOLVE,) if self.role == "decomposer" else ()

    @property
    def reply_limits(self) -> ReplyLimits:
        """Those of the part, or of the whole."""
        return getattr(self.part or self.whole, "reply_limits", None) or ReplyLimits()

    @property
    def messages(self) -> tuple[Message, ...]:
        """All that the role reads whose turn it is."""
        if self.part is not None:
            return self.part_messages
        return self.roles["synthesizer"].opening(self.thread) if self.role == "synthesizer" else self.thread

    async def play(self) -> Self:
        """Have others play until the agent has a turn or the problem its answer."""
        self.thread = self.roles["decomposer"].opening(self.whole.opening)
        await self._go_on()
        self.opening = self.messages
        return self

    async def step(self, reply: Message) -> Observation:
        """Take a reply of the agent."""
        if self.ended is not None:
            raise ConfigurationError("this problem has its reply: start a new conversation")
        answers = self.role == "decomposer" and not reply.tool_calls and share_thread(self.roles)
        self.turn_roles = (*self.turn_roles, "synthesizer" if answers else self.role)
        self.heard, self.earned = (), None
        await self._take(reply)
        await self._go_on()
        observation = self.ended or Observation(messages=self.heard, conversation=self.messages)
        return replace(observation, reward=self.earned)

    async def _go_on(self) -> None:
        """Have others play their roles until the agent has a turn."""
        while self.ended is None:
            settings, values = self.roles[self.role], None
            if settings.function is not None:
                problem = next(message.content for message in self.thread if message.role == "user")
                values = {
                    "problem": self.waiting[0].arguments["problem"] if self.part else problem,
                    "messages": self.messages,
                    "parts": self.parts,
                    "solutions": [part.answer for part in self.parts],
                }
                await self._take(_as_reply(self.role, await settings.function.call(values)))
            elif settings.agent is not None:
                await self._take(await self._reply_of(settings.agent))
            else:
                return

    async def _reply_of(self, agent: MultiTurnAgent) -> Message:
        """A reply of another agent; members of a group share its random stream, as they do their user's."""
        place = (self.role, len(self.parts), len(self.messages))
        sampling = {"stream": derive(self.seed, *place)}
        messages = agent.with_system_prompt(self.messages)
        sampled = await agent.answer(messages, self.tools, sampling=sampling)
        self.tokens_elsewhere = self.tokens_elsewhere + Counter({self.role: len(sampled.token_ids)})
        with_reasoning = self.reply_limits.with_reasoning
        return sampled.message if with_reasoning else replace(sampled.message, reasoning=None)

    async def _take(self, reply: Message) -> None:
        """Take the reply of the role whose turn it is."""
        if self.part is not None:
            await self._take_from_solver(self.part, reply)
        elif self.role == "decomposer" and (reply.tool_calls or not share_thread(self.roles)):
            self.thread = (*self.thread, reply)
            self.waiting = tuple(reply.tool_calls)
            self.num_calls += len(self.waiting)
            if self.num_calls > self.max_calls:
                self.ended = Observation(truncated=True)
            else:
                self._open_next()
        else:
            observation = await self.whole.step(reply)
            self.thread = (*self.thread, reply, *observation.messages)
            self.heard += observation.messages
            if observation.reward is not None:
                self.earned = (self.earned or 0.0) + observation.reward
            if observation.terminated or observation.truncated:
                self.ended, self.final_answer = replace(observation, breakdown={}), self.answer(reply)

    async def _take_from_solver(self, part: Conversation, reply: Message) -> None:
        observation = await part.step(reply)
        self.part_messages = (*self.part_messages, reply)
        if not (observation.terminated or observation.truncated):
            self.part_messages = observation.conversation or (*self.part_messages, *observation.messages)
            self.heard += observation.messages
            return
        await part.close()
        self.finished = (*self.finished, self.part_messages)
        solved = SolvedPart(self.waiting[0].arguments["problem"], reply.content, self.answer(reply))
        self.parts = (*self.parts, solved)
        self._tell(self.result_of(solved))
        self._open_next()

    def _open_next(self) -> None:
        """Answer calls until one opens a part."""
        self.part = None
        while self.waiting:
            call, *rest = self.waiting
            problem, fault = self.part_of(call)
            if problem is not None:
                self.waiting = (replace(call, arguments={"problem": problem}), *rest)
                self.part = self.open_part(problem)
                self.part_messages = self.roles["solver"].opening(self.part.opening)
                self.heard += self.part_messages[-1:]
                return
            self._tell(f"error: {fault}")
        self.is_decomposed = True

    def _tell(self, content: str) -> None:
        """Give the first call that waits its result."""
        call, *rest = self.waiting
        told = Message(role="tool", content=content, tool_call_id=call.id or None, name=call.name)
        self.waiting, self.thread, self.heard = tuple(rest), (*self.thread, told), (*self.heard, told)

    def part_of(self, call: ToolCall) -> tuple[str | None, str]:
        """The part that a call asks for, or None and what is wrong with it."""
        if call.error is not None:
            return None, call.error
        if call.name != "solve":
            return None, f"there is no tool {call.name!r:.40}, only solve"
        problem = call.arguments.get("problem")
        if not isinstance(problem, str):
            return None, "solve needs a problem, which is text"
        return " ".join(problem.split()), ""

    def open_part(self, problem: str) -> Conversation:
        """A part's own conversation: that of the environment's conversation, where it has `part(problem)`,
        else a question with one reply."""
        opener: Callable[[str], Conversation] | None = getattr(self.whole, "part", None)
        if opener is not None:
            return opener(problem)
        system = (message for message in self.whole.opening if message.role == "system")
        return OneReply(opening=(*system, Message(role="user", content=problem)))

    def result_of(self, part: SolvedPart) -> str:
        """The result of the call that asked for a part."""
        return "error: no answer" if part.answer is None else part.answer

    async def outcome(self) -> Outcome:
        """The verdict on the whole, and who said what: `metadata["roles"]` of the agent's turns, `parts`, the
        `answer`, and `tokens_elsewhere` of other agents by role."""
        outcome = await self.whole.outcome() if self.is_judged else Outcome(reward=None)
        metadata = {
            "roles": list(self.turn_roles),
            "parts": [asdict(part) for part in self.parts],
            "answer": self.final_answer,
            "tokens_elsewhere": dict(self.tokens_elsewhere),
        }
        breakdown = {**outcome.breakdown, "calls": float(self.num_calls)}
        return replace(outcome, breakdown=breakdown, metadata={**outcome.metadata, **metadata})

    def fork(self) -> Conversation:
        """An independent copy."""
        return replace(self, whole=self.whole.fork(), part=self.part and self.part.fork())

    async def close(self) -> None:
        """Close the part that is open, and the whole."""
        if self.part is not None:
            await self.part.close()
        await self.whole.close()


def with_roles(environment: DecomposedProblems, roles: Roles) -> DecomposedProblems:
    """The same environment, with its problems solved by these roles."""
    changed = copy.copy(environment)
    changed.roles = roles  # another agent's batches are its own
    changed.local = environment.local and all(settings.agent is None for settings in roles.values())
    return changed


async def demonstrate(
    environment: DecomposedProblems, scenario: Scenario, agent: Any, seed: int = 0
) -> list[tuple[Message, ...]]:
    """Conversations of a scripted agent with `reply(messages)` that plays all roles, for fine-tuning: of who
    decomposes, of who puts together where they read something else, and of each part.

    Raises ConfigurationError for a wrong answer.
    """
    talk = await environment.start(scenario, seed)
    while talk.ended is None:
        await talk.step(agent.reply(talk.messages))
    if (await talk.outcome()).success is False:
        raise ConfigurationError(f"the agent's answer to {scenario.id!r} is wrong: demonstrate right ones")
    await talk.close()
    if share_thread(talk.roles):
        return [talk.thread, *talk.finished]
    calls = 1 + next(place for place, message in enumerate(talk.thread) if message.tool_calls)
    return [talk.thread[:calls], talk.roles["synthesizer"].opening(talk.thread), *talk.finished]


class DecomposedProblems:
    """The problems of any environment, with a tool `solve(problem)` for who decomposes them.

        DecomposedProblems(ReasoningGymProblems("leg_counting"), synthesizer=add_up)

    A call opens a conversation of its own, in which the part is solved: that of the environment's
    conversation, where it has `part(problem)`, else a question with one reply. The verdict is the
    environment's, on the last reply alone.
    """

    def __init__(
        self,
        environment: Environment | None = None,
        *,
        decomposer: RolePlayer | None = None,
        solver: RolePlayer | None = None,
        synthesizer: RolePlayer | None = None,
        max_calls: int = 16,
    ) -> None:
        """
        Args:
            environment: Gives the problems and judges the answers; where absent, there are only problems of
                one's own, which nobody judges.
            decomposer: `f(problem)` gives the parts, each a text.
            solver: `f(problem)` gives the reply to a part.
            synthesizer: `f(solutions)` gives the reply to the problem; it may ask for `problem` and `parts`
                too. Where absent, whoever decomposes goes on when the parts are solved.
            max_calls: A conversation that calls more often is cut.

        A role is a prompt of the agent that talks to the environment, another agent, or such a function.
        Raises ConfigurationError for anything else.
        """
        if environment is not None:
            expect_environment(environment)
        expect_that(is_whole(max_calls, 1), "max_calls", "be a whole number from 1 on", max_calls, length=60)
        self.environment = environment
        self.max_calls = max_calls
        default = {role: RoleSettings(prompt=DECOMPOSE if role == "decomposer" else None) for role in ROLES}
        players = {"decomposer": decomposer, "solver": solver, "synthesizer": synthesizer}
        self.roles: Roles = updated(default, players)
        self.local = environment is None or environment.local
        self.local = with_roles(self, self.roles).local

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """The environment's. Raises ConfigurationError where there is none."""
        if self.environment is None:
            raise ConfigurationError(
                "there are no problems: write DecomposedProblems(environment), or "
                "environment: {name: decomposed, environment: arithmetic}"
            )
        return self.environment.scenarios(split)

    def scenario_of(self, problem: str) -> Scenario:
        """A problem of one's own, which nobody judges."""
        expect_that(isinstance(problem, str) and problem != "", "problem", "be text", problem, length=60)
        return Scenario(id=f"own {problem}", opening=problem, context={"is_judged": False})

    def answer(self, reply: Message) -> str | None:
        """The answer in a reply, as the environment reads it, else its words; None where there is none."""
        read: Callable[[Message], str | None] | None = getattr(self.environment, "answer", None)
        return (reply.content.strip() or None) if read is None else read(reply)

    async def start(self, scenario: Scenario, seed: int) -> DecomposedConversation:
        """Ask the whole problem; others have played what comes before the agent's first turn."""
        conversation = await self.conversation(scenario, seed)
        try:
            if (await conversation.play()).ended is None:
                return conversation
            raise EnvironmentFailure("the problem was answered by others before the agent had a turn")
        except BaseException:
            await conversation.close()
            raise

    async def conversation(self, scenario: Scenario, seed: int) -> DecomposedConversation:
        """A conversation in which nobody has said anything."""
        whole: Conversation = OneReply(opening=scenario.messages())
        if self.environment is not None:
            whole = await start_conversation(self.environment, scenario, seed)
        return DecomposedConversation(
            whole=whole,
            roles=self.roles,
            answer=self.answer,
            max_calls=self.max_calls,
            seed=seed,
            is_judged=scenario.context.get("is_judged", True),
        )

    async def close(self) -> None:
        """Close the environment where it has something to give back."""
        close = getattr(self.environment, "close", None)
        if close is not None:
            await call_user_code(close)


def _as_reply(role: Role, value: Any) -> Message:
    """The reply of a role from what its function gave."""
    if isinstance(value, Message):
        return value
    if role != "decomposer":
        expect_that(isinstance(value, str), f"what the {role} returns", "be text", value, length=60)
        return Message(role="assistant", content=value)
    is_parts = isinstance(value, list | tuple) and all(isinstance(part, str) for part in value)
    expect_that(is_parts, "what the decomposer returns", "be a list of texts, one a part", value, length=60)
    calls = tuple(ToolCall(name="solve", arguments={"problem": part}) for part in value)
    return Message(role="assistant", content="", tool_calls=calls)
