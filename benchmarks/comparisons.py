"""What is compared with what: every row of docs/evidence/step-times.md, its sides, and what it is to show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.environments import ROOT
from benchmarks.models import folder
from benchmarks.sides import Side
from benchmarks.talks import Talks

Quantity = Literal["cpu", "wall", "peak", "extra"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One number of a comparison: a quantity of the peer divided by ours."""

    title: str
    peer: str
    quantity: Quantity = "cpu"
    at_least: float | None = None
    aim: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A random-init model, and the folder where `benchmarks.models` writes it."""

    size: str = "5.8M"
    vocabulary: int = 4096
    family: str = "llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Sides that do the same work, interleaved."""

    name: str
    sides: Mapping[str, Side]
    lines: tuple[Line, ...]
    model: Model | None
    same_tokens: bool = True
    """Must all sides report the same number of tokens?"""
    most_repetitions: int | None = None
    """Unset: as many as were asked for."""
    times: int = 1
    """So many times as many: where each repetition is other work, and more of them are needed."""
    memory: bool = False
    """Is the peak memory measured, too, in processes of its own?"""
    base: str = "ours"
    """The side that every line's peer is divided by."""


_TRL_PIECES = {
    "step-40": 8,
    "step-228": 4,
    "step-32k": 8,
    "turns-trl": 8,
    "update-4k-trl": 8,
    "update-32k-trl": 8,
    "update-152k-trl": 4,
    "smollm2-triage": 4,
    "smollm2-desk": 4,
}
"""Row -> accumulated pieces in which TRL is fastest; rows named settings-trl-* hold some that are slower."""
_STATIC = {"cache_implementation": "static"}
"""Of `generate`, where it is faster: in decode of ragged requests, and in TRL's shortest step."""
_FEW = 3
"""Repetitions of rows on which no claim stands, and of those of a real model, whose step takes a minute."""
_OWN = {"generate": "hf", "plain": "hf", "pieces": "hf", "floor": "floor"}
"""Peers that need no environment of their own, and their workers."""


def _comparison(
    name: str,
    task: str,
    model: Model,
    work: Mapping[str, Any],
    lines: tuple[Line, ...],
    *,
    best: Mapping[str, Mapping[str, Any]],
    **more: Any,
) -> Comparison:
    """Ours and every peer that a line names, at the same work; `best` are the settings of peers."""
    job = {"task": task, "model": folder(**asdict(model)), **work}
    sides = {"ours": Side(module="ours", job=job)}
    for line in lines:
        theirs = {**job, "settings": dict(best.get(line.peer, {}))}
        is_own = line.peer in _OWN
        sides[line.peer] = Side(
            module=_OWN[line.peer] if is_own else line.peer,
            job=theirs,
            environment="own" if is_own else line.peer,
        )
    return Comparison(name=name, sides=sides, lines=lines, model=model, **more)


def _talks(name: str, task: str, model: Model, shape: Talks, *lines: Line, **more: Any) -> Comparison:
    """Of conversations; TRL cuts a step into the pieces that were fastest where it has been tried."""
    cache = _STATIC if name == "step-40" else {}
    best = {
        "trl": {**trl_pieces(shape.rows, _TRL_PIECES.get(name, 1)), **cache},
        "pieces": {"pieces": shape.rows},
    }
    return _comparison(name, task, model, {"talks": asdict(shape)}, lines, best=best, **more)


def trl_pieces(conversations: int, pieces: int) -> dict[str, Any]:
    """TRL's settings for a step whose update goes in so many equal pieces."""
    return {
        "per_device_train_batch_size": conversations // pieces,
        "gradient_accumulation_steps": pieces,
    }


def _requests(count: int, reply: tuple[int, int]) -> dict[str, Any]:
    """Ragged requests for 32 slots."""
    ragged = {"seed": 1, "count": count, "vocabulary": 4096, "prompt": (64, 256), "reply": reply}
    return {"slots": 32, "requests": ragged}


def _decode() -> Iterator[Comparison]:
    best = {"generate": _STATIC}
    small = _requests(64, (16, 128)) | {"runs": "lean"}
    yield _comparison(
        "decode-5.8M",
        "decode",
        Model(),
        small,
        (
            Line(title="decode, 32 slots, ragged, 5.8M", peer="generate", at_least=2.5, aim=4),
            Line(
                title="share of the matrix products' floor, decode with prefill, 5.8M",
                peer="floor",
                at_least=0.33,
                aim=0.5,
            ),
        ),
        best=best,
    )
    yield _comparison(
        "decode-1M",
        "decode",
        Model(size="1M"),
        small,
        (Line(title="decode, 32 slots, ragged, 1M", peer="generate"),),
        best=best,
        most_repetitions=_FEW,
    )
    yield _comparison(
        "decode-52M",
        "decode",
        Model(size="52M"),
        _requests(48, (8, 64)) | {"runs": "lean"},
        (Line(title="decode, 32 slots, ragged, 52M", peer="generate", at_least=2.5, aim=4),),
        best=best,
    )
    yield _comparison(
        "decode-general",
        "decode",
        Model(family="phi3"),
        small | {"runs": "general"},
        (Line(title="decode on the general path (Phi-3), 5.8M", peer="generate", at_least=1.7, aim=2.2),),
        best=best,
    )


