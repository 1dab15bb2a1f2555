"""State of a conversation: made anew for each, seen by tools, user and verdict, copied where it forks."""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from stateset_agents.core.environment import Conversation, ConversationEnvironment, Observation
from stateset_agents.core.tools import Tool, Toolbox, ToolError, tool
from stateset_agents.core.users.simulated_user import RuleBasedUser, ScriptedUser, User
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome

SCENARIO = {"opening": "Cancel K27, please.", "context": {"orders": ["K27", "K28"]}}


def make_db(scenario: Scenario) -> dict[str, str]:
    return dict.fromkeys(scenario.context["orders"], "open")


@tool
def cancel(order_id: str, state: dict[str, str]) -> str:
    """Cancel an order."""
    if order_id not in state:
        raise ToolError(f"no order {order_id}")
    state[order_id] = "cancelled"
    return "cancelled"


def cancelled(state: dict[str, str]) -> bool:
    return state["K27"] == "cancelled"


def say(text: str = "", *orders: str) -> Message:
    calls = tuple(ToolCall(name="cancel", arguments={"order_id": order}) for order in orders)
    return Message(role="assistant", content=text, tool_calls=calls)


def shop(**more: Any) -> ConversationEnvironment:
    return ConversationEnvironment([SCENARIO], **{"tools": [cancel], "state": make_db, **more})


async def begin(environment: ConversationEnvironment, seed: int = 0) -> Conversation:
    return await environment.start(environment.scenarios("train")[0], seed)


async def verdict(conversation: Conversation) -> bool | None:
    return (await conversation.outcome()).success


async def test_each_conversation_has_a_state_of_its_own_which_tools_change_and_the_verdict_sees() -> None:
    environment = shop(success=cancelled)
    one, other = await begin(environment), await begin(environment)
    assert (await one.step(say("", "K27"))).messages[0].content == "cancelled"
    assert (await one.step(say("", "K99"))).messages[0].content == "error: no order K99"
    assert (await verdict(one), await verdict(other)) == (True, False)


def test_the_agent_is_not_shown_the_state_but_an_address_s_state_is_its_own() -> None:
    @tool
    def ship(street: str, state: Literal["CA", "NY"] | None) -> str:
        return f"{street}, {state}"

    @tool
    def look(scenario, state) -> str:  # type: ignore[no-untyped-def]  # filled in, so they need no types
        return f"{scenario.id} {state}"

    def shown(entry: Tool) -> list[str]:
        return list(entry.schema["function"]["parameters"]["properties"])

    assert (shown(cancel), shown(ship), shown(look)) == (["order_id"], ["street", "state"], [])
    assert Toolbox([ship]).takes_state is None
    assert Toolbox([ship, cancel]).takes_state == "cancel"


async def test_a_toolbox_hands_on_scenario_and_state() -> None:
    orders = {"K27": "open"}
    call = ToolCall(name="cancel", arguments={"order_id": "K27"})
    [answer] = await Toolbox([cancel]).call_all([call], state=orders)
    assert (answer.content, orders) == ("cancelled", {"K27": "cancelled"})
    with pytest.raises(ConfigurationError, match="tool cancel asks for the conversation's state, and this"):
        await Toolbox([cancel]).call(call)


async def test_a_fork_has_a_copy_of_the_state() -> None:
    origin = await begin(shop(success=cancelled))
    twin = origin.fork()
    await twin.step(say("", "K27"))
    assert (await verdict(twin), await verdict(origin), await verdict(twin.fork())) == (True, False, True)


class Ledger:
    """A state that knows how to copy itself, and holds something."""

    def __init__(self, total: int = 0) -> None:
        self.connection = sqlite3.connect(":memory:", check_same_thread=False)  # deepcopy cannot copy it
        self.total = total
        self.is_closed = False

    def fork(self) -> Ledger:
        return Ledger(self.total)

    def close(self) -> None:
        self.is_closed = True
        self.connection.close()


@tool
def spend(amount: int, state: Ledger) -> str:
    """Spend it."""
    state.total += amount
    return str(state.total)


