"""TRL's reward functions and environments, without a model: what they are given, and what becomes of it."""

from __future__ import annotations

import math
from typing import Any

import pandas
import pytest
from builders import trajectory
from datasets import Dataset, DatasetDict
from trl_shop import ROWS, Shop, say

from stateset_agents.core.scoring.base import score_trajectories
from stateset_agents.porting.trl import TrlEnvironment, TrlReward
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure, RewardFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

PROMPT = (Message(role="user", content="2 + 2?"),)


def members(*replies: str, prompt: tuple[Message, ...] = PROMPT, **row: Any) -> list[Trajectory]:
    scenario = Scenario(id="s", opening="2 + 2?", prompt=prompt, context={"prompt": "2 + 2?", **row})
    return [trajectory("2 + 2?", reply, scenario=scenario) for reply in replies]


async def scores(reward: TrlReward, group: list[Trajectory]) -> list[Any]:
    results = await score_trajectories(reward, group)
    return [result if isinstance(result, RewardFailure) else result.score for result in results]


def right(completions: Any, answer: list[str], **_: Any) -> list[float | None]:
    said = [completion[0]["content"] for completion in completions]
    return [None if words == "?" else float(words == it) for words, it in zip(said, answer, strict=True)]


async def short(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float | None]:
    assert prompts == [[{"role": "user", "content": "2 + 2?"}]] * len(completions)
    return [
        None if completion[0]["content"] == "?" else -len(ids)
        for completion, ids in zip(completions, completion_ids, strict=True)
    ]


async def test_rewards_are_summed_by_weight_and_none_is_left_out() -> None:
    reward = TrlReward([right, short], reward_weights=[2.0, 0.5])
    assert await scores(reward, members("4", "five", "?", answer="4")) == [2 - 0.5, -2.0, None]
    assert reward.part_weights == {"right": 2.0, "short": 0.5}
    one = TrlReward(right)
    assert await scores(one, members("4", "5", answer="4")) == [1.0, 0.0]
    assert one.local
    assert not reward.local


async def test_a_negative_weight_and_one_of_zero_count_as_trl_counts_them() -> None:
    reward = TrlReward([right, short], reward_weights=[-1, 0])
    assert await scores(reward, members("4", "5", answer="4")) == [-1.0, 0.0]


