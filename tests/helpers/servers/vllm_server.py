"""A server on loopback that speaks as vLLM's does, over a tiny model in this process, and misbehaves as told:
`from vllm_server import VLLMServer`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from aiohttp import web
from safetensors.torch import load_file

from stateset_agents.backends.grammars import library_version
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.messages import SamplingParams

__all__ = ["VLLMServer"]

Fault = Callable[[web.Request, dict[str, Any]], Any]
"""Answers a completion instead of the server; it gets what the server would have said."""


class VLLMServer:
    """Serves the model in a folder. The n-th completion meets the n-th fault."""

    def __init__(
        self, folder: Path, *faults: Fault | None, dev_mode: bool = True, masks: bool = True
    ) -> None:
        """`masks`: as with --return-sampling-mask."""
        self.folder = folder
        self.masks = masks
        self.faults = list(faults)
        self.dev_mode = dev_mode
        self.bodies: list[dict[str, Any]] = []
        self.calls: list[str] = []
        """Paths in the order they came, completions left out."""
        self.delay = 0.0
        self.live = 0
        self.live_at_reload: list[int] = []
        self.weight_version = "default"
        self.refuses_weights = False
        self.keeps_to_grammars = True

    @property
    def name(self) -> str:
        """As `load_backend` takes it."""
        return f"vllm:http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        await self._load()
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/inference/v1/generate", self._complete)
        app.router.add_get("/health", self._well)
        app.router.add_get("/v1/models", self._models)
        if self.dev_mode:
            for path in ("/pause", "/resume", "/reset_prefix_cache"):
                app.router.add_post(path, self._well)
            app.router.add_post("/collective_rpc", self._reload)
            app.router.add_post("/update_weight_version", self._rename)
            app.router.add_get("/weight_info", self._weight_info)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self.backend.close()

    async def restart(self) -> None:
        """As a process that died and was started again: it has the weights it began with."""
        await self.backend.close()
        await self._load()
        self.weight_version = "default"

    async def _load(self) -> None:
        model, tokenizer = load_model_and_tokenizer(str(self.folder), dtype="fp32")
        self.backend = HuggingFaceBackend(model, tokenizer, copy_model=False, scheduling="throughput")
        await self.backend.start()

    async def _well(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.json_response({"success": True})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "tiny", "root": str(self.folder), "max_model_len": self.backend.context_length}
        return web.json_response({"object": "list", "data": [card]})

    async def _reload(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        self.live_at_reload.append(self.live)
        if self.refuses_weights:
            return web.json_response({"error": {"message": "no memory"}}, status=400)
        body = await request.json()
        assert body["method"] == "reload_weights"
        weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        await self.backend.update_weights(weights, self.backend.version + 1)
        return web.json_response({"results": [None]})

    async def _rename(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        self.weight_version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.live += 1
        try:
            await asyncio.sleep(self.delay)
            answer = await (self._generate(body) if "token_ids" in body else self._answer(body))
            fault = self.faults[number] if number < len(self.faults) else None
            if fault is None:
                return web.json_response(answer)
            made = fault(request, answer)
            response: web.StreamResponse = await made if asyncio.iscoroutine(made) else made
            return response
        finally:
            self.live -= 1

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            stop_token_ids=tuple(body.get("stop_token_ids", ())),
            stop=tuple(body.get("stop", ())),
            stream=body.get("seed", 0),
        )
        if "structured_outputs" in body and self.keeps_to_grammars:
            grammar, stop_ids = body["structured_outputs"]["grammar"], params.stop_token_ids
            constraint = Constraint(
                grammar=grammar, kind="text", stop_ids=stop_ids, version=library_version()
            )
            params = replace(params, constraint=constraint)
        said = await self.backend.generate(body["prompt"], params)
        choice = {
            "index": 0,
            "text": said.message.content,
            "finish_reason": said.finish_reason,
            "token_ids": list(said.token_ids),
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": list(said.logprobs)},
        }
        if "prompt_logprobs" in body:
            ids = body["prompt"]
            scored = zip(ids[1:], await self.backend.score(ids), strict=True)
            choice["prompt_logprobs"] = [None, *({str(id): {"logprob": value}} for id, value in scored)]
        return json.loads(json.dumps({"object": "text_completion", "choices": [choice]}))

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """Tokens for tokens, as `GenerateResponse` of vLLM's entrypoints/scale_out/token_in_token_out."""
        fields = body["sampling_params"]
        assert fields["temperature"] > 0
        assert fields["top_k"] > 0
        params = SamplingParams(
            max_new_tokens=fields["max_tokens"],
            temperature=fields["temperature"],
            top_k=fields["top_k"],
            top_p=fields["top_p"],
            stop_token_ids=tuple(fields["stop_token_ids"]),
            stop=tuple(fields["stop"]),
            stream=fields["seed"],
            return_sampling_mask=True,
        )
        said = await self.backend.generate(body["token_ids"], params)
        assert said.sampling_mask is not None
        pairs = zip(said.token_ids, said.logprobs, strict=True)
        content = [{"token": f"token_id:{id}", "logprob": value, "top_logprobs": []} for id, value in pairs]
        choice = {
            "index": 0,
            "logprobs": {"content": content},
            "finish_reason": said.finish_reason,
            "token_ids": list(said.token_ids),
            "sampling_mask": [list(kept) for kept in said.sampling_mask.sets()] if self.masks else None,
        }
        return json.loads(json.dumps({"request_id": "1", "choices": [choice]}))
