"""Models with adapters: transformers models whose modules PEFT has wrapped.

To the engine such a model is like any other. Folders of the base are read and written by the base's
names of parameters, which `Adapted` maps to those of the model.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megatrain.base.seeds import derived_seed
from megatrain.compat import peft
from megatrain.errors import InputError, Unsupported, explained, in_one_line

Values = Mapping[str, Callable[[], Tensor]]  # functions that return tensors, by name


@dataclass(frozen=True)
class Adapted:
    """The adapter of a model, and the base without it."""

    base: PreTrainedModel  # the model without the adapter and without weights
    # names in the model -> names in the base, of the base's parameters and buffers
    base_names: Mapping[str, str]
    copies: Mapping[str, str]  # the same for trained copies of the base's (modules_to_save)
    config: Any
    name: str

    @property
    def names(self) -> dict[str, str]:
        """Names in the base -> names in the model."""
        return {base_name: name for name, base_name in self.base_names.items()}

    @property
    def replaced(self) -> set[str]:
        """Names in the base of tensors that are unused, as the adapter has a copy of them."""
        return {*self.copies.values()}

    def as_json(self) -> dict[str, Any]:
        """The adapter as JSON for checkpoints; `restored` reads it."""
        return {"active": self.name, "configs": {self.name: peft.as_json(self.config)}}


_adapted: WeakKeyDictionary[nn.Module, Adapted] = WeakKeyDictionary()


def adapted(model: nn.Module) -> Adapted | None:
    """The adapter of a model; None: the model has none."""
    return _adapted.get(model)


def require_held(model: PreTrainedModel) -> None:
    """Raises InputError: an adapter's folder would lack trained tensors or rows of added tokens."""
    adapters = adapted(model)
    if adapters is None:
        return
    _check_added_tokens(adapters)
    in_file = {*peft.file_names(model, adapters.name).values()}
    outside = [n for n, p in model.named_parameters() if p.requires_grad and n not in in_file]
    if outside:
        others_text = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        raise InputError(
            f"an adapter's folder does not hold {outside[0]}{others_text}, trained beside the "
            "adapter: train their modules by the adapter's modules_to_save, or write the merged "
            "model (save_pretrained with merged=True, megatrain export --merged)"
        )


def refuse_idle(model: nn.Module, layers: Iterable[Any], called: set[int]) -> None:
    """Raises Unsupported: layers read the weights of adapted modules without calling the modules.

    Args: `called`: the ids of all modules that layers have called.
    """
    idle: tuple[str, ...] = ()  # beginnings of parameters' names
    for layer in layers:
        wrappers = peft.wrappers(layer.kind.module)
        idle += tuple(f"{layer.name}.{path}." for path, m in wrappers if id(m) not in called)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if idle and all(name.startswith(idle) for name in trained):
        raise Unsupported(
            f"adapter: the model reads the weight of {idle[0][:-1]} without calling the module, so "
            "an adapter of it would change nothing and learn nothing; adapt other modules"
        )


def _check_added_tokens(adapters: Adapted) -> None:
    """Raises InputError: the base has rows of added tokens that its saved folder lacks."""
    config, base = adapters.config, adapters.base
    if not config.base_model_name_or_path:
        return
    try:
        saved, _ = PreTrainedConfig.get_config_dict(
            config.base_model_name_or_path, revision=config.revision, local_files_only=True
        )
    except OSError:
        return  # the base's configuration cannot be read
    old_size = saved.get("text_config", saved).get("vocab_size")
    size = base.config.get_text_config(decoder=True).vocab_size
    if old_size in (None, size):
        return
    tables = [base.get_input_embeddings(), base.get_output_embeddings()]
    weights = {id(table.weight) for table in tables if table is not None}
    resized = {name for name, p in base.named_parameters() if id(p) in weights}
    if resized - adapters.replaced:
        raise InputError(
            f"the model has {size} tokens, its base {config.base_model_name_or_path} {old_size}, "
            "and an adapter's folder does not hold the others; train embedding and head by "
            "modules_to_save, or write the merged model (save_pretrained, merged=True)"
        )


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The base of a model with an adapter; any other model as it is."""
    adapters = adapted(model)
    return model if adapters is None else adapters.base


def with_adapter(base: PreTrainedModel, config: Any, name: str = "default") -> PreTrainedModel:
    """A copy of a model without weights, with an adapter without weights."""
    model = peft.with_its_config(base)
    config = copy.deepcopy(config)  # PEFT fills in this model's values
    peft.inject(model, config, name)
    _adapted[model] = Adapted(base, *peft.base_names(model), config, name)
    return model


def linears_with_own_forward(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Last parts of names of linear modules with a forward of their own: PEFT cannot wrap these."""
    linears = [(name, type(m)) for name, m in modules if isinstance(m, nn.Linear)]
    own = {name.rpartition(".")[2] for name, c in linears if c.forward != nn.Linear.forward}
    return sorted(own)