async def test_plain_text_prompts_give_plain_texts() -> None:
    def texts(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        assert prompts == ["2 + 2?"] * 2
        return [float(len(text)) for text in completions]

    assert await scores(TrlReward(texts), members("4", "four", prompt=())) == [1.0, 4.0]


async def test_the_trainer_s_state_and_the_logs() -> None:
    def logged(
        completions: Any, trainer_state: Any, log_extra: Any, log_metric: Any, **_: Any
    ) -> list[float]:
        log_extra("length", [len(completion) for completion in completions])
        log_extra("words", ["four", "five"])
        log_metric("share", 0.25)
        return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

    reward = TrlReward(logged)
    reward.max_steps = 8
    results = await score_trajectories(reward, members("4", "5"))
    assert [result.breakdown for result in results] == [{"length": 1.0, "share": 0.25, "logged": 0.0}] * 2


async def test_a_text_that_log_extra_cannot_keep_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def logged(completions: Any, log_extra: Any, **_: Any) -> list[float]:
        log_extra("words", ["four"] * len(completions))
        return [0.0] * len(completions)

    reward = TrlReward(logged)
    for _ in range(2):
        await score_trajectories(reward, members("4", "5"))
    (record,) = caplog.records
    assert "log_extra keeps numbers, others are left out" in record.getMessage()
    assert "words" in record.getMessage()


async def test_a_log_under_the_name_of_a_reward_is_refused() -> None:
    def logged(completions: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric("Shop", 50.0)
        return [0.0] * len(completions)

    line = "a log must have a name that no reward has, got 'Shop'"
    with pytest.raises(ConfigurationError, match=line):
        await scores(TrlReward(logged, environments=["Shop"]), members("4", "5"))


async def test_too_few_rewards_leave_the_group_unscored() -> None:
    def one(**_: Any) -> list[float]:
        return [1.0]

    first, _ = await scores(TrlReward(one), members("4", "5"))
    assert str(first) == "reward trl: one returned 1 rewards for 2 completions"


@pytest.mark.parametrize(
    "returned", [{"a": 1, "b": 2}, "12", ["1", "2"], 1.0, None, [[1.0], [2.0]], {1.0, 2.0}]
)
async def test_what_is_no_list_of_numbers_names_the_function(returned: Any) -> None:
    def odd(**_: Any) -> Any:
        return returned

    with pytest.raises(ConfigurationError, match=r"^odd must return a list of a number or None .*, got "):
        await scores(TrlReward(odd), members("4", "5"))


async def test_a_generator_is_iterated_as_trl_does() -> None:
    def numbers(completions: Any, **_: Any) -> Any:
        return (float(index) for index, _ in enumerate(completions))

    assert await scores(TrlReward(numbers), members("4", "5")) == [0.0, 1.0]


async def test_an_exit_in_a_reward_does_not_end_the_trainer() -> None:
    def exits(**_: Any) -> list[float]:
        raise SystemExit(3)

    first, _ = await scores(TrlReward(exits), members("4", "5"))
    assert "RuntimeError: SystemExit: 3" in str(first)

    class Exits(Shop):
        async def get_reward(self) -> float:
            raise SystemExit(3)

    talk = await started(TrlEnvironment(ROWS, environment_factory=Exits))
    with pytest.raises(EnvironmentFailure, match=r"Exits\.get_reward failed: RuntimeError: SystemExit: 3"):
        await talk.outcome()


@pytest.mark.parametrize("returned", [[1.0], "1", {}])
async def test_a_get_reward_that_is_no_number_is_one_line(returned: Any) -> None:
    class Lists(Shop):
        def get_reward(self) -> Any:
            return returned

    talk = await started(TrlEnvironment(ROWS, environment_factory=Lists))
    with pytest.raises(ConfigurationError, match=r"^Lists.get_reward must return a number or None, got "):
        await talk.outcome()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"reward_funcs": "org/reward-model"}, "reward_funcs must be functions.*asks the reward model"),
        (
            {"reward_funcs": [right], "reward_weights": [1, 2]},
            "reward_weights must have one weight for each of 1",
        ),
        *(
            (
                {"reward_funcs": right, "reward_weights": weights},
                "reward_weights must have one weight for each of 1 reward_funcs, a finite number, got ",
            )
            for weights in ("1", ["x"], [None], 5, [math.nan], {"right": 1})
        ),
        ({"reward_funcs": 5}, r"reward_funcs must be functions, got \[5\]"),
        ({"reward_funcs": [right, right]}, "reward_funcs must be some, each of another name"),
        ({"reward_funcs": None}, r"reward_funcs must be some, each of another name, got \[\]"),
    ],
)
def test_what_is_no_reward_is_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError, match=line):
        TrlReward(**arguments)


# --- environments


def call(name: str, **arguments: Any) -> Message:
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=name, arguments=arguments),))


async def started(environment: TrlEnvironment, index: int = 0) -> Any:
    return await environment.start(environment.scenarios("train")[index], 0)


async def test_rows_are_scenarios_with_all_their_columns() -> None:
    environment = TrlEnvironment(ROWS, eval_dataset=ROWS[:2], environment_factory=Shop)
    first = environment.scenarios("train")[0]
    assert dict(first.context) == ROWS[0]
    assert [message.role for message in first.prompt] == ["system", "user"]
    assert len(environment.scenarios("validation")) == 2
    assert environment.scenarios("test") == []
    assert environment.scored_by == ("Shop",)
    assert not environment.local  # one tool is async


async def test_reset_s_words_stand_behind_the_prompt_and_methods_are_tools_by_name() -> None:
    environment = TrlEnvironment(ROWS, environment_factory=Shop)
    talk = await started(environment)
    assert talk.opening[-1].content == "case 0: how many pens are left? The shop has 4 shelves."
    assert (await started(environment, 1)).opening[-1].content == "case 1: how many cups are left?"
    assert [tool["function"]["name"] for tool in talk.tools] == ["count", "sell"]


