"""The section of a run file that says which model is trained."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from megatrain.config.section import Name, Pattern, Section


class ModelSection(Section):
    """What is trained: a pretrained `path`, or a `config` to be randomly initialised.

    `chat_template`: a Jinja file that takes the place of the tokenizer's own, in the result, too.
    `eos_token`: the token that ends texts, instead of the tokenizer's own; also in the result. What
    the chat template ends replies with is known without it.
    `base`: how frozen linear layers are kept, see docs/adapters.md.
    `base_model`: where the base of the adapter is now, if it is not where `path`, the adapter's
    folder or the checkpoint says.
    `router_aux_loss_coef`: weight of the loss that balances experts; null: as the model says.
    `freeze`, `train_only`: regular expressions searched for in parameters' names, of what is not
    trained, and of all that is; null: everything.
    """

    path: Name | None = None
    config: dict[str, Any] | None = None
    tokenizer: Name | None = None
    chat_template: Name | None = None
    eos_token: Annotated[str, Field(min_length=1)] | None = None
    freeze: list[Pattern] = Field(default_factory=list)
    train_only: Annotated[list[Pattern], Field(min_length=1)] | None = None
    base: Literal["bf16", "fp8", "nf4"] = "bf16"
    base_model: Name | None = None
    router_aux_loss_coef: Annotated[float, Field(ge=0)] | None = None
    trust_remote_code: bool = False
    attn_implementation: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.config is None):
            raise ValueError("give either path (a hub id or a folder) or config (random start)")
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config needs a model_type, such as llama")
        if self.config is not None and self.base_model is not None:
            raise ValueError("base_model needs path: what is drawn has no base")
        if self.config is not None and self.tokenizer is None:
            raise ValueError(
                "a model with config needs a tokenizer (a hub id or a folder; "
                "megatrain.data.train_bpe_tokenizer makes one of text files)"
            )
        return self
