"""A vLLM server as backend: token ids and log-probs over HTTP, new weights by a folder that it reads.

    vllm:http://127.0.0.1:8000                        a server on this machine
    vllm:http://node2:8000?weights=/mnt/shared        a server elsewhere; both machines see the folder

`stateset-agents engine MODEL` prints the command that starts one.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from stateset_agents.backends.base import EngineInfo, Session, Tokenizer, room_behind
from stateset_agents.backends.grammars import grammars_of, only_token
from stateset_agents.backends.pretrained.load_lock import load_in_thread
from stateset_agents.backends.tokenizers import TurnText
from stateset_agents.runtime.circuit_breakers import Breaker, admitted, retry, wait_before
from stateset_agents.runtime.tasks import ActiveWork
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message, SamplingMask, SamplingParams, VersionSpan

if TYPE_CHECKING:
    import aiohttp
    import torch
    from transformers import PreTrainedModel

    from stateset_agents.backends.linears import MatmulPrecision
    from stateset_agents.backends.tokenizers import HuggingFaceTokenizer


# --- requests, with retries of transient failures

_TRANSIENT = frozenset({408, 425, 429})
"""Statuses besides every 5xx after which the same request may succeed."""
_PATIENCE = 300.0
"""Seconds that requests wait for a server that is down."""


class VLLMClient:
    """Requests to one server; its API key is read from the variable VLLM_API_KEY."""

    def __init__(self, url: str, *, timeout: float = 600.0, attempts: int = 5, backoff: float = 0.5) -> None:
        """`timeout`: seconds of one attempt; `backoff`: of the first wait (exponential, with jitter)."""
        self.url = url
        self.num_retries = 0
        self.timeout = timeout
        """Seconds of one attempt."""
        self._attempts = attempts
        self._backoff = backoff
        self._session: aiohttp.ClientSession | None = None
        self._breaker = Breaker("vllm", failures=10, pause=5.0)

    async def open(self) -> None:
        """Get ready for requests; a second call does nothing."""
        import aiohttp

        if self._session is None:
            key = os.environ.get("VLLM_API_KEY")
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=aiohttp.ClientTimeout(total=self.timeout, sock_connect=10.0),
                connector=aiohttp.TCPConnector(limit=0),
            )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, once: bool = False
    ) -> Any:
        """The JSON of the server's answer, None for an empty one; `once`: without retries.

        After ten failed attempts in a row all requests wait, and one at a time tries if the server is up.

        Raises `Unreachable` if the server did not answer as a healthy one does, BackendError if it refused
        the request.
        """

        async def wait(failures: int, error: Exception) -> None:
            self.num_retries += 1
            _log.warning("asking the vLLM server again", error=str(error), attempt=failures)
            await asyncio.sleep(wait_before(failures, first=self._backoff, stream=self.num_retries))

        def is_final(error: Exception) -> bool:
            return not isinstance(error, Unreachable) or self._breaker.seconds_down > _PATIENCE

        async def behind_breaker(_: int) -> Any:
            async with admitted(self._breaker, patience=_PATIENCE, down=Unreachable) as call:
                try:
                    return await self._attempt(method, path, body)
                except Unreachable as error:
                    call.cause = str(error)
                    raise

        if once:
            return await self._attempt(method, path, body)
        return await retry(behind_breaker, times=self._attempts - 1, is_final=is_final, wait=wait)

    async def _attempt(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        import aiohttp

        if self._session is None:
            raise BackendError("the vLLM backend was not started: await backend.start() first")
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                text = await response.text()
        except TimeoutError as error:
            raise Unreachable(f"{self._at(path)} gave no answer within {self.timeout:g} s") from error
        except (aiohttp.ClientError, UnicodeDecodeError) as error:
            raise Unreachable(f"{self._at(path)}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            reason = f"{self._at(path)} answered with status {response.status}: {_message(text)}"
            if response.status >= 500 or response.status in _TRANSIENT:
                raise Unreachable(reason)
            raise BackendError(reason)
        if not text:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"{self._at(path)} answered with broken JSON: {text[-60:]!r}") from error

    def _at(self, path: str) -> str:
        return f"the vLLM server at {self.url} ({path.partition('?')[0]})"


class Unreachable(BackendError):
    """The server did not answer, or not as a healthy one; a retry may succeed."""


def _message(text: str) -> str:
    """The server's error message."""
    try:
        data = json.loads(text)
        return str(data["error"]["message"] if "error" in data else data["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{' '.join(text.split())!r:.200}"


def sampled(choice: Mapping[str, Any], limit: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and log-probs of a choice. Raises BackendError if they cannot be those of one turn."""
    try:
        ids = tuple(map(int, choice["token_ids"]))
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError("the vLLM server answered without token ids or their log-probs") from error
    if not 0 < len(ids) == len(logprobs) <= limit:
        raise BackendError(
            f"the vLLM server gave {len(ids)} tokens and {len(logprobs)} log-probs for at most {limit}"
        )
    if not all(-math.inf < value < 1e-3 for value in logprobs):  # rounding may go a little above 0
        raise BackendError("the vLLM server answered with log-probs that are not finite or above 0")
    return ids, logprobs


def sampling_mask(choice: Mapping[str, Any], ids: Sequence[int]) -> SamplingMask:
    """What top-k and top-p kept, [tokens][ids] in the choice. Raises BackendError where that is no such list,
    or a sampled token is outside its set."""
    try:
        mask = SamplingMask.of(choice["sampling_mask"])
    except (TypeError, OverflowError) as error:
        raise BackendError("the vLLM server answered with a sampling mask that is no list of ids") from error
    mask.expect(ids)
    return mask


# --- folders with new weights, one for each version


class WeightFolders:
    """Folders of safetensors inside a shared folder, or inside a temporary one, which `close` removes."""

    def __init__(self, shared: Path | None) -> None:
        self._shared = shared
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def write(self, weights: Mapping[str, torch.Tensor], name: str) -> Path:
        """Write the folder `name` atomically. Raises BackendError if the disk cannot take it."""
        from stateset_agents.backends.tensor_files import write_tensors

        folder = self._parent() / name
        part = folder.with_name(f"{name}.part")
        try:
            part.mkdir(parents=True, exist_ok=True)
            write_tensors(part / "model.safetensors", weights)
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        except OSError as error:
            raise BackendError(f"cannot write weights to {folder}: {error.strerror or error}") from error
        return folder

    def forget(self, folder: Path) -> None:
        """Remove a folder that `write` made; other folders are kept."""
        if folder.parent == self._parent():
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _parent(self) -> Path:
        if self._shared is not None:
            return self._shared
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="stateset-weights-")
        return Path(self._temporary.name)


_log = get_logger(__name__)
_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Sampling parameters that leave the distribution as it is; left out they would get the values of the model's
generation_config.json."""
_CHECK_SECONDS = 5.0
"""Interval at which the server is asked whether it still has our weights."""
_HEALTH_SECONDS = 5.0


Shared = tuple[str, int, Path | None]
"""(name of the owner of the weights, version, folder that the server loaded)."""


class VLLMBackend:
    """Generates on a server; made by `connect`.

    Every request has the policy version as its cache salt, so that a prefix cached with older weights is
    never reused. An update waits for the requests under way, so that a turn has one version. The server
    stores the name of the version (`/weight_info`). A server that lost it, for example by a restart, gets
    the weights again.
    """

    def __init__(
        self,
        client: VLLMClient,
        tokenizer: HuggingFaceTokenizer,
        *,
        model: str,
        served_as: str,
        context_length: int,
        weights: Path | None = None,
    ) -> None:
        """`model`: the folder or hub name that the server serves as `served_as`; `weights`: the folder for
        new weights, a temporary one of this machine if None."""
        self.tokenizer: Tokenizer = tokenizer
        self.context_length = context_length
        self.version = 0
        self.recommended: Mapping[str, Any] = {}
        self.trained_tokens: frozenset[int] | None = None
        self.is_exact = False
        """Another engine computes its log-probs: the update computes them again, and logs the difference."""
        self.is_repeatable = False
        """The server decides which requests share a batch."""
        self.matmul_precision: MatmulPrecision = "highest"
        """Unused: the server has its own precision."""
        self._client = client
        self._model = model
        self._served_as = served_as
        self._folders = WeightFolders(weights)
        self._name = secrets.token_hex(6)
        """Separates our versions and cache from those of other users of the server."""
        self._current: Path | None = None
        """The folder of the weights in use; None for the server's initial weights."""
        self._checked = -math.inf
        """Time at which the server last had the right weights, by `time.monotonic`."""
        self._gate = asyncio.Lock()
        self._active = ActiveWork()
        """The requests under way; those that hang while weights change are cut."""
        self._counts = {"requests": 0, "prompt_tokens": 0, "sampled_tokens": 0, "refreshes": 0}

    @property
    def running(self) -> EngineInfo:
        """The engine, for the log."""
        return EngineInfo(name="vllm", why=f"the server at {self._client.url}", linears="the server's")

    def master_model(self) -> PreTrainedModel:
        """The model to train, in fp32, loaded from what the server serves. Blocking."""
        from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer

        model, _ = load_model_and_tokenizer(self._model, dtype="fp32")
        model.requires_grad_(True)
        return model

    def model_to_quantize(self) -> PreTrainedModel:
        """The model in fp32, for the server's own is not in this process. Blocking."""
        return self.master_model()

    async def start(self) -> None:
        """Connect. Raises BackendError if the server is not healthy."""
        await self._client.open()
        try:
            await self._client.ask("GET", "/health")
        except BaseException:
            await self._client.close()
            raise

    async def close(self) -> None:
        """Disconnect; the server keeps running with its weights."""
        await self._client.close()
        self._folders.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: Session | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Completion:
        """Sample one turn; `on_text` gets its complete text in one piece.

        Raises BackendError if the prompt fills the context, and for an invalid answer or none.
        """
        limit = min(params.max_new_tokens, room_behind(prompt_ids, self.context_length))
        if limit < 1 or not prompt_ids:
            raise BackendError(f"nothing can be sampled: {limit} tokens behind {len(prompt_ids)} of prompt")
        sampling = {
            **_NEUTRAL,
            "max_tokens": limit,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            "seed": params.stream % 2**63,
            "stop": list(params.stop),
            "stop_token_ids": list(params.stop_token_ids),
            "skip_special_tokens": params.skip_special_tokens,
            "logprobs": 0,
        }
        if params.constraint is not None:
            if params.constraint.raised is not None:
                raise ConfigurationError(
                    "vLLM's logit_bias holds for all tokens of a reply, and call_bias for its beginning: "
                    "leave call_bias at 0, or train a model in this process"
                )
            sampling["structured_outputs"] = {"grammar": params.constraint.grammar}
        async with self._request():
            if params.carries_mask:
                choice = await self._complete_with_mask(sampling, prompt_ids)
            else:
                choice = await self._complete({**self._common(prompt_ids), **sampling}, prompt_ids)
            version = self.version
        ids, logprobs = sampled(choice, limit)
        mask = sampling_mask(choice, ids) if params.carries_mask else None
        self._counts["sampled_tokens"] += len(ids)
        text = TurnText(
            self.tokenizer,
            params.stop,
            on_text,
            end_ids={*params.stop_token_ids, *self.tokenizer.eos_ids},
            skip_special_tokens=params.skip_special_tokens,
        )
        return Completion(
            message=Message(role="assistant", content=text.finish(ids)),
            prompt_ids=tuple(prompt_ids),
            token_ids=ids,
            logprobs=logprobs,
            finish_reason="length" if choice["finish_reason"] == "length" else "stop",
            version_spans=(VersionSpan(version, 0, len(ids)),),
            constraint=params.constraint,
            stop=text.stopped_by,
            forced=await self._forced(params, ids),
            sampling_mask=mask,
        )

    async def _forced(self, params: SamplingParams, ids: Sequence[int]) -> tuple[bool, ...]:
        """[T] which tokens the grammar forced. Raises BackendError for one that our llguidance forbids."""
        if params.constraint is None:
            return ()
        masks = await asyncio.to_thread(grammars_of(self.tokenizer).replay, params.constraint, ids)
        return tuple(only_token(mask) is not None for mask in masks)

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """[T-1] log-probs of `ids[1:]`; the server computes them at temperature 1 only."""
        if temperature != 1.0:
            raise BackendError(f"a vLLM server scores at temperature 1 only, got {temperature!r}")
        body = {**self._common(ids), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        async with self._request():
            choice = await self._complete(body, ids)
        by_position: Any = choice.get("prompt_logprobs")
        try:
            return [
                float(logprobs[str(token)]["logprob"])
                for token, logprobs in zip(ids[1:], by_position[1:], strict=True)
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise BackendError(f"the vLLM server gave no log-prob for each of {len(ids)} tokens") from error

    async def fork(self, session: Session, into: Session) -> None:
        """A no-op: the server's prefix cache shares equal prefixes."""

    async def release(self, session: Session) -> None:
        """A no-op: the server evicts the least recently used prefixes."""

    async def sleep(self) -> None:
        """A no-op: the server manages its memory."""

    def weights_in_use(self) -> Shared:
        """The values that another process needs to use the same weights of the server."""
        return self._name, self.version, self._current

    def follow(self, shared: Shared) -> None:
        """Use the weights that another process has loaded into the server."""
        self._name, self.version, self._current = shared
        self._checked = time.monotonic()

    async def update_weights(self, source: Mapping[str, torch.Tensor] | Path, version: int) -> None:
        """Write the weights where the server reads them, and let it load them.

        Raises BackendError if that fails, ConfigurationError if the server does not offer it.
        """
        async with self._gate:
            await self._drain()
            before = self._current
            if isinstance(source, Path):
                self._current = await asyncio.to_thread(source.absolute)
            else:
                name = f"{self._name}-{version}"
                self._current = await asyncio.to_thread(self._folders.write, source, name)
            self.version = version
            await self._refresh()
            if before is not None and before != self._current:
                await asyncio.to_thread(self._folders.forget, before)

    async def check_health(self) -> None:
        """Raises BackendError (`Unreachable`, for it may come back) if the server is not healthy."""
        try:
            async with asyncio.timeout(_HEALTH_SECONDS):
                await self._client.ask("GET", "/health", once=True)
        except TimeoutError as error:
            raise Unreachable(f"the vLLM server gave no sign of health in {_HEALTH_SECONDS:g} s") from error

    def counts(self) -> Mapping[str, int]:
        """Requests, tokens read and sampled, refreshes and retries since the start."""
        return {**self._counts, "retries": self._client.num_retries}

    def participate(self) -> AbstractContextManager[None]:
        """A no-op: the server batches requests as they come."""
        return nullcontext()

    # -------------------------------------------------------------------------------------- requests

    def _common(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """Fields of all completions."""
        return {
            "model": self._served_as,
            "prompt": list(prompt_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            "add_special_tokens": False,
            **_NEUTRAL,
            "cache_salt": self._tag,
        }

    @property
    def _tag(self) -> str:
        """The name of the weights in use."""
        return f"{self._name}-{self.version}"

    @asynccontextmanager
    async def _request(self) -> AsyncIterator[None]:
        """A request under way: an update waits for its end, and none begins while the weights change."""
        cut = partial(BackendError, "the vLLM server's new weights waited too long for a turn's end")
        async with AsyncExitStack() as request:
            async with self._gate:
                await self._check_weights()
                await request.enter_async_context(self._active.under_way(cut))
            yield

    async def _drain(self) -> None:
        """Wait for the requests under way; one that takes longer than the client's timeout fails."""
        try:
            await asyncio.wait_for(self._active.ended(), self._client.timeout)
        except TimeoutError:
            self._active.cut()
            await self._active.ended()

    async def _complete(self, body: Mapping[str, Any], prompt_ids: Sequence[int]) -> dict[str, Any]:
        """The completion's only choice."""
        choice = await self._choice("/v1/completions", body, prompt_ids)
        if list(choice.get("prompt_token_ids") or ()) != list(prompt_ids):
            raise BackendError(
                "the server read other tokens than it got: it needs return_token_ids (vLLM 0.11 or newer)"
            )
        return choice

    async def _complete_with_mask(
        self, sampling: Mapping[str, Any], prompt_ids: Sequence[int]
    ) -> dict[str, Any]:
        """The only choice of vLLM's endpoint of tokens for tokens: it alone returns sampling masks. Log-probs
        stand where a completion has them. Raises ConfigurationError where the server returns no masks."""
        if not sampling["top_k"]:
            raise ConfigurationError(
                f"vLLM needs a top_k beside top_p {sampling['top_p']}: set AgentConfig.top_k to 512, say"
            )
        body = {"model": self._served_as, "token_ids": list(prompt_ids), "cache_salt": self._tag}
        choice = await self._choice(
            "/inference/v1/generate", {**body, "sampling_params": sampling}, prompt_ids
        )
        if choice.get("sampling_mask") is None:
            raise ConfigurationError(
                "the vLLM server returns no sampling masks, without which top_k and top_p cannot be trained: "
                "start it with --return-sampling-mask, or leave AgentConfig.top_k and top_p out"
            )
        try:
            values = [item["logprob"] for item in choice["logprobs"]["content"]]
        except (KeyError, TypeError):
            values = []  # which `sampled` refuses
        return {**choice, "logprobs": {"token_logprobs": values}}

    async def _choice(self, path: str, body: Mapping[str, Any], prompt_ids: Sequence[int]) -> dict[str, Any]:
        """The answer's only choice. After a retry the server may have restarted: its weights are checked."""
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(prompt_ids)
        before = self._client.num_retries
        data = await self._client.ask("POST", path, body)
        if self._client.num_retries != before and self._current is not None:
            name = await self._weights_name()
            if name != self._tag:
                self._checked = -math.inf
                raise BackendError(
                    f"the vLLM server failed and came back with other weights ({name!r}, not {self._tag!r}): "
                    "what it said since is thrown away, and the next turn hands them over again"
                )
        try:
            (choice,) = data["choices"]
            reason = choice["finish_reason"]
        except (KeyError, TypeError, ValueError) as error:
            raise BackendError(f"the vLLM server answered {json.dumps(data)[:160]}, no completion") from error
        if reason not in ("stop", "length"):
            raise BackendError(f"the vLLM server ended a turn by {reason!r}")
        return dict(choice)

    # --------------------------------------------------------------------------------------- weights

    async def _check_weights(self) -> None:
        """Load our weights again if the server has others."""
        now = time.monotonic()
        if self._current is None or now - self._checked < _CHECK_SECONDS:
            return
        name = await self._weights_name()
        if name != self._tag:
            _log.warning(
                "the vLLM server has other weights than it was given, and gets them again",
                has=name,
                expected=self._tag,
            )
            await self._drain()
            await self._refresh()
        self._checked = now

    async def _weights_name(self) -> Any:
        data = await self._ask_for_update("GET", "/weight_info")
        return data.get("weight_version") if isinstance(data, Mapping) else None

    async def _refresh(self) -> None:
        """Load the current folder. The name is set last, so that an incomplete update is noticed."""
        self._counts["refreshes"] += 1
        await self._ask_for_update("POST", "/pause?mode=wait")
        try:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(self._current)}}
            await self._ask_for_update("POST", "/collective_rpc", body)
            await self._ask_for_update("POST", "/reset_prefix_cache")
            await self._ask_for_update("POST", "/update_weight_version", {"new_version": self._tag})
        finally:
            await self._ask_for_update("POST", "/resume")
        self._checked = time.monotonic()

    async def _ask_for_update(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            return await self._client.ask(method, path, body)
        except Unreachable:
            raise
        except BackendError as error:
            if "status 404" not in str(error):
                raise
            raise ConfigurationError(
                f"the vLLM server at {self._client.url} takes no new weights: start it with "
                "VLLM_SERVER_DEV_MODE=1 and vLLM 0.32 or newer (stateset-agents engine MODEL prints the "
                "command)"
            ) from error


async def connect(address: str) -> VLLMBackend:
    """The backend of a server, from `URL` or `URL?weights=FOLDER`; its model's tokenizer is loaded here.

    Raises ConfigurationError for an invalid URL, a folder that does not exist, and a model whose tokenizer
    cannot be loaded here; BackendError if the server does not answer.
    """
    from stateset_agents.backends.pretrained.loading import (
        load_tokenizer,
        model_folder,
        recommended_settings,
        trained_tokens,
    )

    parts = urlsplit(address)
    query = parse_qs(parts.query)
    weights = Path(query["weights"][-1]) if "weights" in query else None
    if parts.scheme not in ("http", "https") or not parts.hostname or query.keys() - {"weights"}:
        raise ConfigurationError(
            f"the vllm backend needs a server's URL, got {address!r:.80}: write vllm:http://127.0.0.1:8000, "
            "and ?weights=FOLDER after it where the server is on another machine"
        )
    if weights is not None and not weights.is_dir():
        raise ConfigurationError(f"weights folder {str(weights)!r} does not exist: make it, on both machines")
    client = VLLMClient(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}")
    await client.open()
    try:
        data = await client.ask("GET", "/v1/models", once=True)
    except Unreachable as error:
        raise BackendError(
            f"{error}; start one with the command that stateset-agents engine prints"
        ) from error
    finally:
        await client.close()
    try:
        served = data["data"][0]
        name, root, length = str(served["id"]), str(served["root"]), int(served["max_model_len"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BackendError(f"{client.url} is no vLLM server: /v1/models says {data!r:.120}") from error
    tokenizer = await load_in_thread(partial(load_tokenizer, root))
    backend = VLLMBackend(
        client, tokenizer, model=root, served_as=name, context_length=length, weights=weights
    )
    folder = model_folder(root)
    backend.recommended, backend.trained_tokens = recommended_settings(folder), trained_tokens(folder)
    return backend
