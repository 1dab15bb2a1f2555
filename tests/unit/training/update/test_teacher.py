"""The gradient that a teacher's word gives is that of the reverse KL, by exact enumeration; who may teach."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import make_agent, talk
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.settings.update import DistillationSettings
from stateset_agents.training.update.batch import CreditedBatch, Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.teacher import Teacher, check_vocabulary, load_teacher
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.trajectory import Trajectory

TOKENS, END = 3, 2
LONGEST = 2
"""Tokens of the first turn; END ends it earlier. The second has one."""
OPENING, ANSWER = (0, 1), (2,)
"""What stands before the first turn, and what the user says before the second."""


def small_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.7,
    )
    return AutoModelForCausalLM.from_config(config).double().eval()


class Spoken(NamedTuple):
    """A conversation, with each token's log-probs under both, [N] with gradient to the student."""

    turns: tuple[tuple[int, ...], tuple[int, ...]]
    student: Tensor
    teacher: Tensor


def first_turns(begun: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every first turn: it ends with END, or is as long as it may be."""
    for token in range(TOKENS):
        turn = (*begun, token)
        if token == END or len(turn) == LONGEST:
            yield turn
        else:
            yield from first_turns(turn)


def conversations(student: Any, teacher: Any) -> Iterator[Spoken]:
    for first in first_turns():
        for token in range(TOKENS):
            row = [*OPENING, *first, *ANSWER, token]
            said = [*range(2, 2 + len(first)), len(row) - 1]
            both = [_logprobs(model, row)[[place - 1 for place in said]] for model in (student, teacher)]
            yield Spoken((first, (token,)), both[0], both[1].detach())


def _logprobs(model: Any, row: Sequence[int]) -> Tensor:
    ids = torch.tensor(row)
    logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(-1, ids[1:, None])[:, 0]


def exact(student: Any, teacher: Any, credit: str) -> Tensor:
    """What is to go down, its gradient the student's."""
    total = torch.zeros((), dtype=torch.float64)
    for spoken in conversations(student, teacher):
        probability = spoken.student.sum().exp()
        gaps = spoken.student - spoken.teacher
        first = len(spoken.turns[0])
        if credit == "to_go":
            total = total + probability * gaps.sum()
        elif credit == "token":  # contexts as they are: only the token's own probability moves
            for place in range(len(gaps)):
                moves = spoken.student[place] - spoken.student[place].detach()
                total = total + (probability.detach() * moves.exp()) * gaps[place]
        else:
            for turn in (slice(0, first), slice(first, None)):
                moves = spoken.student[turn].sum() - spoken.student[turn].sum().detach()
                if credit == "turn_mean":  # the score function's, since a length is no constant
                    total = total + probability.detach() * moves * gaps[turn].mean().detach()
                else:
                    total = total + (probability.detach() * moves.exp()) * gaps[turn].sum()
    return total


def gradient_of(loss: Tensor, model: Any) -> Tensor:
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])


def as_trajectory(spoken: Spoken) -> Trajectory:
    first, second = spoken.turns
    return talk((OPENING, first), (ANSWER, second), logprobs=spoken.student.tolist())


def credited(*trajectories: Trajectory, reward: float = 0.0) -> CreditedBatch:
    samples = [Sample(trajectory=one, advantages=(reward,) * one.num_agent_tokens) for one in trajectories]
    return CreditedBatch(samples, 0, [[sample.advantages for sample in samples]])


async def started(model: Any) -> HuggingFaceBackend:
    backend = HuggingFaceBackend(model, tiny_tokenizer())
    await backend.start()
    return backend


