"""The section of a run file for what is trained on a frozen base."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megatrain.compat import peft
from megatrain.config.section import Fraction, Name, Pattern, Positive, Section, a_pattern
from megatrain.errors import InputError


class AdapterSection(Section):
    """LoRA, rsLoRA or DoRA, by the keys of PEFT's LoraConfig; `method: lora` says that it is used.

    `target_modules`: names of modules, a regular expression, or `all-linear`; null: what PEFT takes
    for the model's family. `target_parameters`: names of weights, such as those of experts.
    """

    method: Literal["lora"] | None = None
    r: Positive = 8
    lora_alpha: Positive = 8
    target_modules: list[Name] | Name | None = None
    target_parameters: list[Name] | None = None
    exclude_modules: list[Name] | Name | None = None
    lora_dropout: Fraction = 0.0
    bias: Literal["none", "all", "lora_only"] = "none"
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    modules_to_save: list[Name] | None = None
    init_lora_weights: bool | Literal["gaussian"] = True
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[Name] | Name | None = None
    rank_pattern: dict[Pattern, Positive] = Field(default_factory=dict)
    alpha_pattern: dict[Pattern, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    fan_in_fan_out: bool = False

    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def _names_or_a_pattern(cls, given: Any) -> Any:
        return a_pattern(given) if isinstance(given, str) else given

    @property
    def keys(self) -> dict[str, Any] | None:
        """As `Engine` takes it; None: there is no adapter."""
        return None if self.method is None else self.model_dump(exclude={"method"})

    @model_validator(mode="after")
    def _taken_by_peft(self) -> Self:
        if self.method is None:
            for name, field in type(self).model_fields.items():
                if getattr(self, name) != field.get_default(call_default_factory=True):
                    raise ValueError(f"{name} needs method: lora")
            return self
        try:
            peft.lora_config(self.keys or {})
        except InputError as error:
            raise ValueError(str(error).removeprefix("adapter: ")) from error
        return self
