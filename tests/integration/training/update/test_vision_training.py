"""A vision-language model trained by our own updates: pictures reach every forward, and runs go on."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image as pillow
from tiny_training import even_share, make_agent, make_environment
from tiny_vlm import PLACES, TEMPLATE, save_tiny_vlm, tiny_processor, tiny_vlm
from transformers import AutoModelForImageTextToText, AutoProcessor

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import reward_function
from stateset_agents.environments.problems import PictureProblems
from stateset_agents.reasoning import MultiModalGRPO, PictureProblem
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import Processes
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.sft.trainer import SFTTrainer
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.trl.learner import TrlLearnerFactory
from stateset_agents.types.errors import ConfigurationError, ConversationRefused
from stateset_agents.types.images import IMAGE_MARK, Image
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Trajectory


def png(shade: int, *, size: int = 32) -> bytes:
    file = io.BytesIO()
    picture = pillow.linear_gradient("L").resize((size, size)).point(lambda value: (value + shade) % 256)
    picture.convert("RGB").save(file, "PNG")
    return file.getvalue()


@reward_function
def low_letters(trajectory: Trajectory) -> float:
    """Something that members of a group differ in."""
    ids = trajectory.turns[-1].completion.token_ids
    return sum(token < 100 for token in ids) / len(ids)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return save_tiny_vlm(tmp_path / "model")


def config(folder: Path, **settings: Any) -> TrainingConfig:
    base = {"num_generations": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    base |= {"learning_rate": 0.01, "lr_scheduler_type": "constant", "beta": 0.05, "max_steps": 3}
    return TrainingConfig(output_dir=str(folder), **(base | settings))


def make_trainer(model: str, folder: Path, *, run: Any = None, **settings: Any) -> MultiTurnGRPOTrainer:
    agent = MultiTurnAgent(AgentConfig(model_name=model, max_new_tokens=3))
    environment = PictureProblems(system_prompt="", answer_in="reply", num_train=20)
    return MultiTurnGRPOTrainer(agent, environment, low_letters, config(folder, **settings), run=run)


Weights = dict[str, torch.Tensor]


def copied(trainer: Any) -> Weights:
    return {name: value.clone() for name, value in trainer.learner.weights().items()}


def moved(before: Weights, after: Weights, has: Callable[[str], bool]) -> list[bool]:
    return [not torch.equal(value, after[name]) for name, value in before.items() if has(name)]


async def trained(
    trainer: MultiTurnGRPOTrainer, steps: int
) -> tuple[Weights, Weights, list[dict[str, float]]]:
    """Weights before and after, and the steps' metrics."""
    async with trainer:
        before = copied(trainer)
        metrics = [await trainer.step() for _ in range(steps)]
        after = copied(trainer)
        await trainer.agent.close()
    return before, after, metrics


