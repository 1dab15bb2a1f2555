"""The vLLM backend against a server on loopback that speaks its language, well or badly."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from aiohttp import web
from chat_server import ChatServer, cut, status
from tiny_models import tiny_model, tiny_tokenizer
from tiny_training import even_share, make_environment, make_trainer, snapshot
from vllm_server import VLLMServer

from stateset_agents.backends.grammars import library_version
from stateset_agents.backends.loading import load_backend
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.vllm import VLLMClient
from stateset_agents.cli.main import main
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.runtime.circuit_breakers import Breaker
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.update.batch import Sample
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.messages import SamplingParams
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn

PROMPT = (72, 105, 33)
PARAMS = SamplingParams(max_new_tokens=6, stop_token_ids=(257,), stream=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    tiny_tokenizer().hf.save_pretrained(path)
    return path


@asynccontextmanager
async def speaking(folder, *faults, **options):
    """A server and a started backend."""
    async with VLLMServer(folder, *faults, **options) as server:
        backend = await load_backend(server.name)
        backend._client._backoff = 0.01
        await backend.start()
        try:
            yield server, backend
        finally:
            await backend.close()


def other_weights():
    return tiny_model(seed=1).state_dict()


async def test_a_turn_is_what_the_same_model_samples_in_this_process(folder):
    async with speaking(folder) as (_, backend):
        assert backend.context_length == 256
        completion = await backend.generate(PROMPT, PARAMS)
        scored = await backend.score([*PROMPT, *completion.token_ids])
    local = HuggingFaceBackend(tiny_model(), tiny_tokenizer(), copy_model=False)
    await local.start()
    expected = await local.generate(PROMPT, PARAMS)
    await local.close()
    assert completion.token_ids == expected.token_ids
    assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert scored[2:] == pytest.approx(completion.logprobs, abs=1e-4)
    assert (completion.message, completion.finish_reason) == (expected.message, expected.finish_reason)
    assert completion.prompt_ids == PROMPT


async def test_requests_say_all_that_a_model_s_own_defaults_would_change(folder):
    async with speaking(folder) as (server, backend):
        await backend.generate(PROMPT, PARAMS)
        body = server.bodies[0]
    assert body["prompt"] == list(PROMPT)
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (1.0, 1.0, 0, 0.0)
    assert body["skip_special_tokens"] is True
    assert (body["repetition_penalty"], body["presence_penalty"], body["seed"]) == (1.0, 0.0, 5)
    assert (body["logprobs"], body["return_token_ids"], body["stop_token_ids"]) == (0, True, [257])


TRUNCATED = SamplingParams(
    max_new_tokens=6, stop_token_ids=(257,), stream=5, top_k=9, top_p=0.8, return_sampling_mask=True
)


async def test_a_grammar_goes_over_the_wire_and_what_it_forbids_is_an_error(folder):
    constraint = Constraint(
        grammar='start: /[a-c]{1,4}/ "!"', kind="text", stop_ids=(257,), version=library_version()
    )
    params = replace(PARAMS, max_new_tokens=9, constraint=constraint)
    async with speaking(folder) as (server, backend):
        said = await backend.generate(PROMPT, params)
        assert re.fullmatch("[a-c]{1,4}!", said.message.content)
        assert server.bodies[-1]["structured_outputs"] == {"grammar": constraint.grammar}
        assert said.constraint == constraint
        assert said.forced[-1]  # the end
        assert said.logprobs[-1] == 0.0
        with pytest.raises(ConfigurationError, match=r"call_bias for its beginning: leave call_bias at 0"):
            await backend.generate(
                PROMPT, replace(params, constraint=replace(constraint, raised=((3,), 1.0)))
            )
        server.keeps_to_grammars = False
        with pytest.raises(BackendError, match="where its grammar forbids it"):
            await backend.generate(PROMPT, params)


async def test_sampling_masks_come_over_the_wire_and_train_as_in_process(folder):
    async with speaking(folder) as (server, backend):
        served = await backend.generate(PROMPT, TRUNCATED)
        sent = server.bodies[0]
    assert sent["token_ids"] == list(PROMPT)
    assert (sent["sampling_params"]["top_k"], sent["sampling_params"]["top_p"]) == (9, 0.8)
    assert sent["sampling_params"]["min_p"] == 0.0
    local = HuggingFaceBackend(tiny_model(), tiny_tokenizer(), copy_model=False)
    await local.start()
    sampled = await local.generate(PROMPT, TRUNCATED)
    await local.close()
    assert served.token_ids == sampled.token_ids
    assert served.sampling_mask == sampled.sampling_mask
    assert all(0 < count <= 9 for count in served.sampling_mask.counts)
    updates = []
    for completion in (served, sampled):
        trajectory = Trajectory(
            scenario=Scenario(id="s"), turns=(Turn(prompt_ids=PROMPT, completion=completion),)
        )
        learner = Learner(tiny_model(), TrainingConfig(beta=0.0), num_steps=9, exact_logprobs=True)
        advantages = (1.0,) * len(completion.token_ids)
        metrics = learner.update([Sample(trajectory=trajectory, advantages=advantages)], step=0)
        assert metrics["policy/first_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        updates.append(learner.weights())
    assert all(torch.allclose(updates[0][name], updates[1][name]) for name in updates[0])


async def test_a_server_without_sampling_masks_is_told_how_to_start(folder):
    async with speaking(folder, masks=False) as (_, backend):
        with pytest.raises(ConfigurationError, match="start it with --return-sampling-mask"):
            await backend.generate(PROMPT, TRUNCATED)
        with pytest.raises(ConfigurationError, match=r"a top_k beside top_p 0\.8"):
            await backend.generate(PROMPT, replace(TRUNCATED, top_k=0))
        await backend.generate(PROMPT, replace(TRUNCATED, temperature=0.0))  # greedy turns have none


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1]] * 6, r"the sampled token \d+ at place 0 is outside the 1 that top-k and top-p kept"),
        ([[1]], "a sampling mask of 1 tokens came with"),
        ([["a"]] * 6, "no list of ids"),
        ([[2**40]] * 6, "no list of ids"),
    ],
)
async def test_a_sampling_mask_that_is_none_is_an_error(folder, mask, message):
    async with speaking(folder, changed(sampling_mask=mask)) as (_, backend):
        with pytest.raises(BackendError, match=message):
            await backend.generate(PROMPT, TRUNCATED)


def changed(**fields):
    """A fault that answers with other fields in its choice."""

    def fault(request, answer):
        choice = {**answer["choices"][0], **fields}
        return web.json_response({**answer, "choices": [choice]})

    return fault


def faulty(fault):
    return lambda request, answer: fault(request)


@pytest.mark.parametrize(
    "fault",
    [
        faulty(status(500, "boom")),
        faulty(status(503)),
        faulty(status(429)),
        faulty(cut),
        lambda request, answer: web.Response(text=json.dumps(answer)[:-40]),
    ],
    ids=["500", "503", "429", "dropped connection", "truncated JSON"],
)
async def test_what_may_mend_itself_is_asked_again(folder, fault):
    async with speaking(folder, fault, fault) as (server, backend):
        completion = await backend.generate(PROMPT, PARAMS)
        assert len(completion.token_ids) > 0
        assert len(server.bodies) == 3
        assert backend.counts()["retries"] == 2


async def test_requests_wait_together_while_the_server_is_down():
    async with ChatServer(None, *[status(503)] * 6) as server:
        client = VLLMClient(server.url, attempts=9, backoff=0.001)
        client._breaker = Breaker("vllm", failures=4, pause=0.05)
        await client.open()
        body = {"messages": [{"role": "user", "content": "hi"}]}
        ask = partial(client.ask, "POST", "/chat/completions", body)
        await ask()
        await asyncio.gather(*(ask() for _ in range(4)))
        await client.close()
    # the four fail together; then two ask one at a time in vain, and the third try is answered, and all are
    assert len(server.bodies) == 1 + 4 + 2 + 4


async def test_a_slow_answer_is_asked_again_and_at_last_given_up(folder):
    async with speaking(folder) as (server, backend):
        server.delay = 30.0
        backend._client._attempts = 2
        await backend._client.close()
        backend._client.timeout = 0.2
        await backend._client.open()
        with pytest.raises(BackendError, match=r"gave no answer within 0\.2 s"):
            await backend.generate(PROMPT, PARAMS)
        assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (changed(token_ids=[1, 2]), "2 tokens and"),
        (changed(token_ids=[1] * 7, logprobs={"token_logprobs": [-1.0] * 7}), "at most 6"),
        (changed(token_ids=[], logprobs={"token_logprobs": []}), "0 tokens"),
        (changed(token_ids=None), "without token ids"),
        (changed(token_ids=[1], logprobs={"token_logprobs": [None]}), "without token ids"),
        (changed(token_ids=[1], logprobs={"token_logprobs": [0.5]}), "above 0"),
        (changed(prompt_token_ids=[1, *PROMPT]), "read other tokens than it got"),
        (changed(prompt_token_ids=None), "return_token_ids"),
        (changed(finish_reason="abort"), "ended a turn by 'abort'"),
        (lambda request, answer: web.json_response({"choices": []}), "no completion"),
        (
            lambda request, answer: web.json_response({"error": {"message": "too long"}}, status=400),
            "status 400: too long",
        ),
    ],
)
async def test_a_wrong_answer_is_an_error_at_once(folder, fault, words):
    async with speaking(folder, fault) as (server, backend):
        with pytest.raises(BackendError, match=re.escape(words)):
            await backend.generate(PROMPT, PARAMS)
        assert len(server.bodies) == 1
        await backend.generate(PROMPT, PARAMS)


async def test_new_weights_change_the_answers_their_version_and_the_cache_s_salt(folder, tmp_path):
    async with speaking(folder) as (server, backend):
        before = await backend.generate(PROMPT, PARAMS)
        await backend.update_weights(other_weights(), 3)
        after = await backend.generate(PROMPT, PARAMS)
        salts = [body["cache_salt"] for body in server.bodies]
        steps = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
        assert server.calls[-5:] == steps
        assert (before.versions[0], after.versions[0], backend.version) == (0, 3, 3)
        assert before.token_ids != after.token_ids
        assert salts[0] != salts[1]
        assert server.weight_version == salts[1]
        folder_of_3 = backend._current
        await backend.update_weights(tiny_model().state_dict(), 4)
        again = await backend.generate(PROMPT, PARAMS)
        assert again.token_ids == before.token_ids
        assert not folder_of_3.exists()
    assert not backend._current.exists()


async def test_a_shared_folder_is_used_where_one_is_given(folder, tmp_path):
    async with VLLMServer(folder) as server:
        backend = await load_backend(f"{server.name}?weights={tmp_path}")
        await backend.start()
        await backend.update_weights(other_weights(), 1)
        assert [path.name for path in tmp_path.iterdir()] == [server.weight_version]
        await backend.close()


async def test_an_update_waits_for_turns_and_turns_for_an_update(folder):
    async with speaking(folder) as (server, backend):
        server.delay = 0.2
        turns = [asyncio.create_task(backend.generate(PROMPT, PARAMS)) for _ in range(3)]
        while server.live < 3:  # noqa: ASYNC110  # the server tells
            await asyncio.sleep(0.01)
        update = asyncio.create_task(backend.update_weights(other_weights(), 1))
        await asyncio.sleep(0.01)
        later = asyncio.create_task(backend.generate(PROMPT, PARAMS))
        completion = await asyncio.gather(*turns)
        await update
        assert server.live_at_reload == [0]
        assert [turn.versions[0] for turn in completion] == [0, 0, 0]
        assert (await later).versions[0] == 1


async def test_a_turn_that_hangs_fails_and_holds_up_neither_an_update_nor_other_turns(folder):
    async with speaking(folder) as (server, backend):
        server.delay = 30.0
        hanging = asyncio.create_task(backend.generate(PROMPT, PARAMS))
        while not server.bodies:  # noqa: ASYNC110  # the server tells
            await asyncio.sleep(0.01)
        server.delay = 0.0
        backend._client.timeout = 0.1  # the session was opened with another
        update = asyncio.create_task(backend.update_weights(other_weights(), 1))
        await asyncio.sleep(0)
        later = asyncio.create_task(backend.generate(PROMPT, PARAMS))
        with pytest.raises(BackendError, match="waited too long for a turn's end"):
            await asyncio.wait_for(hanging, 20)
        await asyncio.wait_for(update, 20)
        assert (await asyncio.wait_for(later, 20)).versions[0] == 1


async def test_a_server_that_lost_the_weights_gets_them_again(folder, monkeypatch):
    async with speaking(folder) as (server, backend):
        await backend.update_weights(other_weights(), 1)
        trained = await backend.generate(PROMPT, PARAMS)
        await server.restart()
        monkeypatch.setattr("stateset_agents.backends.vllm._CHECK_SECONDS", 0.0)
        assert (await backend.generate(PROMPT, PARAMS)).token_ids == trained.token_ids
        assert backend.counts()["refreshes"] == 2


async def test_what_a_restarted_server_says_in_the_middle_of_a_turn_is_thrown_away(folder):
    async def restarts(request, answer):
        await server.restart()
        return web.Response(status=502)

    async with speaking(folder) as (server, backend):
        await backend.update_weights(other_weights(), 1)
        server.faults = [restarts]
        with pytest.raises(BackendError, match="came back with other weights"):
            await backend.generate(PROMPT, PARAMS)
        await backend.generate(PROMPT, PARAMS)
        assert server.weight_version == server.bodies[-1]["cache_salt"]
        local = HuggingFaceBackend(tiny_model(seed=1), tiny_tokenizer(), copy_model=False)
        await local.start()
        assert (await backend.generate(PROMPT, PARAMS)).token_ids == (
            await local.generate(PROMPT, PARAMS)
        ).token_ids
        await local.close()


async def test_a_server_that_takes_no_weights_says_so_and_answers_all_the_same(folder):
    async with speaking(folder, dev_mode=False) as (_, backend):
        await backend.generate(PROMPT, PARAMS)
        with pytest.raises(ConfigurationError, match="VLLM_SERVER_DEV_MODE=1"):
            await backend.update_weights(other_weights(), 1)


async def test_weights_that_are_refused_are_an_error_and_generation_goes_on(folder):
    async with speaking(folder) as (server, backend):
        server.refuses_weights = True
        with pytest.raises(BackendError, match="status 400: no memory"):
            await backend.update_weights(other_weights(), 1)
        assert server.calls[-1] == "/resume"


async def test_a_prompt_without_room_is_refused_here(folder):
    async with speaking(folder) as (server, backend):
        with pytest.raises(BackendError, match="256 tokens and the context holds 256"):
            await backend.generate([1] * 256, PARAMS)
        with pytest.raises(BackendError, match="temperature 1 only"):
            await backend.score([1, 2], temperature=0.5)
        assert server.bodies == []


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("vllm:", ConfigurationError, "write vllm:http://127.0.0.1:8000"),
        ("vllm:Qwen/Qwen3-0.6B", ConfigurationError, "write vllm:http://127.0.0.1:8000"),
        ("vllm:http://127.0.0.1:8000?wieghts=/x", ConfigurationError, "write vllm:http://127.0.0.1:8000"),
        ("vllm:http://127.0.0.1:8000?weights=/no/such", ConfigurationError, "does not exist"),
        ("vllm:http://127.0.0.1:9", BackendError, "stateset-agents engine"),
    ],
)
async def test_an_address_that_leads_nowhere_is_told(name, kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        await load_backend(name)


async def test_training_samples_from_the_server_with_the_weights_it_trains(folder, tmp_path):
    async with VLLMServer(folder) as server:
        agent = MultiTurnAgent(AgentConfig(model_name=server.name, chat_template="plain", max_new_tokens=3))
        trainer = make_trainer(tmp_path, agent=agent, environment=make_environment(), reward=even_share)
        await trainer.train()
        weights = {name: value for name, value in snapshot(trainer).items() if " " not in name}
        on_server = server.backend.model.state_dict()
        assert all(torch.equal(on_server[name], value) for name, value in weights.items())
        versions = [set(rollout.versions) - {-1} for rollout in RunLog(trainer.run).rollouts("train")]
        await trainer.close()
        await agent.close()
    assert sorted(map(tuple, versions)) == [(0,)] * 8 + [(1,)] * 8 + [(2,)] * 8
    summary = json.loads(trainer.run.summary.read_text())
    assert summary["deterministic"] is False


async def test_deterministic_scheduling_is_refused(folder, tmp_path):
    async with VLLMServer(folder) as server:
        agent = MultiTurnAgent(AgentConfig(model_name=server.name, chat_template="plain"))
        trainer = make_trainer(tmp_path, agent=agent, scheduling="deterministic")
        with pytest.raises(ConfigurationError, match="needs a model in this process"):
            await trainer.initialize()
        await agent.close()


def test_the_engine_verb_prints_a_command_that_serves_the_model(folder, capsys):
    assert main(["engine", str(folder), "--port", "8123"]) == 0
    command, then = capsys.readouterr().out.splitlines()
    words = shlex.split(command)
    assert words[:4] == ["VLLM_SERVER_DEV_MODE=1", "vllm", "serve", str(folder)]
    assert words[4:8] == ["--host", "127.0.0.1", "--port", "8123"]
    assert "processed_logprobs" in words
    assert words[words.index("--structured-outputs-config.backend") + 1] == "guidance"
    assert then == "# then: model_name: vllm:http://127.0.0.1:8123"
    assert main(["engine", "vllm:http://127.0.0.1:8000"]) == 1
    assert "is a server" in capsys.readouterr().err
