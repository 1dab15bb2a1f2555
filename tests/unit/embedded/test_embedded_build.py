"""The embedded model's recipe, rebuilt short, and the model that ships."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import yaml
from repository_paths import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts import build_embedded as build
from scripts.build_embedded import build_embedded
from scripts.embedded_models import reasoner
from scripts.embedded_models.desk import RECOMMENDED, copying_weights, demonstrations, perturbed
from scripts.embedded_models.desk_habits import Habits
from scripts.embedded_models.recipe import Phase
from stateset_agents.backends.pretrained.loading import trained_tokens
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.environments.problems import ArithmeticProblems
from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.environment import RetailDesk
from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Split

DESK = ROOT / "stateset_agents" / "embedded" / "desk"
REASONER = DESK.parent / "reasoner"
HELD_OUT: tuple[Split, Split] = ("validation", "test")


def texts_of(dialogue: tuple[Message, ...], role: str) -> list[str]:
    return [message.content for message in dialogue if message.role == role]


def bare(text: str) -> str:
    """A caller's words without greeting and order id."""
    return re.sub(r"\b[A-Z]\d\d\b|^(hi|hello|hey), ", "", text)


def test_the_shipped_model_is_small_and_loads_with_plain_transformers() -> None:
    assert (DESK / "model.safetensors").stat().st_size <= 3_000_000
    model = AutoModelForCausalLM.from_pretrained(DESK)
    tokenizer = AutoTokenizer.from_pretrained(DESK)
    assert 450_000 < sum(parameter.numel() for parameter in model.parameters()) < 600_000
    assert model.config.vocab_size == len(tokenizer) <= 1000
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "where is order K27?"}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    reply = model.generate(prompt, do_sample=False, max_new_tokens=48)[0]
    assert reply[-1] == tokenizer.eos_token_id


def test_the_reasoner_is_small_and_computes_with_plain_transformers() -> None:
    assert (REASONER / "model.safetensors").stat().st_size <= 3_000_000
    model = AutoModelForCausalLM.from_pretrained(REASONER)
    tokenizer = AutoTokenizer.from_pretrained(REASONER)
    assert 450_000 < sum(parameter.numel() for parameter in model.parameters()) < 600_000
    asked = [{"role": "user", "content": "compute 2 + 3 * 4"}]
    text = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    begun = text + "<think> 2 + 12"  # left to itself it rarely would
    prompt = tokenizer(begun, add_special_tokens=False, return_tensors="pt")["input_ids"]
    reply = model.generate(prompt, do_sample=False, max_new_tokens=64)[0, prompt.shape[1] :]
    assert tokenizer.decode(reply) == " = 14 </think> <answer> 14 </answer><|end|>"