@pytest.mark.parametrize("freeze", [False, True])
async def test_gradients_reach_the_vision_encoder_unless_it_is_frozen(
    model: str, tmp_path: Path, freeze: bool
) -> None:
    trainer = make_trainer(model, tmp_path, freeze_vision=freeze)
    before, after, metrics = await trained(trainer, 2)
    vision = moved(before, after, lambda name: "vision_model" in name)
    others = moved(before, after, lambda name: "vision_model" not in name)
    assert any(vision) is not freeze
    assert sum(vision) in (0, len(vision))
    assert all(moved(before, after, lambda name: "connector" in name))
    assert sum(others) >= len(others) - 1  # the last picture token's row of nothing but one embedding
    for step in metrics:  # what rollouts stored is what the update computes, after new weights, too
        assert step["policy/first_ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics[1]["kl/reference"] > 0
    assert trainer.learner.layout == {"rows": "padded", "why_rows": "the model reads pictures"}


async def test_an_adapter_leaves_the_frozen_encoder_alone(model: str, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, lora={"rank": 4}, freeze_vision=True)
    before, after, metrics = await trained(trainer, 2)
    assert not any(moved(before, after, lambda name: "vision_model" in name))
    assert any(moved(before, after, lambda name: "text_model" in name))
    assert metrics[1]["policy/first_ratio_max"] == pytest.approx(1, abs=1e-4)


@pytest.mark.long
async def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(
    model: str, tmp_path: Path
) -> None:
    found = []
    for name, steps in (("whole", [3]), ("parts", [2, 3])):
        run = None
        for last in steps:
            trainer = make_trainer(model, tmp_path / name, run=run)
            await trainer.initialize()
            if run is not None:
                await trainer.load_checkpoint()
                assert trainer.step_number == 2
            while trainer.step_number < last:
                await trainer.step()
            saved = await trainer.save_checkpoint()
            run = trainer.run
            found.append(copied(trainer))
            await trainer.close()
    assert not any(moved(found[0], found[2], lambda name: True))
    assert any(moved(found[0], found[1], lambda name: True))

    loaded = AutoModelForImageTextToText.from_pretrained(saved / "model")
    assert not any(moved(found[2], dict(loaded.state_dict()), lambda name: name != "lm_head.weight"))
    processor = AutoProcessor.from_pretrained(saved / "model")
    made = processor(text=["<image>"], images=[pillow.new("RGB", (32, 32))], return_tensors="pt")
    assert (made["input_ids"] == loaded.config.image_token_id).sum() == PLACES


async def test_pictures_in_later_turns_are_seen_with_those_before(model: str) -> None:
    pictures = [Image(data=png(shade)) for shade in (0, 90)]
    async with MultiTurnAgent(AgentConfig(model_name=model, max_new_tokens=4)) as agent:
        history, talk, replies = agent.history(), [], []
        for picture in pictures:
            talk.append(Message(role="user", content=f"now {IMAGE_MARK}?", images=(picture,)))
            replies.append(await agent.answer(talk, history=history))
            talk.append(replies[-1].message)
    assert [[item.digest for item in reply.pixels] for reply in replies] == [
        [pictures[0].digest],
        [picture.digest for picture in pictures],
    ]
    ids = replies[1].prompt_ids
    assert ids[: len(replies[0].prompt_ids)] == replies[0].prompt_ids
    assert ids.count(tiny_vlm().config.image_token_id) == 2 * PLACES


@pytest.mark.long
async def test_a_template_that_reads_text_gets_the_image_token_in_it(tmp_path: Path) -> None:
    flat = TEMPLATE.replace(
        "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}",
        "{{ message.content }}",
    )
    picture = Message(role="user", content=f"a {IMAGE_MARK} <image>", images=(Image(data=png(0)),))
    prompts = []
    for name, template in (("parts", TEMPLATE), ("flat", flat)):
        model = save_tiny_vlm(tmp_path / name, template=template)
        async with MultiTurnAgent(AgentConfig(model_name=model)) as agent:
            prompts.append(agent.template.prompt([picture]))
    assert prompts[0] == prompts[1]
    place_id = tiny_vlm().config.image_token_id
    assert prompts[0].count(place_id) == PLACES  # the one that is written out is plain text


async def test_a_picture_that_the_template_leaves_out_refuses_the_conversation(tmp_path: Path) -> None:
    spoken = TEMPLATE.replace("{{ '<|user|>'", "{% if message.role != 'tool' %}{{ '<|user|>'").replace(
        "<|end|>{% endfor %}", "<|end|>{% endif %}{% endfor %}"
    )
    model = save_tiny_vlm(tmp_path / "model", template=spoken)
    async with MultiTurnAgent(AgentConfig(model_name=model)) as agent:
        result = Message(role="tool", content=IMAGE_MARK, name="look", images=(Image(data=png(0)),))
        with pytest.raises(ConversationRefused, match="the chat template shows 0 of 1 pictures"):
            agent.template.prompt([Message(role="user", content="x"), result])


@pytest.mark.long
async def test_demonstrations_with_pictures_are_imitated(model: str, tmp_path: Path) -> None:
    chats = []
    for shade, said in ((0, "a"), (128, "b")):
        question = Message(role="user", content=f"{IMAGE_MARK}which", images=(Image(data=png(shade)),))
        reply = Message(role="assistant", content=said)
        chats += [{"messages": [question.to_openai(), reply.to_openai()]}] * 4
    settings = SFTConfig(
        learning_rate=3e-3, max_steps=40, validation_share=0.0, output_dir=str(tmp_path), precision="fp32"
    )
    async with SFTTrainer(
        MultiTurnAgent(AgentConfig(model_name=model, max_new_tokens=2)), chats, settings
    ) as trainer:
        agent = await trainer.train()
        said = []
        for chat in (chats[0], chats[-1]):
            question = Message.from_openai(chat["messages"][0])
            said.append(await agent.answer([question], sampling={"temperature": 0}))
    assert [reply.message.content for reply in said] == ["a", "b"]


# ------------------------------------------------------------------------------ refusals, each one line


async def test_a_model_of_text_refuses_a_picture() -> None:
    async with make_agent() as agent:
        with pytest.raises(ConfigurationError, match="a message has a picture") as refused:
            await agent.answer([Message(role="user", content=IMAGE_MARK, images=(Image(data=png(0)),))])
    assert "\n" not in str(refused.value)


async def test_settings_that_cannot_be_are_refused(model: str, tmp_path: Path) -> None:
    trainer = make_trainer(model, tmp_path, row_layout="packed")
    with pytest.raises(ConfigurationError, match="reads pictures, whose rows cannot be packed"):
        await trainer.initialize()
    await trainer.close()
    text = MultiTurnGRPOTrainer(
        make_agent(), make_environment(), even_share, config(tmp_path, freeze_vision=True)
    )
    with pytest.raises(ConfigurationError, match="freeze_vision needs a vision encoder"):
        await text.initialize()
    await text.close()


async def test_trl_as_the_learner_is_refused(model: str, tmp_path: Path) -> None:
    async with MultiTurnAgent(AgentConfig(model_name=model)) as agent:
        backend: Any = agent.backend
        with pytest.raises(ConfigurationError, match="TRL as the learner gets no pictures"):
            TrlLearnerFactory().make(agent, backend, TrainingConfig(max_steps=1), Processes())


# ------------------------------------------------------------------------------ live objects


def low_share(prompt: str, response: str, *, truth: Any) -> float:
    return sum(letter < truth["below"] for letter in response) / max(1, len(response))


async def test_a_problem_of_text_and_picture_is_processed_and_trained() -> None:
    policy = tiny_vlm()
    settings = {"group_size": 4, "max_length": 64, "kl_coef": 0.0, "learning_rate": 1e-2}
    async with MultiModalGRPO(policy, None, tiny_processor(), low_share, **settings) as trainer:
        truth = {"below": "n"}
        group = await trainer.process_problem("say", png(0), truth)
        other = await trainer.process_problem("say", png(128), truth)
        assert group["prompt_ids"] == other["prompt_ids"]
        assert group["pixels"][0].digest != other["pixels"][0].digest
        assert len(group["responses"]) == 4
        loss, losses = trainer.trainer.compute_loss(group)
        loss.backward()
        weight = trainer.vision_encoder.embeddings.patch_embedding.weight
        assert float(weight.grad.abs().max()) > 0
        _, exchanged = trainer.trainer.compute_loss({**group, "pixels": other["pixels"]})
        assert exchanged["clip_fraction"] > losses["clip_fraction"] == 0
        before = weight.detach().clone()
        problem = PictureProblem(text="say", image=png(0), context=truth)
        metrics = await trainer.train_step([problem, problem])
        assert metrics["skipped"] == 0
        assert not torch.equal(before, weight)


@pytest.mark.long
async def test_a_frozen_encoder_stays_over_live_objects_and_a_path_is_read(tmp_path: Path) -> None:
    policy = tiny_vlm()
    (tmp_path / "a.png").write_bytes(png(0))
    settings = {"group_size": 4, "max_length": 64, "kl_coef": 0.0, "learning_rate": 1e-2}
    async with MultiModalGRPO(
        policy, None, tiny_processor(), low_share, freeze_vision=True, **settings
    ) as trainer:
        before = {name: value.clone() for name, value in policy.state_dict().items()}
        await trainer.train_step(
            [PictureProblem(text="say", image=tmp_path / "a.png", context={"below": "n"})] * 2
        )
        after = policy.state_dict()
    assert not any(moved(before, after, lambda name: "vision_model" in name))
    assert any(moved(before, after, lambda name: "text_model" in name))