def _all_linear(config: Any, model: PreTrainedModel) -> Any:
    """The configuration for all linear modules of the language model that PEFT can wrap."""
    from megatrain.compat.transformers import decoder_of

    config, decoder = copy.copy(config), decoder_of(model)
    path = next(name for name, module in model.named_modules() if module is decoder)
    modules = dict(decoder.named_modules())
    # PEFT leaves out a module if one of these patterns matches its whole path.
    patterns = [rf".*\.{name}" for name in linears_with_own_forward(modules.items())]
    if path:
        linears = [name for name, m in modules.items() if isinstance(m, nn.Linear)]
        config.target_modules = {name.rpartition(".")[2] for name in linears}
        patterns.append(rf"(?!{re.escape(path)}\.).*")  # all modules outside the decoder
    excluded = config.exclude_modules
    if excluded and not isinstance(excluded, str):
        excluded = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(excluded)))})"
    if patterns:
        config.exclude_modules = "|".join([*patterns, *filter(None, [excluded])])
    return config


def with_new_adapter(base: PreTrainedModel, config: Any) -> PreTrainedModel:
    """`with_adapter`; the configuration is also checked if the adapter has no weights yet.

    Raises InputError: names match nothing in the model; PEFT would ignore them.
    """
    if getattr(config, "has_weights", False):
        return with_adapter(base, config)
    _refuse_unknown_modules(base, config)
    if config.target_modules == "all-linear":
        config = _all_linear(config, base)
    model = with_adapter(base, config)
    _refuse_unmatched_patterns(model, config)
    return model


def _refuse_unknown_modules(base: PreTrainedModel, config: Any) -> None:
    """Raises InputError: a name of a module is the end of no module's path."""
    modules = [f".{name}" for name, _ in base.named_modules()]
    word = str(config.target_modules)
    if re.fullmatch(r"[\w-]+", word) and f".{word}" not in (*modules, ".None", ".all-linear"):
        raise InputError(  # to PEFT a word is a pattern of whole names
            f"adapter: target_modules is {word!r}, and no module's whole name is that; take "
            f"all-linear, or a list: [{word}]"
        )
    for key in ("target_modules", "exclude_modules", "modules_to_save"):
        names, dot = set(_listed(getattr(config, key))), "."
        if key == "modules_to_save":  # here PEFT compares the end of a path, also within a name
            names, dot = names - peft.heads_named(config), ""
        for name in sorted(names):
            if not any(path.endswith(f"{dot}{name}") for path in modules):
                leaves = dict.fromkeys(full.split(".")[-2] for full, _ in base.named_parameters())
                raise _unmatched(f"the model has no module {name!r} ({key})", leaves)


def _refuse_unmatched_patterns(model: PreTrainedModel, config: Any) -> None:
    """Raises InputError: a pattern or a layer's number matches no adapted module."""
    paths = set()
    for path, module in peft.wrappers(model):
        if not peft.is_copy(module):
            paths.add(".".join(filter(None, (peft.base_path(path), peft.parameter_of(module)))))
    for key in ("rank_pattern", "alpha_pattern", "target_parameters"):
        for pattern in getattr(config, key, None) or ():
            if not any(re.fullmatch(rf"(.*\.)?({pattern})", path) for path in paths):
                raise _unmatched(f"no adapted module matches {pattern!r} ({key})", sorted(paths))
    for index in _listed(config.layers_to_transform):
        if not any(str(index) in path.split(".") for path in paths):
            problem = f"no module of layer {index} is adapted (layers_to_transform, from 0 on)"
            raise _unmatched(problem, sorted(paths))