@pytest.mark.parametrize("credit", ["token", "to_go", "turn_sum", "turn_mean"])
@pytest.mark.first(2)
async def test_the_expected_gradient_is_the_reverse_kl_s(credit):
    student, teacher = small_model(0), small_model(1)
    config = TrainingConfig(distillation={"teacher": "t", "credit": credit}, loss_length=1, num_generations=2)
    assert (config.loss_type, config.beta) == ("dr_grpo", 0.0)
    learner = Learner(student, config, num_steps=1, exact_logprobs=True)
    model = learner.policy.model
    told = Teacher(await started(teacher), config.distillation)
    expected = torch.zeros(sum(part.numel() for part in model.parameters()), dtype=torch.float64)
    total = 0.0
    for spoken in conversations(model, teacher):
        probability = float(spoken.student.detach().sum().exp())
        guided, _ = await told.guide(credited(as_trajectory(spoken)))
        expected += probability * gradient_of(learner.losses(guided.samples)["total_loss"], model)
        total += probability
    await told.close()
    assert total == pytest.approx(1.0)
    of_kl = gradient_of(exact(model, teacher, credit), model)
    assert float(of_kl.abs().max()) > 0.1
    torch.testing.assert_close(expected, of_kl, atol=1e-6, rtol=1e-6)


async def test_kl_to_the_teacher_is_an_estimate_of_the_conversations_kl():
    student, teacher = small_model(0), small_model(1)
    told = Teacher(await started(teacher), DistillationSettings(teacher="t"))
    mean = 0.0
    for spoken in conversations(student, teacher):
        _, metrics = await told.guide(credited(as_trajectory(spoken)))
        mean += float(spoken.student.detach().sum().exp()) * metrics["kl/teacher"] * len(spoken.student)
    await told.close()
    assert mean == pytest.approx(float(exact(student, teacher, "to_go").detach()), abs=1e-6)


async def test_the_reward_counts_beside_the_teacher_and_its_record_has_both():
    student, teacher = small_model(0), small_model(1)
    settings = {"teacher": "t", "weight": 2.0, "reward_weight": 0.5}
    told = Teacher(await started(teacher), DistillationSettings(**settings))
    spoken = next(conversations(student, teacher))
    guided, _ = await told.guide(credited(as_trajectory(spoken), reward=3.0))
    await told.close()
    expected = 2.0 * (spoken.teacher - spoken.student).detach() + 0.5 * 3.0
    assert guided.samples[0].advantages == pytest.approx(expected.tolist(), abs=1e-5)
    assert guided.advantages == [[guided.samples[0].advantages]]


async def test_a_member_that_does_not_train_stays_out():
    told = Teacher(await started(small_model(1)), DistillationSettings(teacher="t"))
    one = talk((OPENING, (1, 2)))
    sample = Sample(trajectory=one, advantages=(0.0, 0.0))
    guided, _ = await told.guide(CreditedBatch([sample], 0, [[None, sample.advantages], [None]]))
    empty, metrics = await told.guide(CreditedBatch([], 2, [[None]]))
    await told.close()
    assert guided.advantages == [[None, guided.samples[0].advantages], [None]]
    assert empty.samples == []
    assert "kl/teacher" not in metrics


async def test_each_turn_is_scored_in_the_row_in_which_it_was_sampled():
    """The second prompt is another one, as where a template drops thoughts: two rows."""
    teacher = small_model(1)
    told = Teacher(await started(teacher), DistillationSettings(teacher="t"))
    one = talk(((0, 1), (1, 2)), ((0, 2, 2), (1,)), follows=(None, None))
    found = await told.logprobs(Sample(trajectory=one, advantages=(0.0,) * 3))
    await told.close()
    expected = [*_logprobs(teacher, [0, 1, 1, 2])[1:], *_logprobs(teacher, [0, 2, 2, 1])[2:]]
    assert found == pytest.approx([float(value) for value in expected], abs=1e-5)


async def test_what_is_no_log_prob_is_refused():
    told = Teacher(await started(small_model(1)), DistillationSettings(teacher="sick"))
    told._backend.model.lm_head.weight.fill_(math.nan)
    with pytest.raises(BackendError, match="the teacher 'sick' gave log-probs that are none"):
        await told.logprobs(Sample(trajectory=talk((OPENING, (1,))), advantages=(0.0,)))
    await told.close()