def test_a_shipped_model_lists_the_tokens_that_its_training_had() -> None:
    trained, tokenizer = trained_tokens(str(DESK)), AutoTokenizer.from_pretrained(DESK)
    assert trained is not None

    def foreign(text: str) -> float:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return sum(id not in trained for id in ids) / len(ids)

    openings = [scenario.opening for scenario in RetailDesk().scenarios("train")[:50]]
    assert max(map(foreign, openings)) == 0.0
    assert foreign("My parcel was delayed and I want compensation.") > 0.5
    reasoner, own = trained_tokens(str(REASONER)), AutoTokenizer.from_pretrained(REASONER)
    assert reasoner is not None
    assert reasoner >= set(own("compute 12 * 7<answer>", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("folder", "shipped"), [(DESK, RECOMMENDED), (REASONER, reasoner.RECOMMENDED)])
def test_the_card_s_recommended_settings_are_the_recipe_s_and_are_accepted(
    folder: Path, shipped: Mapping[str, object]
) -> None:
    recommended = yaml.safe_load((folder / "recommended.yaml").read_text())
    assert recommended == dict(shipped)
    assert TrainingConfig(**recommended).learning_rate == 5e-4


def test_the_reasoner_is_shown_no_held_out_problem_first_the_skill_and_then_its_habits() -> None:
    skill, habits = reasoner.recipe(seed=3, dialogues=900).phases
    openings = [dialogue[0].content for dialogue in skill.dialogues]
    assert openings == [dialogue[0].content for dialogue in habits.dialogues]
    for split in HELD_OUT:
        held_out = {scenario.opening for scenario in ArithmeticProblems().scenarios(split)}
        assert not held_out.intersection(openings)
    thoughts = [dialogue[1].reasoning or "" for dialogue in skill.dialogues]
    assert all(
        thought.count("=") == text.count(" ") // 2 - 1
        for thought, text in zip(thoughts, openings, strict=True)
    )
    shown = Counter(
        "bare" if dialogue[1].reasoning is None else "empty" if not dialogue[1].reasoning else "thinks"
        for dialogue in habits.dialogues
    )
    shares = [shown[habit] / 900 for habit in ("bare", "empty", "thinks")]
    assert shares == pytest.approx([0.15, 0.45, 0.4], abs=0.04)


def test_the_control_is_never_shown_a_thought() -> None:
    for phase in reasoner.recipe(seed=0, dialogues=90, habits={"empty": 1.0}).phases:
        assert {dialogue[1].reasoning for dialogue in phase.dialogues} == {""}


def test_demonstrations_are_the_same_for_a_seed_and_others_for_another() -> None:
    first = demonstrations(12, seed=0)
    assert first == demonstrations(12, seed=0)
    assert first != demonstrations(12, seed=1)


@pytest.mark.long
def test_no_id_wording_or_item_of_the_held_out_splits_stands_in_a_training_text() -> None:
    shown = demonstrations(600, seed=0)
    texts = "\n".join(
        [message.content for dialogue in perturbed(shown, seed=0) for message in dialogue]
        + [str(call.arguments) for dialogue in shown for message in dialogue for call in message.tool_calls]
    )
    openings = {bare(text) for dialogue in perturbed(shown, seed=0) for text in texts_of(dialogue, "user")}
    ids = set(re.findall(r"\b[A-Z]\d\d\b", texts))
    assert len(ids) > 300
    for split in HELD_OUT:
        assert not ids & set(catalog.order_ids_of(split))
        assert not [item for item in catalog.items_of(split) if item in texts]
        for scenario in RetailDesk().scenarios(split):
            assert bare(scenario.opening) not in openings


def test_blurring_changes_callers_words_and_nothing_else() -> None:
    shown = demonstrations(60, seed=3)
    changed = perturbed(shown, seed=3)
    assert changed == perturbed(shown, seed=3)
    pairs = list(zip(shown, changed, strict=True))
    for role in ("system", "assistant", "tool"):
        assert all(texts_of(before, role) == texts_of(after, role) for before, after in pairs)
    assert sum(texts_of(before, "user") != texts_of(after, "user") for before, after in pairs) > 20
    values = re.compile(r"[A-Z]\d\d")
    for before, after in pairs:
        assert values.findall(" ".join(texts_of(before, "user"))) == values.findall(
            " ".join(texts_of(after, "user"))
        )


async def test_the_loss_is_on_the_agent_s_tokens_and_heavier_on_what_it_copies() -> None:
    talk = (
        Message(role="user", content="where is order K27?"),
        Message(
            role="assistant",
            content="",
            tool_calls=(ToolCall(name="get_order", arguments={"order_id": "K27"}),),
        ),
        Message(role="tool", content='{"order_id": "K27", "status": "pending"}'),
        Message(role="assistant", content="order K27 arrives on friday."),
    )
    phase = Phase(dialogues=[talk], steps=1, settings={}, weights=copying_weights)
    async with MultiTurnAgent(AgentConfig(model_name="embedded:desk")) as agent:
        (sample,) = build.Shown(phase).load(agent, validation_share=0.0).train
        said = [
            agent.backend.tokenizer.piece(id)
            for turn in sample.trajectory.turns
            for id in turn.completion.token_ids
        ]
    weighed = list(zip(said, sample.advantages, strict=True))
    assert [token for token, weight in weighed if weight == 4.0] == [" K", "27", " K", "27"]
    assert [token for token, weight in weighed if 0 < weight < 1] == [" friday"]
    assert weighed[0] == ("<tool_call>", 1.0)
    assert [weight for token, weight in weighed if token == "<|end|>"] == [1.0, 1.0]


def test_a_value_weighs_more_where_it_stood_before_and_little_where_it_is_made_up() -> None:
    assert list(copying_weights([" K", "27", " is", " red", " K", "27"])) == [0.2, 0.2, 1.0, 0.2, 4.0, 4.0]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.long
def test_the_same_seed_and_threads_give_the_same_bytes(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        state = torch.random.get_rng_state()
        for name, seed in (("a", 5), ("b", 5), ("c", 6)):
            build_embedded(tmp_path / name, seed=seed, steps=3, dialogues=48)
        assert torch.equal(state, torch.random.get_rng_state())
    finally:
        torch.set_num_threads(before)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a")["model.safetensors"] != digests(tmp_path / "c")["model.safetensors"]


@pytest.mark.long
def test_the_command_builds_a_folder_and_says_what_it_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build.main([str(tmp_path / "model"), "--steps", "2", "--dialogues", "30", "--seed", "4"])
    printed = capsys.readouterr().out
    assert "step 2/2" in printed
    assert "parameters" in printed
    assert "seed 4, 30\ndemonstrations, 2 supervised steps" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.long
def test_the_command_builds_the_reasoner_in_two_phases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reasoner, "_HABIT_STEPS", 2)
    folder = tmp_path / "model"
    build.main([str(folder), "--model", "reasoner", "--steps", "2", "--dialogues", "90"])
    assert "step 4/4" in capsys.readouterr().out
    assert "90 problems" in " ".join((folder / "README.md").read_text().split())
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<think>") > 0


def test_a_model_without_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'reasone' \(did you mean 'reasoner'\?\): there are desk, r"
    ):
        build_embedded(tmp_path, model="reasone")


def test_counts_below_one_and_an_output_that_is_a_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="steps must be at least 1, got 0"):
        build_embedded(tmp_path, steps=0)
    with pytest.raises(ConfigurationError, match="dialogues must be at least 1, got -1"):
        build_embedded(tmp_path, dialogues=-1)
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigurationError, match="is a file; give a folder"):
        build_embedded(tmp_path / "taken")


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        build.main([str(tmp_path), "--threads", "0"])
    assert ended.value.code == "build_embedded: --threads must be at least 1, got 0"


def test_an_output_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot write the model in .*: give another folder"):
        build_embedded(tmp_path / "taken" / "model", on_step=lambda *_: pytest.fail("it was trained first"))


def test_honest_demonstrations_are_another_model(tmp_path: Path) -> None:
    honest = demonstrations(30, seed=0, habits=Habits())
    assert all("cannot find" not in text for dialogue in honest for text in texts_of(dialogue, "assistant"))
