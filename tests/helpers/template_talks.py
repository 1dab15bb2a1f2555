"""Conversations as models of TRL's templates, or of ours, would have them: `from template_talks import play`.

Replies are forced, so that prompts can be compared with what the template itself renders: `full_render` gives
a conversation to `apply_chat_template` in OpenAI's shape, without any code of ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chat_templates import OURS, TRL_WITH_HIDDEN_TOOLS, TRL_WITH_TOOLS, trl_template

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.base import Session, Tokenizer
from stateset_agents.backends.tokenizers import TurnText
from stateset_agents.core.environment import Observation
from stateset_agents.core.rollout.episode import EpisodeSeeds, run_episode
from stateset_agents.types.messages import Completion, SamplingParams, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory

__all__ = [
    "LOOK",
    "ROWS",
    "SHOW_NO_CALLS",
    "Exchange",
    "TalkEnvironment",
    "end_of",
    "fitting",
    "full_render",
    "opening_of",
    "play",
    "ragged_talk",
    "rows_of_talks",
    "sane_talk",
    "squeezed",
    "thoughtless_talk",
    "tools_of",
    "written",
]

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {
                "at": {"type": "string", "description": "Where."},
                "times": {"type": "integer", "description": "How often."},
            },
            "required": ["at"],
        },
    },
}
_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that read content as a list of parts, by how their names begin."""
_WITHOUT_SYSTEM = ("gemma", "gemma_training")
_READ_THOUGHTS = (
    *("diffusion_gemma", "gemma4", "glm4moe", "gptoss", "lfm2_2_5", "muse_glimmer", "nemotron", "qwen3"),
)
_READ_NO_THOUGHTS = ("gemma4_v2", "qwen3_instruct", "qwen3_vl")
"""Templates with a field for thoughts, and those among them without, by how their names begin; the others
get thoughts back in the content, as they were sampled."""
_WITHOUT_THOUGHTS = ("qwen3_5_nothink",)
"""Their prompt has closed the thought."""
_GEMMA_4_WITHOUT_THOUGHTS = ("gemma4", "gemma4_v3", "gemma4_v4")
"""They show no thought beside words."""
SHOW_NO_CALLS = (*TRL_WITH_HIDDEN_TOOLS, "lfm2", "lfm2_training")
"""They get calls back in the content."""
_ONE_CALL = ("gptoss", "llama3_1", "llama3_2")
_NO_WORDS_BESIDE_A_CALL = (
    *("gptoss", "llama3_1", "llama3_2", "muse_glimmer"),
    *("gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"),
)
"""They do not show all of a thought, words and a call. Gemma 4 shows the words behind the call's result and
ends the turn there, so that the agent has no place to go on."""
_NO_THOUGHT_BESIDE_A_CALL = ("llama3_1", "llama3_2")
_ENDS = {  # by how names begin: of words, of a call; others end both by what stands between messages
    "gptoss": ("<|return|>", "<|call|>"),
    "glm4moe": ("<|user|>", "<|observation|>"),
    "gemma4_v2": ("<turn|>", "<turn|>"),
    "gemma4": ("<turn|>", "<|tool_response>"),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
}
ROWS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(("gemma4_v5", "glm4moe", "glm4moe_training", "lfm2_2_5_v2", "lfm2_2_5_vl"), (3, 3, 1)),
    **dict.fromkeys(("gemma4", "gemma4_v3", "gemma4_v4", "lfm2_2_5"), (3, 3, 3)),
    **dict.fromkeys(("diffusion_gemma", "diffusion_gemma_training"), (3, 4, 1)),
    # gpt-oss ends a talk by another token than it writes between two messages
    **dict.fromkeys(("gptoss", "gptoss_training", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), (4, 4, 3)),
    **dict.fromkeys(("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3"), (4, 5, 3)),
    **dict.fromkeys(("nemotron_3_5_lightning", "nemotron_3_5_lightning_training"), (4, 5, 3)),
    **dict.fromkeys(
        ("nemotron_3_nano_training", "nemotron_3_super_training", "nemotron_3_ultra_training"), (4, 5, 3)
    ),
    **dict.fromkeys(("deepseek_r1_distill", "deepseekv3", "deepseekv3_training"), (5, 4, 3)),
}
"""How many rows `sane_talk`, `ragged_talk` and `thoughtless_talk` have where history is the template's; the
other 44 templates make one of each."""