async def test_a_state_s_own_fork_and_close_are_used() -> None:
    made: list[Ledger] = []

    def ledger() -> Ledger:
        made.append(Ledger())
        return made[-1]

    environment = ConversationEnvironment([SCENARIO], tools=[spend], state=ledger)
    origin = await begin(environment)

    async def spent(conversation: Conversation, amount: int) -> str:
        reply = Message(
            role="assistant", content="", tool_calls=(ToolCall(name="spend", arguments={"amount": amount}),)
        )
        return (await conversation.step(reply)).messages[0].content

    assert await spent(origin, 3) == "3"
    twin = origin.fork()
    assert (await spent(twin, 4), await spent(origin, 1)) == ("7", "4")
    await origin.close()
    assert [ledger.is_closed for ledger in made] == [True]
    assert await spent(twin, 0) == "7"
    await twin.close()


async def test_a_state_that_cannot_be_copied_says_so_and_one_that_gives_itself_too() -> None:
    class Same:
        def fork(self) -> Same:
            return self

    def database() -> sqlite3.Connection:
        return sqlite3.connect(":memory:", check_same_thread=False)

    conversation = await begin(shop(state=database, success=lambda state: None))
    with pytest.raises(ConfigurationError, match=r"a Connection, cannot be copied .*give it fork\(\) or"):
        conversation.fork()
    await conversation.close()
    with pytest.raises(ConfigurationError, match=r"Same.fork\(\) gave the state itself"):
        (await begin(shop(state=Same))).fork()


async def test_the_user_sees_the_state_when_it_is_made_when_it_replies_and_in_its_goal() -> None:
    seen: list[Any] = []

    class Caller(ScriptedUser):
        async def reply(self, messages: Sequence[Message], state: Any) -> str | None:  # type: ignore[override]  # by name
            seen.append(dict(state))
            return await super().reply(messages)

    def by_class(scenario: Scenario, seed: int, state: dict[str, str]) -> User:
        return Caller([f"I have {len(state)} orders."] * 3)

    def by_goal(scenario: Scenario, seed: int) -> User:
        return RuleBasedUser([], goal=lambda messages, state: state["K27"] == "cancelled")

    conversation = await begin(shop(user=by_class))
    await conversation.step(say("", "K27"))
    assert (await conversation.step(say("Done."))).messages[0].content == "I have 2 orders."
    assert seen == [{"K27": "cancelled", "K28": "open"}]

    conversation = await begin(shop(user=by_goal))
    assert not (await conversation.step(say("I will."))).terminated
    twin = conversation.fork()
    await conversation.step(say("", "K27"))
    assert (await conversation.step(say("Done."))).terminated
    assert (await verdict(conversation), await verdict(twin)) == (True, False)
    assert not (await twin.step(say("Done."))).terminated


async def test_a_user_that_keeps_the_state_cannot_be_forked_unless_it_takes_the_copys() -> None:
    class Keeper(ScriptedUser):
        def __init__(self, state: dict[str, str]) -> None:
            super().__init__(["a", "b"])
            self.state = state

    class Taker(Keeper):
        def fork(self, state: dict[str, str]) -> Taker:  # type: ignore[override]  # by name
            return Taker(state)

    def closing_over(scenario: Scenario, seed: int, state: dict[str, str]) -> User:
        return RuleBasedUser([], goal=lambda messages: state["K27"] == "cancelled")

    for user in (lambda scenario, seed, state: Keeper(state), closing_over):
        conversation = await begin(shop(user=user))
        with pytest.raises(ConfigurationError, match="keeps the state, so that its copy would look at"):
            conversation.fork()
    (await begin(shop(user=lambda scenario, seed, state: Taker(state)))).fork()


async def test_a_user_that_breaks_at_the_start_closes_the_state() -> None:
    made: list[Ledger] = []

    def ledger() -> Ledger:
        made.append(Ledger())
        return made[-1]

    def broken(scenario: Scenario, seed: int) -> User:
        raise OSError("line dropped")

    environment = ConversationEnvironment([SCENARIO], state=ledger, user=broken, local=True)
    with pytest.raises(EnvironmentFailure, match="user failed: OSError: line dropped"):
        await begin(environment)
    assert [ledger.is_closed for ledger in made] == [True]


