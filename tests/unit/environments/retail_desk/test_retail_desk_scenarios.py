"""The desk's scenarios: splits that share nothing they should not, balance, twins, seeds."""

import re
from collections import Counter

import pytest

from scripts.embedded_models.desk_habits import HabitAgent, Habits
from stateset_agents.environments.retail_desk import FAMILIES, RetailDesk, catalog, play
from stateset_agents.environments.retail_desk.catalog import WORDINGS
from stateset_agents.environments.retail_desk.database import Database
from stateset_agents.environments.retail_desk.policy import RULES, Case
from stateset_agents.environments.retail_desk.scenarios import answers_of, make_scenario

DESK = RetailDesk()
ORDER_ID = re.compile(r"\b[A-Z]\d\d\b")
ITEM = re.compile(rf"\b(?:{'|'.join(catalog.COLOURS)}) (?:{'|'.join(catalog.PRODUCTS)})\b")


def texts_of(split):
    """Everything that a split's scenarios can put before a model, apart from the fixed phrases."""
    for scenario in DESK.scenarios(split):
        yield scenario.opening
        yield " ".join(str(value) for value in scenario.context.values())
        for answer in WORDINGS["answers"][split]:
            yield answer.format(order_id=scenario.context["order_id"])


def test_order_ids_of_the_splits_are_disjoint():
    ids = {
        split: set(ORDER_ID.findall("\n".join(texts_of(split)))) for split in ("train", "validation", "test")
    }
    assert not ids["train"] & ids["test"]
    assert not ids["train"] & ids["validation"]
    assert not ids["validation"] & ids["test"]
    assert len(ids["train"]) > 2000
    assert len(ids["test"]) > 350


def test_one_id_in_five_is_held_out_and_every_letter_and_number_is_trained():
    held_out = len(catalog.order_ids_of("test")) + len(catalog.order_ids_of("validation"))
    assert held_out == 520
    assert len({order_id[0] for order_id in catalog.order_ids_of("train")}) == 26
    assert len({order_id[1:] for order_id in catalog.order_ids_of("train")}) == 100


def test_held_out_items_stand_in_no_training_text_and_every_word_of_them_does():
    trained = set(ITEM.findall("\n".join(texts_of("train"))))
    tested = set(ITEM.findall("\n".join(texts_of("test"))))
    assert not trained & set(catalog.items_of("test"))
    assert not trained & set(catalog.items_of("validation"))
    assert tested >= set(catalog.items_of("test"))
    assert {word for item in trained for word in item.split()} == {*catalog.COLOURS, *catalog.PRODUCTS}


def test_wordings_of_the_splits_are_disjoint():
    for family, wordings in WORDINGS["openings"].items():
        used = {
            split: {s.context["wording"] for s in DESK.scenarios(split) if s.family == family}
            for split in ("train", "validation", "test")
        }
        assert used == {split: set(wordings[split]) for split in used}
    every = [w for wordings in WORDINGS["openings"].values() for split in wordings.values() for w in split]
    answers = [answer for split in WORDINGS["answers"].values() for answer in split]
    assert len(set(every)) == len(every)
    assert len(set(answers)) == len(answers)


def test_no_test_opening_stands_in_training_with_its_slots_blanked():
    def blanked(split):
        texts = (re.sub(r"^(hi|hello|hey), ", "", s.opening) for s in DESK.scenarios(split))
        cities = re.compile("|".join(catalog.CITIES))
        return {cities.sub("_", ITEM.sub("_", ORDER_ID.sub("_", text))) for text in texts}

    assert not blanked("train") & blanked("test")
    assert not blanked("train") & blanked("validation")


def test_held_out_openings_use_only_words_that_training_openings_use():
    def words(split):
        return {w for s in DESK.scenarios(split) for w in re.findall(r"[a-z]+", s.opening)}

    assert words("test") | words("validation") <= words("train")


