"""Our conversations inside a GRPOTrainer that somebody else owns."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import even_share, make_agent, make_environment, plain_logprobs, talk
from trl import GRPOConfig, GRPOTrainer

from stateset_agents.training.trl import rollouts
from stateset_agents.training.trl_grpo_trainer import make_trl_rollout
from stateset_agents.types.errors import ConfigurationError


@pytest.mark.long
async def test_a_trainer_of_one_s_own_trains_our_conversations(tmp_path):
    """The test is a coroutine, so TRL calls the rollout where a loop runs."""
    seen = []

    def longest(trajectory, **_):
        seen.append(list(trajectory))
        return [float(one.num_agent_tokens) for one in trajectory]

    model = tiny_model()
    start = copy.deepcopy(model)
    with make_trl_rollout(make_agent(), make_environment(), even_share) as rollout:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[rollout.reward_func, longest],
            args=GRPOConfig(
                output_dir=str(tmp_path),
                num_generations=4,
                per_device_train_batch_size=8,
                max_steps=2,
                learning_rate=0.01,
                use_cpu=True,
                bf16=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rollout.prompts()),
            processing_class=tiny_tokenizer().hf,
            rollout_func=rollout,
        )
        trainer._send_telemetry = lambda: None
        trainer.train()
    assert [len(batch) for batch in seen] == [8, 8]
    assert all(len(one.turns) == 2 for batch in seen for one in batch)
    for one in seen[0]:
        told = torch.tensor([value for turn in one.turns for value in turn.completion.logprobs])
        torch.testing.assert_close(told, plain_logprobs(start.eval(), one), atol=1e-4, rtol=1e-4)
    moved = max(
        float(
            (torch.tensor([v for t in one.turns for v in t.completion.logprobs]) - plain_logprobs(start, one))
            .abs()
            .max()
        )
        for one in seen[1]
    )
    assert moved > 1e-3  # the second step's were sampled with the weights of the first
    with pytest.raises(ConfigurationError, match="this rollout was closed"):
        rollout(["train0"] * 4, trainer)


def test_prompts_that_are_no_groups_of_our_scenarios_are_refused():
    trainer = SimpleNamespace(num_generations=4, model=SimpleNamespace(training=True))
    with make_trl_rollout(make_agent(), make_environment()) as rollout:
        assert rollout.prompts()[:2] == [{"prompt": "train0"}, {"prompt": "train1"}]
        with pytest.raises(ConfigurationError, match=r"'hello' is no train scenario's id"):
            rollout(["hello"] * 4, trainer)
        with pytest.raises(ConfigurationError, match=r"groups of \[3\] and num_generations is 4"):
            rollout(["train0"] * 3, trainer)


def test_a_conversation_of_several_rows_is_refused_since_trl_takes_one_for_each_prompt():
    rows = talk(([1], [2]), ([1, 3], [4]), follows=(None, None), reward=1.0)
    with pytest.raises(ConfigurationError, match="scenario 's' has 2 rows, and TRL takes one"):
        rollouts._row(rows, 0)