def _steps() -> Iterator[Comparison]:
    def row(name: str, model: Model, prompt: int, scenarios: int, *lines: Line) -> Comparison:
        shape = Talks(vocabulary=model.vocabulary, scenarios=scenarios, group=8, prompt=prompt, reply=64)
        return _talks(name, "step", model, shape, *lines, memory=True)

    def time(title: str, at_least: float, aim: float) -> Line:
        return Line(title=f"GRPO step, {title}", peer="trl", at_least=at_least, aim=aim)

    wide = Model(vocabulary=32768)
    yield row("step-40", Model(), 40, 4, time("5.8M, prompt 40", 2, 3))
    yield row("step-228", Model(), 228, 4, time("5.8M, prompt 228", 4, 5.5))
    yield row(
        "step-32k",
        wide,
        40,
        4,
        time("5.8M, prompt 40, vocabulary 32k", 5.5, 7),
        Line(
            title="GRPO step, 5.8M, prompt 40, vocabulary 32k: peak memory",
            peer="trl",
            quantity="peak",
            at_least=4,
            aim=5,
        ),
    )
    yield row("step-52M", Model(size="52M"), 40, 2, time("52M, prompt 40", 2.5, 3.5))


def _precisions() -> Iterator[Comparison]:
    """Steps whose fp32 products are made in less: both sides have the setting, TRL by torch's own; and steps
    in bf16 beside the same in fp32."""
    steps = {row.name: row for row in _steps()}
    for row, shape in (("step-40", "5.8M, prompt 40"), ("step-52M", "52M, prompt 40")):
        default_side = steps[row].sides
        medium = {name: _with(side, matmul_precision="medium") for name, side in default_side.items()}
        title = f"GRPO step, {shape}, matmul_precision medium"
        yield replace(
            steps[row],
            name=f"{row}-medium",
            sides={**medium, "highest": default_side["ours"]},
            lines=(Line(title=title, peer="trl"), Line(title=title, peer="highest")),
        )
        yield replace(
            steps[row],
            name=f"{row}-bf16",
            sides={"ours": _with(default_side["ours"], precision="bf16"), "fp32": default_side["ours"]},
            lines=(Line(title=f"GRPO step, {shape}, bf16", peer="fp32"),),
            most_repetitions=_FEW,
        )


def _language_model() -> Iterator[Comparison]:
    """Steps of a model in the shape of SmolLM2-135M: single-turn triage, and the desk's conversations."""
    model = Model(size="smollm2", vocabulary=49152)
    triage = Talks(vocabulary=model.vocabulary, scenarios=4, group=8, prompt=115, reply=17)
    desk = Talks(vocabulary=model.vocabulary, scenarios=4, group=8, turns=3, prompt=36, reply=25, delta=40)
    for task, part, talks, least, least_bf16, title in (
        ("triage", "step", triage, 6.5, 8.0, "32 replies of 17 tokens to prompts of 115"),
        ("desk", "turns", desk, 4.0, 4.0, "32 conversations of 3 turns, 191 tokens"),
    ):
        line = Line(title=f"GRPO step, SmolLM2's shape, {title}, fp32", peer="trl", at_least=least)
        row = _talks(f"smollm2-{task}", part, model, talks, line, most_repetitions=_FEW)
        yield row
        in_bf16 = f"GRPO step, SmolLM2's shape, {title}, bf16"
        yield replace(
            row,
            name=f"smollm2-{task}-bf16",
            sides={
                **{name: _with(side, precision="bf16") for name, side in row.sides.items()},
                "fp32": row.sides["ours"],
            },
            lines=(
                Line(title=in_bf16, peer="trl", at_least=least_bf16),
                Line(title=in_bf16, peer="fp32"),
            ),
        )


def _with(side: Side, **settings: str) -> Side:
    return replace(side, job={**side.job, **settings})


