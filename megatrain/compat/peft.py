"""All uses of PEFT, an optional dependency, which wraps modules of a model."""

import copy
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatrain.compat import transformers as models
from megatrain.errors import InputError, explained, in_one_line

Model = TypeVar("Model", bound=nn.Module)

# The keys of LoraConfig that are supported; others must keep their defaults.
KEYS = frozenset((
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out",
    "bias", "use_rslora", "modules_to_save", "init_lora_weights", "layers_to_transform",
    "layers_pattern", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias", "target_parameters",
))  # fmt: skip
_FILE_KEYS = frozenset((  # keys of adapter_config.json that are no settings of training
    "peft_type", "task_type", "base_model_name_or_path", "revision", "inference_mode",
    "auto_mapping", "peft_version",
))  # fmt: skip
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
FILE_PREFIX = "base_model.model."  # begins all parameters' names in an adapter's file
_CLASSES = ("SEQ_CLS", "TOKEN_CLS")  # PEFT's tasks for models that give classes or scores
_HEADS = {"classifier", "score"}  # names that PEFT adds to modules_to_save for these tasks
_INITS = (True, False, "gaussian")  # other values change the base's weights, or need data
_UNCHANGED_BASE = ("gaussian", "orthogonal", "eva")  # init_lora_weights that leave the base alone
_INIT_KEYS = ("eva_config", "corda_config", "loftq_config", "lora_ga_config")


def _library() -> Any:
    try:
        import peft
    except ImportError as error:
        raise InputError("adapters need PEFT; pip install 'megatrain[peft]'") from error
    return peft


def is_peft_model(model: object) -> bool:
    """True if a model is one of PEFT's."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel | peft.PeftMixedModel)


def has_adapter(model: object) -> bool:
    """True if a model has adapters: it is a PeftModel, or transformers has added them."""
    return is_peft_model(model) or isinstance(getattr(model, "peft_config", None), dict)


def without_wrapper(model: Any) -> Any:
    """The transformers model inside a PeftModel; any other model unchanged."""
    if is_peft_model(model) and isinstance(model, _library().PeftMixedModel):
        raise InputError("the model is a PeftMixedModel; make it without mixed=True")
    return model.get_base_model() if is_peft_model(model) else model


def unwrapped(model: Any) -> tuple[nn.Module, Any, str]:
    """The model inside a PeftModel (or with adapters), its adapter's configuration and name."""
    active = model.active_adapters if is_peft_model(model) else [*model.peft_config]
    if len(active) != 1:
        raise InputError(
            f"the PeftModel has {len(active)} active adapters; take one: set_adapter(name)"
        )
    if inactive := sorted(model.peft_config.keys() - active):
        raise InputError(
            f"the PeftModel has {', '.join(inactive)} beside its active adapter {active[0]}, and "
            f"one is saved: save them first with PEFT, then delete_adapter({inactive[0]!r})"
        )
    inner = without_wrapper(model)
    has_no_weights = any(parameter.is_meta for parameter in inner.parameters())
    config = copy.copy(model.peft_config[active[0]])
    vars(config).update({} if has_no_weights else _with_weights(vars(config)))
    check(config)
    if any(module.merged for _, module in wrappers(inner) if hasattr(module, "merged")):
        raise InputError("an adapter of the PeftModel is merged; call unmerge_adapter()")
    return inner, config, active[0]


