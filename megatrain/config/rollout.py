"""The section that says how a run makes replies, and what rewards them."""

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from megatrain.config.learning import LossSection
from megatrain.config.section import Natural, Positive, Section, shown
from megatrain.errors import InputError

if TYPE_CHECKING:
    from megatrain.loss import ImportanceSampling, Loss


def _function(written: str) -> str:
    if not re.fullmatch(r".+:[A-Za-z_]\w*", written):
        raise ValueError(
            f"{shown(written)} names no function: write module:function or file.py:function"
        )
    return written


def _address(written: str) -> str:
    if not re.match(r"https?://", written):
        raise ValueError(f"should be an address, as http://127.0.0.1:8000, got {shown(written)}")
    return written


class RolloutSection(Section):
    """How replies to prompts are made, for losses that reward them (docs/rollouts.md).

    `rewards`: functions, each as `module:function` or `file.py:function`; `weights`: of each, null:
    1. The others say how tokens are drawn; `batch_size`: replies made together, null: all of a
    step. `server`: address of a vLLM server that makes them; weights go to it through the folder
    `server_weights`, and each request may take `server_seconds`. `importance_sampling_...`: how
    grpo corrects for what a server draws otherwise than the engine would, as TRL's
    `vllm_importance_sampling_...`.
    """

    rewards: list[Annotated[str, AfterValidator(_function)]] = Field(default_factory=list)
    weights: list[float] | None = None
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Natural = 0
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    batch_size: Positive | None = None
    server: Annotated[str, AfterValidator(_address)] | None = None
    server_weights: str | None = None
    server_seconds: Annotated[float, Field(gt=0)] = 600.0
    importance_sampling_mode: Literal[
        "sequence_mask", "sequence_truncate", "token_mask", "token_truncate", "none"
    ] = "sequence_mask"
    importance_sampling_clip_max: float | None = 3.0
    importance_sampling_clip_min: float | None = None

    @model_validator(mode="after")
    def _folder_of_the_server(self) -> Self:
        if (self.server is None) != (self.server_weights is None):
            raise ValueError(
                "rollout.server and rollout.server_weights go together: an address, and a folder "
                "that the server sees under the same path, to which the weights are written"
            )
        return self

    @model_validator(mode="after")
    def _weights_of_rewards(self) -> Self:
        if self.weights is not None and len(self.weights) != len(self.rewards):
            raise ValueError(
                f"give as many weights as rewards: {len(self.rewards)}, not {len(self.weights)}"
            )
        if self.weights and not any(self.weights):
            raise ValueError("all weights are 0, so that nothing would be rewarded")
        return self

    @model_validator(mode="after")
    def _possible_importance_sampling(self) -> Self:
        from megatrain.loss import ImportanceSampling

        try:
            found = self.importance_sampling()
        except InputError as error:
            raise ValueError(f"rollout: {error}") from error
        if self.server is None and found != ImportanceSampling():
            raise ValueError(
                "rollout.importance_sampling_... corrects for replies of a server; leave it out, "
                "or give rollout.server"
            )
        return self

    def importance_sampling(self) -> "ImportanceSampling | None":
        """The correction for replies of a server; None: there shall be none."""
        from megatrain.loss import ImportanceSampling

        if self.importance_sampling_mode == "none":
            return None
        bounds = self.importance_sampling_clip_max, self.importance_sampling_clip_min
        return ImportanceSampling(self.importance_sampling_mode, *bounds)


def step_loss(loss: LossSection, rollout: RolloutSection) -> "Loss":
    """The loss as steps of a run take it: of replies as they are drawn."""
    made = loss.loss()
    at: dict[str, Any] = {}
    if loss.kind == "prompts":
        at["temperature"] = rollout.temperature
    if loss.name == "grpo" and rollout.server is not None:
        at["importance_sampling"] = rollout.importance_sampling()
    return replace(made, **at)  # type: ignore[type-var]  # a dataclass, as all losses are


def check_rollout(rollout: RolloutSection, loss: LossSection, sequence_length: int) -> None:
    """Raises ValueError: a loss of rewarded replies lacks what it needs, or another has it."""
    from megatrain.loss import ImportanceSampling

    if loss.kind != "prompts":
        if rollout != RolloutSection():
            raise ValueError(f"rollout is for loss.name grpo or rloo, and this is {loss.name}")
        return
    if loss.name != "grpo" and rollout.importance_sampling() not in (None, ImportanceSampling()):
        raise ValueError(
            f"rollout.importance_sampling_... is for loss.name grpo, and this is {loss.name}: "
            "leave it out"
        )
    if not rollout.rewards:
        raise ValueError(
            f"loss.name {loss.name} needs rollout.rewards: functions, as [rewards.py:reward]"
        )
    most = loss.max_completion_length or 0
    if most >= sequence_length:
        raise ValueError(
            f"data.sequence_length ({sequence_length}) is of a prompt and its reply together: it "
            f"must be above loss.max_completion_length ({most})"
        )