def _rollouts() -> Iterator[Comparison]:
    shape = Talks(vocabulary=4096, scenarios=2, group=8, turns=6, prompt=192, reply=60, delta=44)
    yield _talks(
        "prefill-6",
        "prefill",
        Model(),
        shape,
        Line(title="6-turn prefill, 2 scenarios of 8", peer="generate", at_least=12, aim=15),
    )
    for turns, scenarios in ((4, 2), (4, 4), (4, 8), (6, 2), (1, 2), (2, 2), (4, 1)):
        shape = Talks(
            vocabulary=4096, scenarios=scenarios, group=8, turns=turns, prompt=96, reply=32, delta=32
        )
        yield _talks(
            f"rollout-{turns}x{shape.rows}",
            "rollout",
            Model(),
            shape,
            Line(title=f"rollout, {_turns(turns)}, {shape.rows} conversations", peer="generate"),
            most_repetitions=_FEW,
        )
    waiting = Talks(vocabulary=4096, scenarios=8, group=8, turns=4, prompt=96, reply=32, delta=32, wait=0.2)
    title = "rollout, 4 turns, 64 conversations, 200 ms tools"
    yield _talks(
        "rollout-4x64-tools",
        "rollout",
        Model(),
        waiting,
        Line(title=title, peer="generate", quantity="wall"),
        Line(title=f"{title}: CPU", peer="generate"),
        most_repetitions=_FEW,
    )


def _turns(count: int) -> str:
    return "1 turn" if count == 1 else f"{count} turns"


def _end_to_end() -> Iterator[Comparison]:
    shape = Talks(vocabulary=4096, scenarios=8, group=8, turns=4, prompt=96, reply=32, delta=32, wait=0.2)
    title = "multi-turn GRPO, 4 turns, 200 ms tools, 64 conversations"
    yield _talks(
        "turns-trl",
        "turns",
        Model(),
        shape,
        Line(title=title, peer="trl", quantity="wall", at_least=4, aim=6),
        Line(title=f"{title}: CPU", peer="trl"),
    )
    fewer = Talks(**{**asdict(shape), "scenarios": 2})
    title = "multi-turn GRPO, 4 turns, 200 ms tools, 16 conversations"
    yield _talks(
        "turns-stateset",
        "turns",
        Model(),
        fewer,
        Line(title=title, peer="stateset", quantity="wall", at_least=5, aim=10),
        Line(title=f"{title}: CPU", peer="stateset"),
    )


def _updates() -> Iterator[Comparison]:
    def shape(vocabulary: int, scenarios: int, group: int) -> Talks:
        return Talks(
            vocabulary=vocabulary,
            scenarios=scenarios,
            group=group,
            turns=4,
            prompt=192,
            reply=80,
            shortest_reply=16,
            delta=32,
        )

    def time_and_memory(title: str, peer: str, **wanted: float) -> tuple[Line, Line]:
        """Its time, and the memory that it takes; `wanted` of each is `time`, `memory` and their aims."""
        return (
            Line(title=title, peer=peer, at_least=wanted.get("time"), aim=wanted.get("time_aim")),
            Line(
                title=f"{title}: extra peak memory",
                peer=peer,
                quantity="extra",
                at_least=wanted.get("memory"),
                aim=wanted.get("memory_aim"),
            ),
        )

    for label, vocabulary, group in (("4k", 4096, 8), ("32k", 32768, 8), ("152k", 151936, 2)):
        model, talks = Model(vocabulary=vocabulary), shape(vocabulary, 2, group)
        title = f"update, vocabulary {label}, {talks.rows} conversations"
        wanted = {"time": 3.5, "time_aim": 5, "memory": 6, "memory_aim": 10} if label == "32k" else {}
        few = None if wanted else _FEW
        plain, trl = time_and_memory(title, "plain", **wanted), time_and_memory(title, "trl")
        name = f"update-{label}"
        lines = (*plain, *time_and_memory(title, "pieces")) if label != "152k" else plain
        yield _talks(name, "update", model, talks, *lines, memory=True, most_repetitions=few)
        yield _talks(f"{name}-trl", "update", model, talks, *trl, memory=True, most_repetitions=2)
        if talks.rows != 4:  # so that a figure has the same conversations at every vocabulary
            four = shape(vocabulary, 2, 2)
            in_figure = time_and_memory(f"update, vocabulary {label}, 4 conversations", "plain")
            yield _talks(
                f"{name}-of-4", "update", model, four, *in_figure, memory=True, most_repetitions=_FEW
            )
    for group in (2, 4, 16):
        yield _talks(
            f"update-group-{group}",
            "update",
            Model(),
            shape(4096, 16 // group, group),
            Line(title=f"update, 16 conversations in groups of {group}", peer="plain"),
            most_repetitions=_FEW,
        )


_TRL_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "gradient_checkpointing, its default": {"gradient_checkpointing": True},
    "cache_implementation dynamic, its default": {"cache_implementation": None},
    "use_transformers_continuous_batching": {
        "use_transformers_continuous_batching": True,
        "cache_implementation": None,
        "transformers_continuous_batching_config": {"num_blocks": 512, "max_batch_tokens": 1024},
    },
}