def lora_config(keys: Mapping[str, Any]) -> Any:
    """Make a LoraConfig of `keys` and check it; unsupported keys must have their defaults.

    Raises InputError: PEFT is not installed, or a key is not supported or has a bad value.
    """
    if (kind := str(keys.get("peft_type") or "LORA")) not in ("LORA", "PeftType.LORA"):
        raise InputError(f"the adapter's peft_type is {kind}; only LORA is supported")
    defaults, accepted = _library().LoraConfig().to_dict(), KEYS | _FILE_KEYS
    unknown = keys.keys() - accepted
    # None, False and empty values count as equal.
    changed = sorted(n for n in unknown if (keys[n] or None) != (defaults.get(n) or None))
    if changed:
        raise InputError(
            f"adapter: {changed[0]!r} is not supported; there are {', '.join(sorted(KEYS))}"
        )
    for name in ("r", "lora_alpha", "lora_dropout"):
        if isinstance(keys.get(name, 1), str):
            raise InputError(f"adapter: {name} is {keys[name]!r}, a text; give a number")
    with explained("adapter", of=(ImportError, TypeError, ValueError)):
        config = _library().LoraConfig(**{n: value for n, value in keys.items() if n in accepted})
    check(config)
    return config


def check(config: Any) -> None:
    """Raise InputError if a configuration is not LoRA's, or has an unsupported setting."""
    lora = _library().LoraConfig
    if type(config) is not lora:
        raise InputError(
            f"the adapter is of {type(config).__name__}; take LoraConfig (LoRA, rsLoRA, DoRA)"
        )
    if config.init_lora_weights not in _INITS:
        init = config.init_lora_weights
        raise InputError(
            f"the adapter's init_lora_weights is {init!r}; take true, false or gaussian"
        )
    defaults, settings = lora().to_dict(), config.to_dict()
    for name in sorted(settings.keys() - KEYS - _FILE_KEYS):
        if (settings[name] or None) != (defaults.get(name) or None):  # PEFT adds empty values
            value = in_one_line(repr(settings[name]), 60)
            instead = "; modules_to_save trains whole embeddings" if "token" in name else ""
            raise InputError(
                f"the adapter has {name} = {value}, which is not supported; leave it out{instead}"
            )


def of_scores(config: Any) -> bool:
    """True if an adapter is for a model that gives classes or scores, whose head it includes."""
    return config.task_type in _CLASSES or bool(_HEADS & {*(config.modules_to_save or ())})


def scoring(config: Any, model: nn.Module) -> Any:
    """A copy of a PEFT configuration for a model that gives scores or classes.

    It has the model's task, and the model's head in `modules_to_save`, as PEFT itself adds it.
    Raises InputError: the configuration is for another task.
    """
    task = models.task_of(model)
    if config.task_type not in (None, task):
        raise InputError(
            f"the adapter's task_type is {config.task_type}, and the model's is {task}; take that"
        )
    copied = copy.copy(config)
    copied.task_type = task
    heads = {name for name in _HEADS if hasattr(model, name)}
    copied.modules_to_save = sorted({*(config.modules_to_save or ()), *heads})
    return copied


def as_json(config: Any) -> dict[str, Any]:
    """A configuration as plain JSON values."""
    plain = {n: sorted(v) if isinstance(v, set) else v for n, v in config.to_dict().items()}
    return json.loads(json.dumps(plain, default=str))


def from_json(values: Mapping[str, Any]) -> Any:
    """The configuration of an adapter with weights, from values of `as_json` or an adapter's file.

    Raises InputError: PEFT does not take the values, or the adapter's init has changed its base.
    """
    config = lora_config(_with_weights(values))
    config.has_weights = True
    return config