# ------------------------------------------------------------------------------ who may teach


def save(folder: Any, *, seed: int = 0, renamed: bool = False, more: bool = False) -> str:
    tokenizer = tiny_tokenizer().hf
    model = tiny_model(seed=seed)
    if more:
        tokenizer.add_tokens(["<more>"])
        model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if renamed:
        file = folder / "tokenizer.json"
        file.write_text(file.read_text(encoding="utf-8").replace("<tool_call>", "<call>"), encoding="utf-8")
    return str(folder)


async def test_another_vocabulary_is_refused_in_one_line(tmp_path):
    student = make_agent()
    await student.initialize()
    name = save(tmp_path, renamed=True)
    with pytest.raises(ConfigurationError) as refused:
        await load_teacher(DistillationSettings(teacher=name), student)
    await student.close()
    assert (
        "has another vocabulary than the student (token 260 is '<tool_call>' here and '<call>' there)"
        in str(refused.value)
    )
    assert "\n" not in str(refused.value)


async def test_a_teacher_may_know_more_tokens_than_the_student_but_not_fewer(tmp_path):
    larger = save(tmp_path / "larger", more=True)
    student = make_agent()
    await student.initialize()
    teacher = await load_teacher(DistillationSettings(teacher=larger), student)
    await teacher.close()
    with pytest.raises(ConfigurationError, match=r"token 262 is '<more>' here and None there"):
        check_vocabulary(teacher._backend.tokenizer, student.backend.tokenizer, name="smaller")
    await student.close()


async def test_a_teacher_says_which_weights_it_has(tmp_path):
    student = make_agent()
    await student.initialize()
    weights = []
    for name, seed in (("a", 0), ("b", 1), ("a again", 0)):
        teacher = await load_teacher(DistillationSettings(teacher=save(tmp_path / name, seed=seed)), student)
        weights.append(teacher.identity["weights"])
        await teacher.close()
    await student.close()
    assert weights[0] == weights[2] != weights[1]


async def test_a_teacher_with_a_shorter_context_is_refused(tmp_path):
    model = tiny_model()
    model.config.max_position_embeddings = 128
    model.save_pretrained(tmp_path)
    tiny_tokenizer().hf.save_pretrained(tmp_path)
    student = make_agent()
    await student.initialize()
    with pytest.raises(ConfigurationError, match=r"set agent\.max_context_tokens to 128"):
        await load_teacher(DistillationSettings(teacher=str(tmp_path)), student)
    await student.close()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"loss_type": "gspo"}, "leave loss_type at dr_grpo"),
        ({"max_staleness": 1}, "set max_staleness to 0"),
        ({"max_resamples": 1}, "distillation.reward_weight above 0"),
        ({"temperature": 0.7, "teacher": "vllm:http://localhost:1"}, "scores at temperature 1 only"),
        (
            {"temperature_schedule": "adaptive", "teacher": "vllm:http://localhost:1"},
            "temperature_schedule to none",
        ),
        ({"teacher": " "}, "name a model, a run folder or vllm:URL"),
    ],
)
def test_what_cannot_be_is_one_line(settings, problem):
    teacher = settings.pop("teacher", "t")
    with pytest.raises(ConfigurationError, match=problem):
        TrainingConfig(distillation={"teacher": teacher}, **settings)


def test_a_model_s_card_does_not_bring_a_reference_beside_the_teacher():
    config = TrainingConfig(distillation={"teacher": "t"})
    found, applied = config.with_recommended({"beta": 0.02, "loss_type": "grpo", "learning_rate": 1e-3})
    assert (found.beta, found.loss_type, found.learning_rate) == (0.0, "dr_grpo", 1e-3)
    assert applied == {"learning_rate": 1e-3}
    asked, _ = TrainingConfig(distillation={"teacher": "t"}, beta=0.5).with_recommended({"beta": 0.02})
    assert asked.beta == 0.5