def _unmatched(problem: str, names: Iterable[str]) -> InputError:
    return InputError(f"adapter: {problem}; there are {in_one_line(', '.join(names), 200)}")


def _listed(value: Any) -> list[Any]:
    """A key's names or numbers as a list; empty for a regular expression."""
    if isinstance(value, str) or value is None:
        return []
    return [value] if isinstance(value, int) else sorted(value)


def note_adapter(model: PreTrainedModel, config: Any, name: str) -> None:
    """Register the model of a PeftModel, which has no weights here, as one with an adapter."""
    peft.tidy(model)
    _adapted[model] = Adapted(peft.stripped(model), *peft.base_names(model), config, name)


def restored(base: PreTrainedModel, saved: Mapping[str, Any]) -> PreTrainedModel:
    """The model with the adapter of `Adapted.as_json`.

    Raises InputError: this version of PEFT does not support the adapter.
    """
    problem = "the checkpoint's adapter cannot be made again"
    with explained(problem, of=(AttributeError, LookupError, TypeError, ValueError)):
        [(name, config)] = saved["configs"].items()
        return with_adapter(base, peft.from_json(config), name)


def draw_adapters(
    model: PreTrainedModel, read: Values, write: Callable[[str, Tensor], None], seed: int
) -> None:
    """Pass an adapter's initial values to `write`.

    Args:
        read: functions that return the base's parameters and buffers, by their names in the model.
        seed: of random values; torch's default generator is seeded for each module.
    """
    adapters = _adapted[model]
    state = model.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(state.items())}
    num_parameters = len(dict(model.named_parameters()))
    for number, (path, module) in enumerate(peft.wrappers(model)):
        tensors = peft.inner(module).state_dict(keep_vars=True)
        base = {name: read[first_names[id(tensor)]] for name, tensor in tensors.items()}
        if peft.is_copy(module):
            for name, original in base.items():
                write(f"{path}.modules_to_save.{adapters.name}.{name}", original())
            continue
        torch.default_generator.manual_seed(derived_seed(seed, number, num_parameters))
        weights = {n: value() for n, value in base.items()} if adapters.config.use_dora else {}
        values = peft.initial_values(module, adapters.config, adapters.name, weights)
        for name, value in values.items():
            write(f"{path}.{name}", value)


def merged_into_base(model: PreTrainedModel, values: Values) -> dict[str, Callable[[], Tensor]]:
    """Functions that return the base's parameters with the adapter merged, by names in the base.

    Raises InputError: a parameter to merge into is tied to another module, or does not exist.
    """
    adapters = _adapted[model]
    out = {adapters.base_names[n]: value for n, value in values.items() if n in adapters.base_names}
    named = list(model.named_parameters(remove_duplicate=False))
    first_name = {id(p): name for name, p in reversed(named)}
    num_uses = Counter(id(p) for _, p in named)
    for path, module in peft.wrappers(model):
        is_copy = peft.is_copy(module)
        tensors = dict(peft.inner(module).named_parameters())
        adapted_name = peft.parameter_of(module)  # None: the wrapper adapts the whole module
        base_path = peft.base_path(path)
        if not is_copy and module.lora_bias[adapters.name] and "bias" not in tensors:
            raise InputError(
                f"{path} has no bias that the adapter's (lora_bias) could be merged into; export "
                "the adapter instead"
            )
        for name, parameter in tensors.items():
            if adapted_name not in (None, name):
                continue
            if num_uses[id(parameter)] > 1:
                raise InputError(
                    f"{path} is tied to another module, and merging would change both; export the "
                    "adapter instead"
                )
            if not is_copy:
                own_values = {n: values[first_name[id(p)]] for n, p in module.named_parameters()}
                out[f"{base_path}.{name}"] = partial(
                    peft.merged, module, adapters.name, own_values, name
                )
    copies = adapters.copies
    return out | {copies[name]: value for name, value in values.items() if name in copies}