async def test_the_state_is_made_from_scenario_and_seed_and_may_wait() -> None:
    async def drawn(scenario: Scenario, seed: int) -> dict[str, str]:
        await asyncio.sleep(0)
        return {"K27": f"{scenario.context['orders'][0]} {seed}"}

    environment = shop(state=drawn, success=lambda messages, state: state["K27"] == "K27 5")
    assert not environment.local
    assert shop().local
    assert await verdict(await begin(environment, seed=5)) is True
    assert await verdict(await begin(environment, seed=6)) is False
    plain = shop(state=dict, tools=(), success=lambda state: state == {})  # a built-in tells no parameters
    assert await verdict(await begin(plain)) is True


async def test_a_yaml_file_names_its_functions() -> None:
    spec = {"name": "conversation", "scenarios": [SCENARIO], "state": "builtins:dict", "user": None}
    environment = make_environment({**spec, "success": "test_conversation_state:is_empty"})
    assert await verdict(await environment.start(environment.scenarios("train")[0], 0)) is True


def is_empty(state: dict[str, str]) -> bool:
    return state == {}


async def test_states_that_would_be_shared_or_are_none_are_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigurationError, match=r"state must be a function .* got \{\}: one object would be"
    ):
        shop(state={})
    with pytest.raises(ConfigurationError, match="state must return a conversation's state, got None"):
        await begin(shop(state=lambda: None))
    kept: dict[str, str] = {}
    environment = shop(state=lambda: kept)
    await begin(environment)
    with pytest.raises(ConfigurationError, match="state gave the same dict to two conversations"):
        await begin(environment)
    with pytest.raises(
        ConfigurationError, match=r"tool cancel asks for the conversation's state.*give state="
    ):
        shop(state=None)
    with pytest.raises(ConfigurationError, match=r"state: cannot give parameter 'shop'; there are: scenario"):
        shop(state=lambda shop: shop)
    with pytest.raises(EnvironmentFailure, match="making the state failed: KeyError: 'K27'"):
        await begin(shop(state=lambda: {}["K27"]))
    goal = RuleBasedUser([], goal=lambda state: True)
    with pytest.raises(
        ConfigurationError, match="goal asks for the conversation's state, and the environment"
    ):
        await goal.reply([say("hi")])


async def test_success_asks_by_name_and_the_old_order_still_works() -> None:
    async def judged(success: Any) -> Outcome:
        conversation = await begin(shop(success=success))
        await conversation.step(say("I do", "K27"))
        return await conversation.outcome()

    def all_there_is(scenario, context, messages, replies, state) -> bool:  # type: ignore[no-untyped-def]  # by name
        return (
            [reply.content for reply in replies] == ["I do"]
            and [message.role for message in messages] == ["user", "assistant", "tool"]
            and context is scenario.context
            and cancelled(state)
        )

    for good in (
        all_there_is,
        lambda replies: len(replies) == 1,
        lambda messages, scenario: messages[0].content == scenario.opening,
        lambda s, m: len(m) == 3 and s.id != "",  # as before: (scenario, messages) in this order
        lambda *both: len(both[1]) == 3,
    ):
        assert (await judged(good)).success is True
    whole = Outcome(reward=0.25, success=False, metadata={"violations": {"no consent": 1}})
    assert await judged(lambda state: whole) == whole
    with pytest.raises(
        ConfigurationError, match=r"success: cannot give parameter 'talk'; there are: scenario,"
    ):
        shop(success=lambda state, talk: True)
    with pytest.raises(
        ConfigurationError,
        match=r"cannot give parameter 'state' \(give state=.*; there are: scenario, context",
    ):
        ConversationEnvironment([SCENARIO], success=lambda messages, state: True)


class Chatterbox:
    """A user with something to say to everything, who counts how often it was asked."""

    local = True
    asked = 0

    async def reply(self, messages: Sequence[Message]) -> str | None:
        Chatterbox.asked += 1
        return "And then?"

    def fork(self) -> User:
        return self


