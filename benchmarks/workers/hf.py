"""Plain transformers: `generate` on padded batches, histories prefilled again in every turn, full logits.

What one writes without a library: the baseline of the decode, rollout and update rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria

from benchmarks.shapes import Request, requests
from benchmarks.talks import Talk, talks
from benchmarks.worker import Clock, Task, serve


def load(folder: str) -> Any:
    """The model in fp32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def logprobs(folder: str, rows: Sequence[Sequence[int]]) -> list[list[float]]:
    """[T - 1] of each row's tokens after those before them."""
    model, result = load(folder).eval(), []
    for row in rows:
        ids = torch.tensor([list(row)])
        with torch.inference_mode():
            scores = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        result.append(scores.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return result


def left_padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [B, T]."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    seen = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, width - len(row) :] = torch.tensor(row)
        seen[index, width - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": seen}


class EndAt(StoppingCriteria):
    """Row i ends after `lengths[i]` new tokens; the batch goes on until its last row ends."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = torch.tensor(lengths)
        self.count = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        """[B] which rows have ended."""
        self.count += 1
        return self.lengths <= self.count


def generate(model: Any, batch: Sequence[Request], **settings: Any) -> list[list[int]]:
    """The sampled tokens of each request, from the full distribution."""
    inputs = left_padded([request.ids for request in batch])
    with torch.inference_mode():
        result = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(request.reply for request in batch),
            stopping_criteria=[EndAt([request.reply for request in batch])],
            pad_token_id=0,
            **settings,
        )
    fresh = result[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: request.reply] for row, request in zip(fresh, batch, strict=True)]


class Decode:
    """Requests in batches of `slots`; in each, rows wait for the longest."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.model = load(job["model"]).eval()
        # Neighbours of like length pad less: the better of the two orders.
        self.requests = sorted(requests(**job["requests"]), key=lambda request: len(request.ids))
        self.slots: int = job["slots"]
        self.settings: dict[str, Any] = dict(job.get("settings", {}))

    def run(self, repetition: int) -> Mapping[str, float]:
        sampled = 0
        for start in range(0, len(self.requests), self.slots):
            batch = self.requests[start : start + self.slots]
            sampled += sum(len(row) for row in generate(self.model, batch, **self.settings))
        return {"tokens": sampled}

    def close(self) -> None:
        pass


class Prefill:
    """Every turn forwards the whole history of every conversation."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.model = load(job["model"]).eval()
        self.talks = talks(job)

    def run(self, repetition: int) -> Mapping[str, float]:
        clock, forwarded = Clock(), 0
        requests = self.talks.requests(repetition)
        for turn in range(self.talks.turns):
            histories = [talk.history(turn) for talk in requests]
            with clock:
                generate(self.model, [Request(history, 1) for history in histories])
            forwarded += sum(len(history) for history in histories)
        tokens = sum(len(talk.history(self.talks.turns - 1)) for talk in requests)
        return {"wall": clock.wall, "cpu": clock.cpu, "tokens": tokens, "forwarded": forwarded}

    def close(self) -> None:
        pass


class Rollout:
    """Conversations in lock-step: one padded batch per turn over the whole histories.

    The tools of a turn wait together, so that a turn takes as long as its slowest.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.model = load(job["model"]).eval()
        self.talks = talks(job)
        self.waits = [self.talks.waits(row) for row in range(self.talks.rows)]

    def run(self, repetition: int) -> Mapping[str, float]:
        requests = self.talks.requests(repetition)
        histories: list[list[int]] = [[] for _ in requests]
        sampled = 0
        for turn in range(self.talks.turns):
            for talk, history in zip(requests, histories, strict=True):
                history.extend(talk.parts[turn][0])
            batch = [Request(history, self.talks.reply) for history in histories]
            for history, reply in zip(histories, generate(self.model, batch), strict=True):
                history.extend(reply)
                sampled += len(reply)
            time.sleep(max(waits[turn] for waits in self.waits))
        return {"tokens": sampled}

    def close(self) -> None:
        pass


class Update:
    """One optimiser step: padded rows, full logits, log-softmax, a masked loss, AdamW.

    With `pieces` in the settings the rows go in so many micro-batches, whose gradients add up.
    """

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.model = load(job["model"]).train()
        self.rows = talks(job).requests()
        self.pieces: int = job.get("settings", {}).get("pieces", 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.01)

    def backward(self) -> None:
        """Give the parameters the gradient of the mean over all rows."""
        advantages = group_advantages(self.rows)
        size = len(self.rows) // self.pieces
        for start in range(0, len(self.rows), size):
            end = start + size
            loss = self._loss(self.rows[start:end], advantages[start:end])
            (loss / self.pieces).backward()

    def run(self, repetition: int) -> Mapping[str, float]:
        self.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"tokens": sum(sum(row.mask) for row in self.rows)}

    def _loss(self, rows: Sequence[Talk], advantages: Sequence[float]) -> Any:
        width = max(len(row.ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        seen = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
            seen[index, : len(row.ids)] = 1
            mask[index, : len(row.ids)] = torch.tensor(row.mask, dtype=torch.float)
        logits = self.model(input_ids=ids, attention_mask=seen, use_cache=False).logits
        chosen = logits[:, :-1].log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = (chosen - chosen.detach()).exp()
        scale = torch.tensor(advantages)[:, None]
        surrogate = torch.minimum(ratio * scale, ratio.clamp(0.8, 1.2) * scale)
        return -((surrogate * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)).mean()

    def close(self) -> None:
        pass


def group_advantages(rows: Sequence[Talk]) -> list[float]:
    """Rewards against their group's mean and deviation; never all zero, or the update would be free."""
    result = [0.0] * len(rows)
    for scenario in {row.scenario for row in rows}:
        indices = [index for index, row in enumerate(rows) if row.scenario == scenario]
        rewards = torch.tensor([rows[index].reward for index in indices])
        values = (rewards - rewards.mean()) / (rewards.std(unbiased=False) + 1e-6)
        for index, value in zip(indices, values.tolist(), strict=True):
            result[index] = value
    if not any(result):
        raise RuntimeError("all advantages are 0: nothing would be timed")
    return result


TASKS: dict[str, Callable[[Mapping[str, Any]], Task]] = {
    "decode": Decode,
    "prefill": Prefill,
    "rollout": Rollout,
    "update": Update,
}


def make(job: Mapping[str, Any]) -> Task:
    """The task that a job asks for."""
    return TASKS[job["task"]](job)


if __name__ == "__main__":
    serve(make)
