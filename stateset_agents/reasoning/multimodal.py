"""`MultiModalGRPO`: GRPO of a vision-language model, a text and a picture at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from stateset_agents.backends.pretrained.pictures import vision_tower
from stateset_agents.core.reward import RewardFunction
from stateset_agents.reasoning.trainer import Group, GRPOTrainer, PicturePrompt
from stateset_agents.runtime.pending_calls import awaitable_or_blocking
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.images import Image
from stateset_agents.types.scenario import Scenario

Picture = Image | bytes | Path
"""A picture, the bytes of its file, or where that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureProblem:
    """A text and a picture that belong together, or a text alone."""

    text: str
    """The question, as a user says it."""
    image: Picture | None = None
    context: Mapping[str, Any] = field(default_factory=dict)
    """The truth, for the reward."""


class MultiModalGRPO:
    """`GRPOTrainer` of a vision-language model whose prompts are a picture and a text.

    >>> async with MultiModalGRPO(model, None, processor, reward, kl_coef=0.0) as trainer:
    ...     group = await trainer.process_problem("add them", Path("digits.png"), {"answer": 12})
    ...     print(group["responses"], group["rewards"])
    ...     print(await trainer.train_step(problems))

    The model fuses text and picture itself: the features of its vision encoder take the places that its
    processor left for them in the prompt. Conversations of several turns, run folders and checkpoints are
    `MultiTurnGRPOTrainer`'s, with any environment whose messages have pictures.
    """

    def __init__(
        self,
        policy_model: Any,
        ref_model: Any,
        processor: Any,
        reward_fn: RewardFunction | Callable[..., Any],
        *,
        freeze_vision: bool = False,
        **settings: Any,
    ) -> None:
        """`policy_model`, of AutoModelForImageTextToText, is trained in its place; `processor` is its own;
        `settings` and the other arguments are those of `GRPOTrainer`. Raises ConfigurationError as that
        does, and for a model or a processor without an image token."""
        self._processor = processor
        self.trainer = GRPOTrainer(
            policy_model,
            ref_model,
            processor.tokenizer,
            reward_fn,
            processor=processor,
            freeze_vision=freeze_vision,
            **settings,
        )

    async def __aenter__(self) -> Self:
        await self.trainer.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.trainer.close()

    @property
    def vision_encoder(self) -> Any:
        """The vision encoder of the live model."""
        return vision_tower(self.trainer.policy_model)

    def fuse_modalities(
        self, text: str, image: Picture | None = None, context: Mapping[str, Any] | None = None
    ) -> PicturePrompt:
        """The prompt of both: the picture, then the text, as the processor's chat template writes a user's
        message; without a template they stand behind one another, and without a picture the text stands
        alone. Blocking where `image` is a path."""
        if isinstance(image, Path):
            image = image.read_bytes()
        pictures = () if image is None else (Image(data=image) if isinstance(image, bytes) else image,)
        if self._processor.chat_template:
            parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": text}]
            prompt = self._processor.apply_chat_template(
                [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
            )
        else:
            prompt = f"{self._processor.image_token * len(pictures)}{text}"
        name = f"picture-{pictures[0].digest}" if pictures else ""  # of a text the trainer makes the id
        scenario = Scenario(id=name, opening=prompt, context=dict(context or {}))
        return PicturePrompt(scenario=scenario, images=pictures)

    @awaitable_or_blocking
    async def process_problem(
        self, text: str, image: Picture | None, context: Mapping[str, Any] | None = None
    ) -> Group:
        """A group of replies to one problem, with rewards, and advantages in their group; nothing trains.
        `image` is None for a problem of words alone.

        Raises ConfigurationError for a picture that cannot be read.
        """
        prompt = await in_thread(self.fuse_modalities, text, image, context)
        (group,) = await self.trainer.generate_groups([prompt])
        return group

    @awaitable_or_blocking
    async def train_step(self, problems: Sequence[PictureProblem]) -> dict[str, float]:
        """One step of GRPO on these problems; returns what `GRPOTrainer.train_step` does."""
        prompts = [
            await in_thread(self.fuse_modalities, problem.text, problem.image, problem.context)
            for problem in problems
        ]
        return await self.trainer.train_step(prompts)
