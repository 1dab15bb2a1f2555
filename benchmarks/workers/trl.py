"""TRL's GRPOTrainer, driven by its own `train`: it waits between two steps until it is told to go on.

Three ways to get completions: its own generation (single turn), a `rollout_func` that plays conversations,
and one that hands out conversations that are given, which leaves scoring and update.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.shapes import score
from benchmarks.talks import talks
from benchmarks.worker import Task, serve


class Gate(TrainerCallback):
    """Holds the training thread between two steps."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.failure: str | None = None
        self.closing = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.go.acquire()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.done.release()
        self.go.acquire()
        if self.closing:
            control.should_training_stop = True
        return control


def even(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    """The score that every side uses."""
    return [
        score(completion if isinstance(completion, str) else completion[0]["content"])
        for completion in completions
    ]


class Training:
    """One trainer; `run` lets it make one optimiser step."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.talks = talks(job)
        torch.set_float32_matmul_precision(job.get("matmul_precision", "highest"))
        settings = {
            "per_device_train_batch_size": self.talks.rows,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing": False,
            **job.get("settings", {}),
        }
        self.folder = tempfile.TemporaryDirectory()
        config = GRPOConfig(
            output_dir=self.folder.name,
            num_generations=self.talks.group,
            max_completion_length=self.talks.reply,
            max_steps=1000,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="grpo",
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            use_cpu=True,
            bf16=job.get("precision") == "bf16",
            **settings,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            shuffle_dataset=False,
            dataloader_pin_memory=False,
        )
        self.opened = [self.talks.opening(number) for number in range(self.talks.scenarios)]
        prompts = [[{"role": "user", "content": opening}] for opening in self.opened]
        self.gate = Gate()
        model: Any = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, local_files_only=True
        )
        self.tokenizer: Any = AutoTokenizer.from_pretrained(job["model"], local_files_only=True)
        self.trainer = GRPOTrainer(
            model=model,
            reward_funcs=even,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=self.tokenizer,
            callbacks=[self.gate],
            rollout_func=self.rollout_func(),
        )
        self.rollout = 0.0
        generate = self.trainer._generate

        def timed(prompts: Any) -> Any:
            started = time.perf_counter()
            try:
                return generate(prompts)
            finally:
                self.rollout = time.perf_counter() - started

        self.trainer._generate = timed
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        try:
            torch.set_num_threads(1)
            self.trainer.train()
        except BaseException:
            self.gate.failure = traceback.format_exc()
        finally:
            self.gate.done.release()

    def rollout_func(self) -> Any:
        """None: TRL generates by itself."""
        return None

    def run(self, repetition: int) -> Mapping[str, float]:
        started = time.perf_counter()
        self.gate.go.release()
        self.gate.done.acquire()
        update = time.perf_counter() - started - self.rollout
        if self.gate.failure is not None:
            raise RuntimeError(self.gate.failure)
        metrics = self.trainer._metrics["train"]
        if metrics["frac_reward_zero_std"][-1] == 1.0:
            raise RuntimeError("all advantages are 0: nothing was trained")
        tokens = self.talks.rows * metrics["completions/mean_length"][-1]
        return {"tokens": tokens, "rollout": self.rollout, "update": update}

    def close(self) -> None:
        self.gate.closing = True
        self.gate.go.release()
        self.thread.join(timeout=60)
        self.folder.cleanup()


class Step(Training):
    """A whole step with TRL's own single-turn generation."""


class Turns(Training):
    """A whole step whose `rollout_func` plays conversations: all of them in one batch per turn.

    Tools of one turn wait together, as in TRL's own tool loop, which has no user turns.
    """

    def rollout_func(self) -> Any:
        self.delta_ids = [self._deltas(number) for number in range(self.talks.scenarios)]
        return self._play

    def _deltas(self, scenario: int) -> list[list[int]]:
        markup = "<|end|><|user|>{}<|end|><|assistant|>"
        return [
            self.tokenizer.encode(markup.format(words), add_special_tokens=False)
            for words in self.talks.user_words(scenario)
        ]

    def _play(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        prompt_ids = [
            self.tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=False
            )
            for prompt in prompts
        ]
        scenarios = [self.opened.index(prompt[0]["content"]) for prompt in prompts]
        completions: list[list[int]] = [[] for _ in prompts]
        masks: list[list[int]] = [[] for _ in prompts]
        for turn in range(self.talks.turns):
            histories = [[*prompt, *done] for prompt, done in zip(prompt_ids, completions, strict=True)]
            replies, _ = trainer._generate_single_turn(histories, None, {}, 1)
            for completion, mask, reply in zip(completions, masks, replies, strict=True):
                completion.extend(reply)
                mask.extend([1] * len(reply))
            asyncio.run(self._wait(turn))
            if turn + 1 < self.talks.turns:
                for completion, mask, scenario in zip(completions, masks, scenarios, strict=True):
                    delta = self.delta_ids[scenario][turn]
                    completion.extend(delta)
                    mask.extend([0] * len(delta))
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
        }

    async def _wait(self, turn: int) -> None:
        waits = [self.talks.waits(row)[turn] for row in range(self.talks.rows)]
        await asyncio.gather(*(asyncio.sleep(seconds) for seconds in waits))


class Update(Training):
    """Scores and update alone: the conversations are given."""

    def rollout_func(self) -> Any:
        return self._hand_out

    def _hand_out(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        requests = self.talks.requests()
        cuts = [len(talk.history(0)) for talk in requests]
        return {
            "prompt_ids": [talk.ids[:cut] for talk, cut in zip(requests, cuts, strict=True)],
            "completion_ids": [talk.ids[cut:] for talk, cut in zip(requests, cuts, strict=True)],
            "logprobs": None,
            "env_mask": [talk.mask[cut:] for talk, cut in zip(requests, cuts, strict=True)],
        }


TASKS: dict[str, Callable[[Mapping[str, Any]], Task]] = {"step": Step, "turns": Turns, "update": Update}


def make(job: Mapping[str, Any]) -> Task:
    """The task that a job asks for."""
    return TASKS[job["task"]](job)


if __name__ == "__main__":
    serve(make)