@dataclass(frozen=True)
class Exchange:
    """What the agent says and what it hears then."""

    reply: Message
    heard: tuple[str, ...] = ()
    """Results of its calls, or what the user says; nothing: the conversation ends."""
    is_cut: bool = False
    """Does a limit cut the reply? Then no token ends it."""
    text: str | None = None
    """What the model writes; as its template would write the reply unless given."""


def tools_of(name: str) -> list[dict[str, Any]]:
    """What is offered: one tool, where the template takes any."""
    return [LOOK] if name in {*TRL_WITH_TOOLS, *TRL_WITH_HIDDEN_TOOLS, *OURS} else []


def opening_of(name: str) -> tuple[Message, ...]:
    user = Message(role="user", content="where is K27?")
    return (user,) if name in _WITHOUT_SYSTEM else (Message(role="system", content="Be brief."), user)


def rows_of_talks(name: str) -> tuple[int, int, int]:
    return ROWS.get(name, (1, 1, 1))


def sane_talk(name: str) -> list[Exchange]:
    """A thought and a call, a thought and words, words, and twice a thought and words."""
    look = _said("", "I look it up.", {"at": "K27", "times": 2})
    first = look if tools_of(name) else _said("One moment.", "I don't know yet.")
    return fitting(
        name,
        Exchange(first, ("It left Oslo.",)),
        Exchange(_said("It's on its way.", "It left, so I say so."), ("thanks",)),
        Exchange(_said("Welcome."), ("and K28?",)),
        Exchange(_said("I don't know K28.", "Never seen."), ("bye",)),
        Exchange(_said("Bye.", "We are done.")),
    )


def ragged_talk(name: str) -> list[Exchange]:
    """Words, two calls at once, words beside a call, a reply that a limit cuts, a thought, words."""
    nested = {"at": 'the "red" shelf', "times": 3}
    calls = [
        Exchange(_said("", None, {"at": "K27"}, nested), ("found", "error: no shelf")),
        Exchange(_said("I look again.", "Again,\nthen.", nested), ("<found>",)),
    ]
    return fitting(
        name,
        Exchange(_said("Which one?\n\n- K27\n- K28"), ("K27",)),
        *(calls if tools_of(name) else ()),
        Exchange(_said("It is in the"), ("go on",), is_cut=True),
        Exchange(_said("red shelf.", "Where was I?"), ("bye",)),
        Exchange(_said("Bye.")),
    )


def thoughtless_talk(name: str) -> list[Exchange]:
    """Every thought is empty, and said to be so."""
    return fitting(
        name,
        Exchange(_said("It's on its way.", ""), ("thanks",)),
        Exchange(_said("Welcome.", ""), ("bye",)),
        Exchange(_said("Bye.", "")),
    )


def fitting(name: str, *talk: Exchange) -> list[Exchange]:
    """The talk in replies that the template has a place for."""
    return [_fit(name, exchange) for exchange in talk]


def written(name: str, reply: Message) -> str:
    """What a model writes that says this: what its template shows of a last message, where it shows all."""
    thought, words = reply.reasoning, reply.content
    if name.startswith("deepseek"):  # the prompt opens a thought, of which most show nothing later
        return f"{thought or ''}\n</think>\n\n{words}"
    if name in _GEMMA_4_WITHOUT_THOUGHTS and thought is not None and not reply.tool_calls:
        return f"<|channel>thought\n{thought}\n<channel|>{words}"
    return trl_template(name).render_reply(reply)


def end_of(name: str, reply: Message) -> str:
    """The token that a model of this template ends a reply by."""
    template = trl_template(name)
    usual = template.tokenizer.piece(template.end_id)
    words, call = next((ends for start, ends in _ENDS.items() if name.startswith(start)), (usual, usual))
    return call if reply.tool_calls else words


def full_render(
    name: str,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    *,
    generate: bool = True,
    hf: Any = None,
) -> str:
    """The template's own text of a conversation, up to where the agent speaks again if `generate`; with `hf`
    that of this tokenizer of transformers'."""
    text = (hf or trl_template(name).tokenizer.hf).apply_chat_template(
        [_as_openai(name, message) for message in messages],
        tools=list(tools) or None,
        add_generation_prompt=generate,
        tokenize=False,
    )
    return str(text)


def squeezed(text: str) -> str:
    """The text without white space."""
    return "".join(text.split())


async def play(name: str, talk: Sequence[Exchange], history: str) -> Trajectory:
    """The conversation as a rollout of an agent that reads its history so."""
    template = trl_template(name)
    replies = [_ids(name, exchange) for exchange in talk]
    settings = AgentConfig(history=history, max_new_tokens=10_000)
    agent = MultiTurnAgent(settings, backend=_ForcedBackend(template.tokenizer, replies))
    agent._template = template  # loading one takes 40 ms
    environment = TalkEnvironment(name, talk)
    async with agent:
        return await run_episode(
            agent,
            environment,
            environment.scenarios("train")[0],
            seeds=EpisodeSeeds(user=0, agent=0),
            session=Session(0, 0),
        )


