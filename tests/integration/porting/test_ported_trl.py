"""A TRL environment class, its dataset and rewards: played by TRL's own GRPOTrainer and by our port."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chat_templates import trl_tokenizer
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen2Config
from trl import GRPOConfig, GRPOTrainer
from trl_shop import ROWS, Shop, answered, brief, knows_its_row, say

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.porting import trl as ported_trl
from stateset_agents.porting.trl import from_trl
from stateset_agents.types.messages import Completion, Message

TEMPLATE = "qwen3_instruct_2507"
REWARDS = [answered, brief, knows_its_row]
WEIGHTS = [2.0, 1.0, -0.5]


def arguments(folder: Any, **settings: Any) -> GRPOConfig:
    return GRPOConfig(
        **{
            "output_dir": str(folder),
            "num_generations": 2,
            "per_device_train_batch_size": 20,
            "max_completion_length": 4000,
            "reward_weights": WEIGHTS,
            "max_steps": 1,
            "use_cpu": True,
            "bf16": False,
            **settings,
        }
    )


class ReplayingTrainer(GRPOTrainer):
    """TRL's trainer, but for the sampler: the tokens of a turn are those of what `say` replies to its prompt.

    A model of random weights never writes a call, so nothing would be compared. Parsing, tools, masks, the
    tokens between turns and rewards are TRL's own.
    """

    def _generate_single_turn(self, prompt_ids, *_, **__):
        tokenizer = self.processing_class
        texts = tokenizer.batch_decode(prompt_ids)
        return [[*tokenizer.encode(say(text)), tokenizer.eos_token_id] for text in texts], None

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self.by_function = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.completions = completions
        return self.by_function


class ReplayingBackend(ScriptedBackend):
    """The same sampler on our side."""

    async def generate(self, prompt_ids: Any, params: Any, **_: Any) -> Completion:
        reply = say(self.tokenizer.decode_markup(prompt_ids))
        ids = (*self.tokenizer.encode_markup(reply), self.tokenizer.eos_ids[0])
        return Completion(
            message=Message(role="assistant", content=reply),
            prompt_ids=tuple(prompt_ids),
            token_ids=ids,
            logprobs=(0.0,) * len(ids),
            finish_reason="stop",
        )


def played_by_trl(folder: Any) -> tuple[ReplayingTrainer, dict[str, Any]]:
    tokenizer = trl_tokenizer(TEMPLATE).hf
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=8192,
        )
    )
    trainer = ReplayingTrainer(
        model=model,
        reward_funcs=list(REWARDS),
        args=arguments(folder),
        train_dataset=Dataset.from_list(ROWS),
        processing_class=tokenizer,
        environment_factory=Shop,
    )
    inputs = [dict(row) for row in Dataset.from_list(ROWS) for _ in range(2)]
    return trainer, trainer._generate_and_score_completions(inputs)


async def test_ten_conversations_of_an_environment_class_are_trl_s_token_by_token(tmp_path):
    trainer, output = played_by_trl(tmp_path)
    ported = from_trl(
        reward_funcs=REWARDS,
        args=arguments(tmp_path),
        train_dataset=Dataset.from_list(ROWS),
        environment_factory=Shop,
    )
    backend = ReplayingBackend([], tokenizer=trl_tokenizer(TEMPLATE))
    agent = MultiTurnAgent(AgentConfig(model_name="tiny", **ported.agent), backend=backend)
    await agent.initialize()
    engine = ComputationalEngine(agent, ported.environment, ported.reward, num_generations=2)
    groups = await engine.rollout(ported.environment.scenarios("train"), seed=0, step=0)
    members = [member for group in groups for member in group.trajectories]
    assert len(members) == 20
    weighted = trainer.by_function * trainer.reward_weights
    for index, member in enumerate(members):
        row = member.end_to_end
        start = len(member.turns[0].prompt_ids)
        their_prompt = output["prompt_ids"][index][output["prompt_mask"][index].bool()].tolist()
        their_reply = output["completion_ids"][index][output["completion_mask"][index].bool()].tolist()
        assert row.token_ids[:start] == their_prompt, index
        assert row.token_ids[start:] == their_reply, index
        assert row.action_mask[start:] == output["tool_mask"][index][: len(their_reply)].tolist(), index
        assert member.reward == pytest.approx(float(weighted[index].nansum()), abs=1e-5), index
    assert [
        column for group in groups for column in ported_trl._columns(group.trajectories)["completions"]
    ] == trainer.completions
    names = [*(function.__name__ for function in REWARDS), "Shop"]
    for name, column in zip(names, trainer.by_function.T, strict=True):
        ours = [member.breakdown.get(name) for member in members]
        theirs = [None if torch.isnan(value) else pytest.approx(float(value), abs=1e-5) for value in column]
        assert ours == theirs, name
    assert any(value is None for value in (member.breakdown.get("answered") for member in members))
    assert members[3].breakdown["shelves"] == len("cups")
    assert max(len(member.turns) for member in members) == 4