async def test_what_a_tool_raises_is_told_as_trl_tells_it() -> None:
    talk = await started(TrlEnvironment(ROWS, environment_factory=Shop))
    (answer,) = (await talk.step(call("sell", thing="pens", number=9))).messages
    assert answer.content == "{'error': 'only 1 left'}"
    (answer,) = (await talk.step(call("steal"))).messages
    assert answer.content == "{'error': 'Tool steal not found.'}"
    (answer,) = (await talk.step(call("reset", stock=5, thing="cups"))).messages
    assert answer.content == "{'error': 'Tool reset not found.'}"
    assert (await talk.step(Message(role="assistant", content="bye"))).terminated


async def test_rounds_of_calls_end_where_the_limit_is() -> None:
    talk = await started(TrlEnvironment(ROWS, environment_factory=Shop, max_tool_calling_iterations=1))
    assert not (await talk.step(call("count", thing="pens"))).terminated
    assert (await talk.step(call("count", thing="pens"))).terminated


async def test_each_conversation_and_each_fork_has_an_object_of_its_own() -> None:
    environment = TrlEnvironment(ROWS, environment_factory=Shop)
    one, other = await started(environment), await started(environment)
    twin = one.fork()
    await one.step(call("sell", thing="pens"))
    assert [(await talk.outcome()).reward for talk in (one, other, twin)] == [0.0, 0.1, 0.1]


async def test_functions_alone_are_tools_too() -> None:
    def add(one: int, other: int) -> int:
        """Add.

        Args:
            one: A number.
            other: Another.
        """
        return one + other

    environment = TrlEnvironment([{"prompt": "2 + 2?"}], tools=[add])
    talk = await started(environment)
    assert talk.opening == (Message(role="user", content="2 + 2?"),)
    assert (await talk.step(call("add", one=2, other=2))).messages[0].content == "4"
    assert (await talk.outcome()).reward is None
    assert environment.local


class Asker:
    def reset(self, **row: Any) -> str:
        return "Say yes."

    def agree(self) -> str:
        """Say yes."""
        return "yes"


async def test_an_environment_may_ask_by_itself_and_several_are_chosen_by_name() -> None:
    alone = TrlEnvironment(environment_factory=Asker)
    assert (await started(alone)).opening == (Message(role="user", content="Say yes."),)
    rows = [{"environment": "ask"}, {**ROWS[0], "environment": "shop"}]
    both = TrlEnvironment(rows, environment_factory={"ask": Asker, "shop": Shop})
    assert [scenario.family for scenario in both.scenarios("train")] == ["ask", "shop"]
    assert [(await started(both, index)).tools[0]["function"]["name"] for index in (0, 1)] == [
        "agree",
        "count",
    ]


async def test_a_prompt_without_words_needs_those_of_reset() -> None:
    class Mute(Asker):
        def reset(self, **row: Any) -> None:
            return None

    line = "^the prompt must have words, got '': give row train-0 a prompt, or let Mute.reset return it"
    with pytest.raises(ConfigurationError, match=line):
        await started(TrlEnvironment([{"prompt": ""}], environment_factory=Mute))
    rows = [{"prompt": [{"role": "user", "content": None}, {"role": "user", "content": "?"}]}]
    with pytest.raises(ConfigurationError, match=r"row 0 .* must have words in what the user says"):
        TrlEnvironment(rows, environment_factory=Asker)