def _settings() -> Iterator[Comparison]:
    """The peers' own settings against those that their rows use."""
    rows = {
        row.name: row for part in (_decode, _steps, _language_model, _end_to_end, _updates) for row in part()
    }

    def settings_row(
        row: str,
        peer: str,
        title: str,
        variants: Mapping[str, Mapping[str, Any]],
        quantities: tuple[Quantity, ...] = ("cpu",),
    ) -> Comparison:
        default_side = rows[row].sides[peer]
        if "talks" in default_side.job:  # nobody needs to wait for this
            default_side = replace(
                default_side, job={**default_side.job, "talks": {**default_side.job["talks"], "wait": 0.0}}
            )
        settings = default_side.job["settings"]
        sides = {
            label: replace(default_side, job={**default_side.job, "settings": {**settings, **changes}})
            for label, changes in variants.items()
        }
        return Comparison(
            name=f"settings-{peer}-{row}",
            sides={"as used": default_side, **sides},
            lines=tuple(
                Line(title=f"{title}, {label}", peer=label, quantity=quantity)
                for label in variants
                for quantity in quantities
            ),
            model=rows[row].model,
            most_repetitions=2,
            base="as used",
            memory="peak" in quantities,
        )

    def pieces(row: str, *counts: int) -> dict[str, Mapping[str, Any]]:
        count = rows[row].sides["ours"].job["talks"]
        conversations = count["scenarios"] * count["group"]
        return {"in one piece" if n == 1 else f"in {n} pieces": trl_pieces(conversations, n) for n in counts}

    dynamic = {"cache_implementation dynamic, its default": {"cache_implementation": None}}
    sixteen = {"generation_batch_size 16": {"generation_batch_size": 16}}
    yield settings_row(
        "step-40", "trl", "TRL's GRPO step, 5.8M, prompt 40", {**pieces("step-40", 1, 2), **_TRL_SETTINGS}
    )
    for row in ("smollm2-triage", "smollm2-desk"):
        title = f"TRL's {rows[row].lines[0].title}"
        yield settings_row(row, "trl", title, pieces(row, 1, 2, 8))
    for row in ("step-228", "step-32k", "turns-trl"):
        quantities: tuple[Quantity, ...] = ("cpu", "peak") if row == "step-32k" else ("cpu",)
        yield settings_row(row, "trl", f"TRL's {rows[row].lines[0].title}", pieces(row, 1), quantities)
    yield settings_row("decode-5.8M", "generate", "HF generate", dynamic)
    yield settings_row("turns-stateset", "stateset", "stateset-agents 0.69", sixteen)


def _demo() -> Iterator[Comparison]:
    job = {"task": "demo", "file": str(ROOT / "examples" / "demo.yaml")}
    yield Comparison(
        name="demo",
        sides={"ours": Side(module="ours", job=job), "plain": Side(module="plain", job=job)},
        lines=(Line(title="the training of `make demo`", peer="plain", at_least=2, aim=4),),
        model=None,
        same_tokens=False,
        times=3,
    )


def _smoke() -> Iterator[Comparison]:
    tiny = Model(size="tiny", vocabulary=64)
    requests = {"seed": 1, "count": 4, "vocabulary": 64, "prompt": (4, 9), "reply": (2, 6)}
    decode = Line(title="decode, tiny", peer="generate")
    work = {"slots": 2, "requests": requests}
    yield _comparison("smoke-decode", "decode", tiny, work, (decode,), best={}, most_repetitions=1)
    shape = Talks(vocabulary=64, scenarios=2, group=2, turns=2, prompt=12, reply=6, delta=8)
    for task, peer in (("rollout", "generate"), ("update", "plain")):
        line = Line(title=f"{task}, tiny", peer=peer)
        memory = task == "update"
        yield _talks(f"smoke-{task}", task, tiny, shape, line, most_repetitions=1, memory=memory)


def comparisons(*, smoke: bool = False) -> dict[str, Comparison]:
    """All rows by name, in the order of the page; with `smoke` tiny ones that take seconds."""
    full = (_decode, _steps, _precisions, _language_model, _rollouts, _end_to_end, _updates, _demo, _settings)
    parts = (_smoke,) if smoke else full
    return {row.name: row for part in parts for row in part()}
