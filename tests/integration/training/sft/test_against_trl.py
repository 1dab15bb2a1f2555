"""Loss and gradient of a step against TRL's own SFTTrainer with a loss on the assistant's tokens alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from chat_templates import tokenizer_with, trl_tokenizer
from datasets import Dataset
from tiny_models import tiny_model
from trl import SFTConfig as TrlSFTConfig
from trl import SFTTrainer as TrlSFTTrainer

from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.training.sft.demonstrations import load_demonstrations
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.sft.trainer import step_samples
from stateset_agents.training.update.learner import Learner

TOOLS_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = [
    [("user", "where is K27?"), ("assistant", "It is on its way.")],
    [
        ("system", "Be brief."),
        ("user", "hello"),
        ("assistant", "Hello!"),
        ("user", "bye"),
        ("assistant", "Bye."),
    ],
    [("user", "a"), ("assistant", "b" * 40), ("user", "c"), ("assistant", "d")],
]


def chats_of_words() -> list[dict[str, Any]]:
    return [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in WORDS]


def chats_with_calls() -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "K27"}}}
    return [
        {
            "messages": [
                {"role": "user", "content": "where is it?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": "in Bern", "tool_call_id": "1", "name": "look"},
                {"role": "assistant", "content": "In Bern."},
            ]
        },
        *chats_of_words(),
    ]


@pytest.mark.parametrize("kind", ["words", "calls"])
async def test_a_step_is_that_of_trl_on_the_assistants_tokens(kind, tmp_path):
    if kind == "words":
        tokenizer, chats = trl_tokenizer("llama3_training"), chats_of_words()
    else:
        tokenizer = tokenizer_with("<|im_start|>", "<|im_end|>", template=TOOLS_CHATML)
        chats = chats_with_calls()
    model = tiny_model()
    model.resize_token_embeddings(len(tokenizer.hf))
    model = model.double()
    theirs = copy.deepcopy(model)
    trainer = TrlSFTTrainer(
        model=theirs,
        args=TrlSFTConfig(
            output_dir=str(tmp_path),
            assistant_only_loss=True,
            per_device_train_batch_size=len(chats),
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(chats),
        processing_class=tokenizer.hf,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(theirs, batch)
    loss.backward()

    backend = HuggingFaceBackend(copy.deepcopy(model), tokenizer)
    async with MultiTurnAgent(AgentConfig(model_name="tiny"), backend=backend) as agent:
        shown = load_demonstrations(agent, chats)
    samples = step_samples(shown.train, 1, size=len(chats), seed=0)
    learner = Learner(
        copy.deepcopy(model), SFTConfig().as_training(len(chats)), num_steps=1, exact_logprobs=True
    )
    ours = learner.losses(samples)["total_loss"]
    ours.backward()
    ours, loss = ours.detach(), loss.detach()

    assert int((batch["labels"] != -100).sum()) == sum(len(sample.advantages) for sample in samples)
    assert float(ours) == pytest.approx(float(loss), rel=1e-6)
    assert learner.negative_log_likelihood(samples) == pytest.approx(float(loss), rel=1e-6)
    for (name, mine), (_, other) in zip(
        learner.policy.model.named_parameters(), theirs.named_parameters(), strict=True
    ):  # norms and TRL's softmax compute in fp32
        assert float((mine.grad - other.grad).norm() / other.grad.norm()) < 1e-5, name