@pytest.mark.parametrize(
    "alone", [{"max_turns": 1, "user": lambda scenario, seed: Chatterbox()}, {"user": None}]
)
async def test_where_one_reply_is_all_nobody_speaks_after_it(alone: dict[str, Any]) -> None:
    Chatterbox.asked = 0
    environment = ConversationEnvironment([SCENARIO], success=lambda replies: len(replies) == 1, **alone)
    conversation = await begin(environment)
    assert await conversation.step(say("It is cancelled.")) == Observation(terminated=True)
    assert (await verdict(conversation), Chatterbox.asked) == (True, 0)


async def test_without_a_user_tools_go_on_until_the_first_words() -> None:
    conversation = await begin(shop(user=None, success=cancelled, max_turns=3))
    assert not (await conversation.step(say("", "K27"))).terminated
    assert await conversation.step(say("Done.")) == Observation(terminated=True)
    assert await verdict(conversation) is True
    single = await begin(shop(max_turns=1))
    seen = await single.step(say("", "K27"))
    assert (seen.truncated, seen.messages[0].role) == (True, "tool")


@pytest.mark.parametrize("alone", [{"max_turns": 1}, {"user": None}])
async def test_where_one_reply_is_all_expected_facts_are_still_heard(alone: dict[str, Any]) -> None:
    scenario = {"topic": "refund", "expected_facts": ["5 days"]}
    for reply, good in (("Your refund takes 5 days.", True), ("Your refund takes a while.", False)):
        conversation = await begin(ConversationEnvironment([scenario], **alone))
        assert "refund" in conversation.opening[-1].content
        assert await conversation.step(say(reply)) == Observation(terminated=True)
        assert await verdict(conversation) is good


async def test_a_user_whose_goal_has_an_empty_closure_cell_is_forked() -> None:
    def user(scenario: Scenario, seed: int) -> User:
        def goal(messages: Sequence[Message]) -> bool:
            return bool(messages) and not later  # noqa: F821  # deleted below, before anybody asks

        later = True
        del later
        return RuleBasedUser([], goal=goal)

    conversation = await begin(shop(user=user))
    assert await verdict(conversation.fork()) is False


def test_the_state_that_is_made_to_look_at_the_user_is_closed() -> None:
    made: list[Ledger] = []

    def ledger() -> Ledger:
        made.append(Ledger())
        return made[-1]

    def user(scenario: Scenario, seed: int, state: Ledger) -> User:
        return ScriptedUser([f"You have {state.total}."])

    assert ConversationEnvironment([SCENARIO], user=user, state=ledger).local
    assert [ledger.is_closed for ledger in made] == [True]


def test_a_state_with_an_async_close_cannot_be_looked_at_and_the_cure_is_local() -> None:
    class Remote:
        async def close(self) -> None: ...

    def user(scenario: Scenario, seed: int, state: Remote) -> User:
        return ScriptedUser(["Hm."])

    with pytest.raises(
        ConfigurationError, match=r"Remote.close is async.*give ConversationEnvironment\(local="
    ):
        ConversationEnvironment([SCENARIO], user=user, state=Remote)
    assert ConversationEnvironment([SCENARIO], user=user, state=Remote, local=False)


@pytest.mark.parametrize("name", ["success", "user"])
def test_a_function_that_asks_for_a_state_that_is_not_made_is_refused(name: str) -> None:
    """By its place alone it would be given the scenario as its state."""

    def asks(state: dict[str, str], messages: Sequence[Message]) -> bool:
        return bool(state)

    with pytest.raises(
        ConfigurationError, match=rf"{name}: cannot give parameter .state.*\(give state=\.\.\."
    ):
        ConversationEnvironment([SCENARIO], **{name: asks})


def test_tools_and_verdict_that_want_a_state_where_none_is_made_are_told_how_to_make_it() -> None:
    with pytest.raises(ConfigurationError, match=r"tool cancel asks for .* give state=\.\.\., a function"):
        shop(state=None, success=cancelled)


class Till:
    """A shop's till."""

    def __init__(self, scenario: Scenario) -> None:
        self.sold: list[str] = []
        self.orders = scenario.context["orders"]

    def sell(self, item: str, amount: int = 1) -> str:
        """Sell an item."""
        self.sold += [item] * amount
        return ", ".join(self.sold)

    async def count(self) -> int:
        """How many were sold."""
        return len(self.sold)

    def close(self) -> None:
        self.orders = []

    def _secret(self) -> str:
        return "no tool"