@pytest.mark.long
async def test_whole_training_conversations_hold_no_held_out_id_or_item():
    held_out = {*catalog.order_ids_of("test"), *catalog.order_ids_of("validation")}
    items = {*catalog.items_of("test"), *catalog.items_of("validation")}
    habits = Habits(guess_id=0.7, skip_lookup=0.4, violate_policy=0.5, wrong_action=0.3, wrong_closing=0.3)
    for number, scenario in enumerate(DESK.scenarios("train")[:1000]):
        played = await play(DESK, scenario, 1, HabitAgent(habits, number))
        text = "\n".join(
            f"{message.content} {[dict(call.arguments) for call in message.tool_calls]}"
            for message in played.messages
        )
        assert not held_out & set(ORDER_ID.findall(text))
        assert not items & set(ITEM.findall(text))


def test_the_test_split_is_balanced_and_the_same_for_every_seed():
    assert Counter(s.family for s in DESK.scenarios("test")) == dict.fromkeys(FAMILIES, 100)
    assert RetailDesk(seed=5).scenarios("test") == DESK.scenarios("test")
    assert RetailDesk(seed=5).scenarios("validation") == DESK.scenarios("validation")


def test_training_scenarios_follow_the_seed_and_never_run_out():
    assert RetailDesk(seed=5, num_train=50).scenarios("train") != RetailDesk(num_train=50).scenarios("train")
    assert len(RetailDesk(num_train=50).scenarios("train")) == 50
    far = make_scenario("train", 10**6)
    assert far == make_scenario("train", 10**6)
    assert far.opening


def test_scenario_ids_are_unique():
    ids = [s.id for split in ("train", "validation", "test") for s in DESK.scenarios(split)]
    assert len(set(ids)) == len(ids)


def test_denials_stay_below_30_percent_in_every_split():
    for split in ("train", "validation", "test"):
        scenarios = DESK.scenarios(split)
        denied = sum(RULES[s.family].decision(Case.from_context(s.context)).is_denial for s in scenarios)
        assert 0.2 < denied / len(scenarios) < 0.3


def test_twins_differ_in_one_fact_that_flips_the_right_answer():
    num_pairs = Counter()
    pairs = {}
    for scenario in DESK.scenarios("test"):
        pairs.setdefault(scenario.context["pair"], []).append(scenario)
    for pair in pairs.values():
        if len(pair) == 1:
            continue
        base, twin = pair
        differing = {key for key in base.context if base.context[key] != twin.context[key]}
        rule = RULES[base.family]
        assert differing == {rule.fact, "side"}
        assert base.opening == twin.opening
        one, other = Case.from_context(base.context), Case.from_context(twin.context)
        assert rule.decision(one) != rule.decision(other)
        num_pairs[base.family] += 1
    assert num_pairs == dict.fromkeys(FAMILIES, 40)


def test_twins_shops_differ_in_few_rows():
    for scenario, twin in zip(DESK.scenarios("test")[:6], DESK.scenarios("test")[6:12], strict=True):
        shops = [Database(answers_of(Case.from_context(s.context)).image) for s in (scenario, twin)]
        orders = [shop.rows("SELECT order_id, customer_id FROM orders ORDER BY order_id") for shop in shops]
        assert orders[0] == orders[1]


def test_openings_leave_the_order_id_out_about_a_third_of_the_time():
    for scenario in DESK.scenarios("train"):
        assert bool(ORDER_ID.search(scenario.opening)) == scenario.context["tells_order_id"]
    unnamed = sum(not s.context["tells_order_id"] for s in DESK.scenarios("train"))
    assert 0.3 < unnamed / len(DESK.scenarios("train")) < 0.4


def test_no_caller_begins_with_the_order_id():
    """There it would be other tokens than in a tool call, and the small model could not copy it."""
    answers = [one for split in WORDINGS["answers"].values() for one in split]
    assert len(answers) == 6
    assert all(" {order_id}" in one for one in answers)
