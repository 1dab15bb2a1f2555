"""Two drawn digits to be added: splits, drawings, verdicts, and pictures exchanged."""

from __future__ import annotations

import io

import pytest
from PIL import Image as pillow

from stateset_agents.environments.problems import PictureProblems
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.images import IMAGE_MARK
from stateset_agents.types.messages import Message


def test_splits_share_no_drawing_and_have_every_sum() -> None:
    environment = PictureProblems(num_train=1500)
    splits = [environment.scenarios(split) for split in ("train", "validation", "test")]
    assert [len(scenarios) for scenarios in splits] == [1500, 500, 1000]
    ids = [scenario.id for scenarios in splits for scenario in scenarios]
    assert len(set(ids)) == len(ids)
    assert {scenario.context["answer"] for scenario in splits[0]} == set(range(19))
    assert [scenario.id for scenario in PictureProblems(seed=1).scenarios("test")] == [
        scenario.id for scenario in splits[2]
    ]


async def test_the_question_has_the_picture_and_the_sum_is_right() -> None:
    environment = make_environment(
        {"name": "pictures", "answer_in": "reply", "system_prompt": "", "size": 48}
    )
    scenario = environment.scenarios("test")[0]
    conversation = await environment.start(scenario, seed=0)
    (question,) = conversation.opening
    assert question.content == f"{IMAGE_MARK}add them"
    with pillow.open(io.BytesIO(question.images[0].data)) as picture:
        assert (picture.size, picture.mode) == ((48, 48), "RGB")
    assert (await environment.start(scenario, seed=1)).opening == conversation.opening
    for answer, reward in ((scenario.context["answer"], 1.0), (scenario.context["answer"] + 1, 0.0)):
        conversation = await environment.start(scenario, seed=0)
        await conversation.step(Message(role="assistant", content=str(answer)))
        assert (await conversation.outcome()).reward == reward


def test_shuffled_pictures_are_those_of_other_problems() -> None:
    plain, shuffled = PictureProblems(), PictureProblems(shuffled=True)
    scenarios = plain.scenarios("test")
    own = [plain.picture(scenario).digest for scenario in scenarios]
    others = [shuffled.picture(scenario).digest for scenario in scenarios]
    assert sorted(own) == sorted(others)
    assert sum(pair[0] == pair[1] for pair in zip(own, others, strict=True)) <= 5  # one is expected
    answers = {plain.picture(scenario).digest: scenario.context["answer"] for scenario in scenarios}
    right = sum(
        answers[digest] == scenario.context["answer"]
        for digest, scenario in zip(others, scenarios, strict=True)
    )
    assert right / len(scenarios) < 0.1  # 6.7 % of two random sums are equal


def test_the_scripted_solver_is_right() -> None:
    environment = PictureProblems()
    scenario = environment.scenarios("validation")[3]
    solver = environment.honest_agent(scenario)
    assert environment.answer(solver.message) == str(scenario.context["left"] + scenario.context["right"])


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"size": 8}, "size must be a whole number from 16 on"), ({"shuffled": 1}, "shuffled must be true or")],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        PictureProblems(**settings)  # type: ignore[arg-type]  # the mistake