def calling(name: str, **arguments: Any) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments=arguments),))


async def test_the_public_methods_of_a_class_are_tools_on_an_object_of_each_conversation() -> None:
    environment = ConversationEnvironment([SCENARIO], tools=Till, success=lambda state: state.sold == ["tea"])
    one, other = await begin(environment), await begin(environment)
    assert [schema["function"]["name"] for schema in one.tools] == ["sell", "count"]
    assert [*one.tools[0]["function"]["parameters"]["properties"]] == ["item", "amount"]
    seen = await one.step(calling("sell", item="tea"))
    twin = one.fork()
    await twin.step(calling("sell", item="jam"))
    assert seen.messages[0].content == "tea"
    assert (await one.step(calling("count"))).messages[0].content == "1"
    assert (await other.step(calling("count"))).messages[0].content == "0"
    assert [await verdict(each) for each in (one, other, twin)] == [True, False, False]


async def test_a_class_and_functions_go_together_and_a_factory_makes_the_object() -> None:
    made = []

    def make(scenario: Scenario) -> Till:
        made.append(Till(scenario))
        return made[-1]

    @tool
    def empty(state: Till) -> str:
        state.sold.clear()
        return "empty"

    environment = ConversationEnvironment([SCENARIO], tools=[Till, empty], state=make)
    conversation = await begin(environment)
    await conversation.step(calling("sell", item="tea"))
    await conversation.step(calling("empty"))
    assert made[-1].sold == []
    with pytest.raises(ConfigurationError, match="state must make a Till, whose methods are tools, got dict"):
        await begin(ConversationEnvironment([SCENARIO], tools=Till, state=dict))


async def test_reset_begins_an_object_as_trl_does() -> None:
    class Counter:
        def reset(self, orders: list[str], seed: int, **row: Any) -> None:
            self.left = [*orders]
            self.row = {"seed": seed, **row}

        def take(self) -> str:
            """Take one."""
            return self.left.pop()

    environment = ConversationEnvironment([SCENARIO], tools=Counter)
    conversation = await begin(environment, seed=7)
    assert [schema["function"]["name"] for schema in conversation.tools] == ["take"]
    assert (await conversation.step(calling("take"))).messages[0].content == "K28"
    Counter.reset = lambda self: "hello"  # type: ignore[method-assign,assignment]  # what is refused
    with pytest.raises(ConfigurationError, match=r"Counter\.reset returned 'hello', which nobody would read"):
        await begin(environment)
    Counter.reset = lambda self, price: None  # type: ignore[method-assign,assignment]  # likewise
    with pytest.raises(ConfigurationError, match=r"Counter\.reset fails for .*'price'.*orders"):
        await begin(environment)


async def test_methods_of_one_object_are_refused_unless_it_is_said_that_nothing_changes_it() -> None:
    class Index:
        def search(self, words: str) -> str:
            """Search."""
            return words

    for bound in (Index().search, tool(Index().search)):
        with pytest.raises(
            ConfigurationError, match=r"one Index, which all .* tools=Index, of which each gets"
        ):
            ConversationEnvironment([SCENARIO], tools=[bound])
    conversation = await begin(ConversationEnvironment([SCENARIO], tools=[tool(shared=True)(Index().search)]))
    assert (await conversation.step(calling("search", words="tea"))).messages[0].content == "tea"
    assert (
        await Toolbox([Index().search]).call(ToolCall(name="search", arguments={"words": "a"}))
    ).content == "a"


class Nothing:
    value = 3


@pytest.mark.parametrize(
    ("tools", "why"),
    [
        (Nothing, "the class Nothing has no public method"),
        ([Till, Ledger], "two classes, Till and Ledger, and a conversation has one state"),
        ([functools.partial(print)], "got functools.partial.*: write a function that calls it"),
    ],
)
def test_tools_that_no_conversation_could_have_are_one_line(tools: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        ConversationEnvironment([SCENARIO], tools=tools)


def test_a_decorated_method_names_the_class_as_the_cure() -> None:
    with pytest.raises(ConfigurationError, match="tool buy is a method: leave @tool off and give its class"):

        class Decorated:
            @tool
            def buy(self, item: str) -> str:
                return item