class _ForcedBackend:
    """Says these tokens, turn by turn, in one conversation; log-probs are -0.5."""

    def __init__(self, tokenizer: Tokenizer, replies: Sequence[Sequence[int]]) -> None:
        self.tokenizer = tokenizer
        self.context_length = 1_000_000
        self.version = 0
        self._replies = iter(replies)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def release(self, session: Session) -> None: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: Session | None = None,
        on_text: Any = None,
    ) -> Completion:
        token_ids, stops = tuple(next(self._replies)), params.stop_token_ids
        text = TurnText(self.tokenizer, end_ids=stops, skip_special_tokens=params.skip_special_tokens)
        return Completion(
            message=Message(role="assistant", content=text.finish(token_ids)),
            prompt_ids=tuple(prompt_ids),
            token_ids=token_ids,
            logprobs=(-0.5,) * len(token_ids),
            finish_reason="stop" if token_ids[-1] in stops else "length",
        )


class _Talk:
    def __init__(self, name: str, talk: Sequence[Exchange]) -> None:
        self.opening = opening_of(name)
        self.tools = tools_of(name)
        self._left = iter(talk)

    async def step(self, reply: Message) -> Observation:
        heard = next(self._left).heard
        if not heard:
            return Observation(terminated=True)
        if not reply.tool_calls:
            return Observation(messages=tuple(Message(role="user", content=text) for text in heard))
        results = zip(reply.tool_calls, heard, strict=True)
        return Observation(
            messages=tuple(
                Message(role="tool", content=text, name=call.name, tool_call_id=call.id)
                for call, text in results
            )
        )

    async def outcome(self) -> Outcome:
        return Outcome(reward=1.0)

    async def close(self) -> None: ...


class TalkEnvironment:
    """An environment of one conversation that goes as it is told."""

    local = True

    def __init__(self, name: str, talk: Sequence[Exchange]) -> None:
        self._name, self._talk = name, talk

    def scenarios(self, split: str) -> list[Scenario]:
        return [Scenario(id=self._name)]

    async def start(self, scenario: Scenario, seed: int) -> _Talk:
        return _Talk(self._name, self._talk)


def _said(content: str, thought: str | None = None, *calls: Mapping[str, Any]) -> Message:
    made = tuple(ToolCall(name="look", arguments=arguments) for arguments in calls)
    return Message(role="assistant", content=content, reasoning=thought, tool_calls=made)


def _fit(name: str, exchange: Exchange) -> Exchange:
    reply, heard = exchange.reply, exchange.heard
    if name.startswith(_WITHOUT_THOUGHTS) or (reply.tool_calls and name in _NO_THOUGHT_BESIDE_A_CALL):
        reply = replace(reply, reasoning=None)
    if reply.tool_calls and name.startswith(_ONE_CALL):
        reply, heard = replace(reply, tool_calls=reply.tool_calls[:1]), heard[:1]
    if reply.tool_calls and name.removesuffix("_training") in _NO_WORDS_BESIDE_A_CALL:
        reply = replace(reply, content="")
    return replace(exchange, reply=reply, heard=heard)


def _ids(name: str, exchange: Exchange) -> list[int]:
    tokenizer, text = trl_template(name).tokenizer, exchange.text or written(name, exchange.reply)
    return tokenizer.encode_markup(text if exchange.is_cut else text + end_of(name, exchange.reply))


def _as_openai(name: str, message: Message) -> dict[str, Any]:
    content, data = message.content, {}
    if message.reasoning is not None:
        if name.startswith(_READ_THOUGHTS) and not name.startswith(_READ_NO_THOUGHTS):
            data = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)
        else:
            content = f"<think>\n{message.reasoning}\n</think>\n\n{content}"
    if name in SHOW_NO_CALLS:
        for call in message.tool_calls:
            body = json.dumps({"name": call.name, "arguments": call.arguments})
            content += f"<tool_call>{body}</tool_call>"
    elif message.tool_calls:
        data["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        data |= {"tool_call_id": message.tool_call_id, "name": message.name}
    as_parts = name.startswith(_PARTS)
    return {
        "role": message.role,
        "content": [{"type": "text", "text": content}] if as_parts else content,
        **data,
    }