def _with_weights(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values for an adapter that has weights: settings of its init are reset."""
    init = values.get("init_lora_weights", True)
    if init not in _INITS and str(init).lower() not in _UNCHANGED_BASE:
        return dict(values)
    reset = dict.fromkeys(_INIT_KEYS) | {"init_lora_weights": init if init in _INITS else True}
    return {**values, **reset}


def write_config(config: Any, folder: Path, model: nn.Module) -> None:
    """Write an adapter's `adapter_config.json` for PEFT."""
    copied = copy.copy(config)
    copied.inference_mode = True
    task = models.task_of(model)
    if copied.task_type is None and (of_scores(copied) or task == "CAUSAL_LM"):
        copied.task_type = task
    copied.save_pretrained(str(folder))


def is_base(folder: Path, config: Any) -> bool:
    """True if `folder` is the base that an adapter's configuration names."""
    base = config.base_model_name_or_path
    return base is not None and Path(base).expanduser().resolve() == folder.resolve()


def heads_named(config: Any) -> set[str]:
    """Names that PEFT adds to `modules_to_save`, even if a model lacks them."""
    return _HEADS if config.task_type in _CLASSES else set()


def inject(model: nn.Module, config: Any, name: str) -> None:
    """Put an adapter into a model without weights, in place. Raises InputError: PEFT refuses."""
    refusals = AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError
    try:
        with explained("adapter", of=refusals), warnings.catch_warnings():
            # PEFT overlooks patterns of parameters, and warns; callers check patterns.
            warnings.filterwarnings("ignore", ".*_pattern keys did not match", RuntimeWarning)
            _library().inject_adapter_in_model(config, model, name, low_cpu_mem_usage=True)
    except re.error as error:
        message = f"adapter: {error.pattern!r} is not a regular expression: {error}"
        raise InputError(message) from error
    for _, module in wrappers(model):
        module.set_adapter(name)
    tidy(model)


def tidy(model: nn.Module) -> None:
    """Make wrappers of equal layers equal: remove attributes such as names and devices.

    Wrappers of parameters also get a class that registers no parametrization in each forward, which
    would turn the weights bound to a template into buffers.
    """
    for _, module in wrappers(model):
        if parameter_of(module) is not None:
            module.__class__ = _adapted_parameter()
        if isinstance(getattr(module, "kwargs", None), dict):
            module.kwargs = {}


def _classes() -> tuple[type, type]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return BaseTunerLayer, AuxiliaryTrainingWrapper


@cache
def _adapted_parameter() -> type:
    from peft.tuners.lora.layer import ParamWrapper

    class AdaptedParameter(ParamWrapper):
        """PEFT's wrapper of a parameter, with the same results, but without a parametrization.

        If transformers computes the experts by grouped products, adapters add products of their own
        to activations; else they are added to their weight.
        """

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            values: dict[str, Tensor] = {}  # (a call of `dict[...]` would break compiled graphs)
            factors: dict[str, tuple[Tensor, Tensor, float]] = {}
            names, module = [self.parameter_name], self  # wrappers of one module are nested
            while isinstance(module.base_layer, ParamWrapper):
                module = module.base_layer
                names.append(module.parameter_name)
            experts, module = module.base_layer, self
            grouped = models.takes_grouped_products(experts, names)
            for name in names:
                weight, [adapter] = module.get_param(), module.active_adapters
                if adapter in module.lora_A and module.num_experts > 1:
                    a, b, scale = module.get_delta_factors(adapter)
                    if not grouped:
                        values[name] = torch.baddbmm(weight, a, b, alpha=scale)
                    elif experts.is_transposed:
                        factors[name] = a, b, scale
                    else:
                        factors[name] = b.transpose(1, 2), a.transpose(1, 2), scale
                elif adapter in module.lora_A:
                    values[name] = weight + module.get_delta_weight(adapter)
                module = module.base_layer
            if factors:
                return models.experts_forward(experts, factors, x, *args, **kwargs)
            return torch.func.functional_call(experts, values, (x, *args), kwargs)

    if not hasattr(ParamWrapper, "get_delta_factors"):
        raise InputError("target_parameters need a newer PEFT; pip install --upgrade peft")
    return AdaptedParameter


def wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every module that PEFT has wrapped, with its path."""
    classes = _classes()
    return ((n, m) for n, m in model.named_modules() if isinstance(m, classes))


def is_copy(module: nn.Module) -> bool:
    """True if a wrapper trains a copy of its module (`modules_to_save`) instead of an adapter."""
    return isinstance(module, _classes()[1])


def inner(module: Any) -> nn.Module:
    """The base model's module inside a wrapper of PEFT; of `modules_to_save`, not the copy."""
    return module.original_module if is_copy(module) else module.get_base_layer()


def with_its_config(model: Model) -> Model:
    """A copy of a model without weights that shares the original's configuration."""
    config: Any = model.config
    return copy.deepcopy(model, {id(part): part for part in (config, config.get_text_config())})


def stripped(model: Model) -> Model:
    """A copy of a model without weights, without its adapters."""
    base = with_its_config(model)
    for path, module in list(wrappers(base)):
        if base_path(path) != path:
            continue  # inside another wrapper of the same module
        parent, _, name = path.rpartition(".")
        setattr(base.get_submodule(parent), name, inner(module))
    # The embedding's hook is gone with its wrapper; the handle that is left cannot be copied.
    hooks = "_require_grads_hook", "_require_grads_hooks"
    for name in ("peft_config", "_hf_peft_config_loaded", *hooks):
        vars(base).pop(name, None)
    return base


def base_path(path: str) -> str:
    """The path in the base of the module that the wrapper at `path` wraps."""
    while path.endswith(".base_layer"):
        path = path.removesuffix(".base_layer")
    return path


def parameter_of(module: Any) -> str | None:
    """The parameter that a wrapper adapts (`target_parameters`); None: it adapts the module."""
    return getattr(module, "parameter_name", None)


def base_names(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """Names in the base, by names in the model: of the base's tensors, and of trained copies."""
    names: dict[str, str] = {}
    copies: dict[str, str] = {}  # of modules_to_save
    paths = {path for path, _ in wrappers(model)}
    buffers = dict(model.named_buffers())
    for name in (*dict(model.named_parameters(remove_duplicate=False)), *buffers):
        parents = accumulate(name.split("."), "{}.{}".format)
        wrapper = max((path for path in parents if path in paths), key=len, default=None)
        if wrapper is None:
            names[name] = name
            continue
        first, remainder = name[len(wrapper) + 1 :].split(".", 1)
        if first in ("base_layer", "original_module"):
            names[name] = f"{base_path(wrapper)}.{remainder}"
        elif first == "modules_to_save":
            copies[name] = f"{wrapper}.{remainder.split('.', 1)[1]}"
    return names, copies


def file_names(model: nn.Module, active: str) -> dict[str, str]:
    """The parameters' and buffers' names in the model, by their names in an adapter's file."""
    tensors = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}  # of ties the first
    in_file = _library().get_peft_model_state_dict(
        model, dict(tensors), active, save_embedding_layers=False
    )
    return {f"{FILE_PREFIX}{name}": names[id(value)] for name, value in in_file.items()}


def initial_values(
    module: Any, config: Any, active: str, base: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The initial values that PEFT draws for a module's adapter, by names in the wrapper.

    Args: `base`: weights of the wrapped module; empty tensors if the values do not matter.
    """
    model = nn.Module()
    model.inside = copy.deepcopy(inner(module)).to_empty(device="cpu").float()
    model.inside.load_state_dict(base, strict=False)
    config = copy.copy(config)
    config.r, config.lora_alpha = module.r[active], module.lora_alpha[active]
    config.rank_pattern, config.alpha_pattern, config.target_modules = {}, {}, ["inside"]
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.target_parameters = None
    if parameter := parameter_of(module):
        config.target_modules, config.target_parameters = [], [f"inside.{parameter}"]
    config.modules_to_save, config.bias = None, "none"
    _library().inject_adapter_in_model(config, model, active)
    parameters = dict(model.inside.named_parameters())
    return {n: p.detach() for n, p in parameters.items() if not n.startswith("base_layer.")}


def merged(
    module: Any, active: str, values: Mapping[str, Callable[[], Tensor]], name: str
) -> Tensor:
    """A parameter of a wrapped module with the active adapter merged into it, in fp32.

    Args: `values`: functions that return the wrapper's parameters, by their names in it.
    """
    wrapper = copy.deepcopy(module).float().to_empty(device="cpu")
    wrapper.load_state_dict({n: value() for n, value in values.items()}, strict=False)
    wrapper.merge(adapter_names=[active])
    return wrapper.get_base_layer().get_parameter(name).detach()