async def test_a_reset_that_breaks_fails_its_conversation() -> None:
    class Broken(Asker):
        def reset(self, **row: Any) -> str:
            raise OSError("no database")

    with pytest.raises(EnvironmentFailure, match=r"Broken\.reset failed: OSError: no database"):
        await started(TrlEnvironment(environment_factory=Broken))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({}, "train_dataset must be rows, or one environment's reset ask, got None"),
        ({"train_dataset": [{"question": "?"}]}, "row 0 of the train dataset must have a prompt"),
        ({"train_dataset": 5}, "^the train dataset must be rows, give a datasets.Dataset .*'int' object"),
        ({"train_dataset": "name"}, "^row 0 of the train dataset must be a mapping, got 'n': give a"),
        (
            {"train_dataset": DatasetDict({"train": Dataset.from_list(ROWS)})},
            "^row 0 of the train dataset must be a mapping, got 'train': .*a split of a DatasetDict",
        ),
        ({"train_dataset": ROWS, "eval_dataset": {"test": ROWS}}, "^row 0 of the validation dataset must be"),
        *(
            ({"train_dataset": [ROWS[0], row]}, "^row 1 of the train dataset must be a mapping, got ")
            for row in ("a text", None)
        ),
        (
            {"train_dataset": pandas.DataFrame(ROWS)},
            r"^row 0 of the train dataset must be a mapping, got 'prompt': .*Dataset.from_pandas",
        ),
        *(
            ({"train_dataset": [{"prompt": prompt}]}, "^row 0 of the train dataset: prompt must be a text or")
            for prompt in (None, 5, [])
        ),
        (
            {"train_dataset": [{"prompt": [{"role": "usr", "content": "?"}]}]},
            "^row 0 of the train dataset: message role must be one of",
        ),
        *(
            (
                {"train_dataset": [{"prompt": prompt}]},
                "^row 0 of the train dataset: prompt must have words in what the user says, got ",
            )
            for prompt in ("", " ", [{"role": "user", "content": None}], [{"role": "user"}])
        ),
        ({"train_dataset": [{"prompt": "?", "image": 1}]}, "must have no pictures.*multimodal"),
        (
            {"train_dataset": ROWS, "environment_factory": dict},
            "environment_factory must make objects with reset",
        ),
        (
            {"train_dataset": [{"environment": "zoo"}], "environment_factory": {"shop": Shop}},
            "row 0 of the train dataset: environment must be of",
        ),
    ],
)
def test_what_cannot_be_played_is_one_line(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError, match=line) as refusal:
        TrlEnvironment(**arguments)
    assert "\n" not in str(refusal.value)


class Odd(Asker):
    def greet(self, name) -> str:
        return "hi"


class Narrow(Asker):
    def reset(self) -> None:  # type: ignore[override]  # what is wrong here
        return None


class Judges(Asker):
    def get_reward(self, answer: str) -> float:
        return 1.0


class Opens(Asker):
    def __init__(self, shelf: str) -> None:
        raise AssertionError(shelf)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        *(
            ({"environment_factory": made}, "^environment_factory .* must make an object when called with")
            for made in (5, "Shop", Shop(), [Shop], Opens)
        ),
        ({"environment_factory": {}}, r"row 0 of the train dataset: environment must be of \[\], got None"),
        ({"environment_factory": Odd}, r"^tool Odd.greet must be a function with types and a docstring: "),
        (
            {"environment_factory": Narrow},
            "^row 0 of the train dataset: Narrow.reset is called with prompt, t",
        ),
        ({"environment_factory": Judges}, "^Judges.get_reward is called with nothing, so take them or"),
        ({"tools": 5}, "^tools must be a list of functions: TypeError: 'int' object"),
        ({"tools": "x"}, "^tool 'x' must be a function with types and a docstring: "),
        ({"tools": [5]}, "^tool 5 must be a function with types and a docstring: "),
    ],
)
def test_an_environment_class_or_a_tool_that_does_not_fit_is_one_line(
    arguments: dict[str, Any], line: str
) -> None:
    with pytest.raises(ConfigurationError, match=line) as refusal:
        TrlEnvironment(ROWS, **arguments)
    assert "\n" not in str(refusal.value)


def test_no_tools_may_be_none() -> None:
    assert TrlEnvironment([{"prompt": "?"}], tools=None).scenarios("train")


def test_a_reward_that_does_not_take_what_it_is_given_is_one_line_before_the_first_step() -> None:
    def narrow(completions: Any, answer: Any) -> list[float]:
        raise AssertionError

    def other(completions: Any, colour: Any, **_: Any) -> list[float]:
        raise AssertionError

    (scenario,) = TrlEnvironment([{"prompt": "?", "answer": "4"}]).scenarios("train")
    for function, words in ((narrow, "unexpected keyword argument 'prompts'"), (other, "'colour'")):
        with pytest.raises(
            ConfigurationError, match=rf"{function.__name__} is called with answer, .*{words}"
        ):
            TrlReward(function).check_scenario(scenario)
    TrlReward(right).check_scenario(scenario)


def test_the_script_of_the_tests_says_ten_different_things() -> None:
    assert len({say(f"case {number}: <|im_start|>assistant") for number in range(10)}) == 10
