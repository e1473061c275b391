"""Placement: every choice of where state rests and how it is scheduled, as one frozen value.

The choices trade memory for time. With eager layers none of them changes a bit of the result, but
for `chunk_tokens` and `head_tokens`, with which sums have another order (tests/race).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from megatrain.errors import InputError

# The least value of each choice that is a number; a default of None is allowed besides.
_LEAST: dict[str, int] = {
    **dict.fromkeys(("host_grad_buffers", "layer_input_lanes", "head_tokens"), 1),
    **dict.fromkeys(("update_threads", "gradient_lanes", "chunk_tokens", "passes"), 1),
    **dict.fromkeys(("save_activations", "offload_activations", "save_all", "keep_weights"), 0),
    **dict.fromkeys(("disk_moments", "disk_remainder", "disk_weights", "prefetch"), 0),
    **dict.fromkeys(("save_bytes", "slots"), 0),
}

# Choices that count buffers, of which `_MOST` are enough for any model.
_COUNTS = ("slots", "gradient_lanes", "host_grad_buffers", "layer_input_lanes")
_MOST = 10_000

_PLACES = ("none", "device", "host")

RENAMED = {
    "slabs": "host_grad_buffers",
    "boundaries": "layer_inputs",
    "boundary_lanes": "layer_input_lanes",
    "keep_layers": "save_activations",
    "offload_layers": "offload_activations",
    "keep_attention": "save_attention",
    "tile_tokens": "chunk_tokens",
}
"""Old names of choices, which old checkpoints and results have -> their new names."""


def renamed(choices: Mapping[str, Any]) -> dict[str, Any]:
    """The choices of a saved placement by their current names, without given-up ones (None)."""
    current = {RENAMED.get(name, name): value for name, value in choices.items()}
    return {n: v for n, v in current.items() if v is not None or n in Placement.names()}


def old_name(name: str) -> str | None:
    """The reason why a former name of a choice is refused; None: the name is no former one."""
    if name in ("max_stream_bytes", "split_bytes"):
        return f"{name!r} has been given up: heads are streamed as a whole; leave it out"
    return f"{name!r} is now called {RENAMED[name]!r}" if name in RENAMED else None


Precision = Literal["bf16", "fp32", "fp8"]
"""The dtype that layers are computed in; fp8: bf16, but for the products of linear modules."""

Verify = Literal["step", "save", "off"]
"""When planes are compared with their checksums."""

Saves = Literal["nothing", "attention", "graph", "all"]


@dataclass(frozen=True)
class ActivationPolicy:
    """The part of a layer's forward that is saved for its backward; the rest is recomputed."""

    # nothing but the layer's inputs; the results of its attention as well; its graph (of which
    # compiled layers recompute about half); or its whole graph ("all")
    saves: Saves = "nothing"
    # the place of the saved tensors: the device or pinned host memory
    where: Literal["device", "host"] = "device"


RECOMPUTE = ActivationPolicy()


@dataclass(frozen=True)
class Placement:
    """How a model is spread over the tiers and streamed.

    Attributes:
        slots: device buffers for the weights of one layer each; a larger tile takes several. 1
            means no overlap of copies. 0: layers read weights in place in host memory, and write
            rounded gradients there for the update; in fp32 gradients are summed there, too.
        prefetch: tiles loaded ahead of the one in use, at most `slots - 1`; None: `slots - 1`.
        gradient_lanes: pieces of a gradient (32 MiB in bf16) being sent at once; None: as
            many as the largest layer has, so that no layer waits for the bus.
        keep_rows: embedding rows stay on the device from the forward to their backward; else they
            cross the bus twice.
        host_grad_buffers: host buffers for gradients in flight without clipping; with clipping each
            tile has one, since no update may start before the global norm is known.
        layer_inputs: the place where a layer's input waits for its backward.
        layer_input_lanes: copies of layer inputs in flight at once, when they go to the host.
        resident: tiles that rest on the device with all their state, and are updated there
            (`embedding`, `prologue`, `layer 0`, ..., `head`).
        keep_weights: tiles that rest elsewhere, whose weights stay on the device from one update to
            the next, and cross the bus once a step: the head, and then layers, evenly spread.
        save_activations: layers whose graph is saved on the device, not recomputed: the last ones
            but for those of `offload_activations`.
        offload_activations: layers whose graph is saved in pinned host memory, evenly spread over
            all.
        save_all: layers whose graph is saved whole, so that nothing of it is computed again: the
            last ones of those of `save_activations`.
        passes: groups of micro-batches that go through both sweeps one after the other; weights
            cross the bus for each, and fp32 sums of all gradients stay on the device meanwhile.
        save_attention: the place where the other layers' attention results wait for the backward,
            which then does not recompute them; for eager layers, as with `chunk_tokens`.
        head_tokens: the number of tokens whose logits exist, and are normed, at once.
        chunk_tokens: modules that act on each token alone (the MLP, norms) run over chunks of so
            many tokens, and again in the backward; the rest of a layer is eager. None: whole rows.
        compile: compile one forward and one backward per layer kind with torch.compile.
        update_threads: host threads of the optimizer; None: all cores but two.
        save_bytes: host memory at most for parts of tiles whose update is due before a save in the
            background has written them; when it is full, updates wait. None: half of what is free.
        disk_moments: tiles whose moments (all that the optimizer's rule keeps) rest on the engine's
            disk between updates: layers, evenly spread, then others; none that are resident.
        disk_remainder: the same for the remainders, the other half of the fp32 masters.
        disk_weights: layers whose weights rest on the disk, from which both sweeps read them.
        own_experts: each of several ranks streams its own experts alone, and computes them for the
            tokens of all ranks; else experts are cut and gathered like all weights.
    """

    slots: int = 2
    prefetch: int | None = None
    gradient_lanes: int | None = None
    keep_rows: bool = True
    host_grad_buffers: int = 2
    layer_inputs: Literal["device", "host"] = "device"
    layer_input_lanes: int = 4
    resident: tuple[str, ...] = ()
    save_activations: int = 0
    save_all: int = 0
    offload_activations: int = 0
    save_attention: Literal["none", "device", "host"] = "none"
    head_tokens: int = 4096
    chunk_tokens: int | None = None
    compile: bool = False
    update_threads: int | None = None
    save_bytes: int | None = None
    passes: int = 1
    keep_weights: int = 0
    disk_moments: int = 0
    disk_remainder: int = 0
    disk_weights: int = 0
    own_experts: bool = False

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and getattr(Placement, name) is None:
                continue
            if type(value) is not int:
                raise InputError(f"placement.{name} is {value!r}; it must be an integer")
            if value < least:
                raise InputError(f"placement.{name} is {value}; it must be >= {least}")
            if value > _MOST and name in _COUNTS:
                raise InputError(f"placement.{name} is {value}; it must be <= {_MOST:,}")
        for name in ("keep_rows", "compile", "own_experts"):
            if type(value := getattr(self, name)) is not bool:
                raise InputError(f"placement.{name} is {value!r}; it must be true or false")
        names = self.resident
        if not isinstance(names, tuple | list) or not all(isinstance(n, str) for n in names):
            raise InputError(f"placement.resident is {names!r}; it must be a list of tile names")
        for name, values in (("save_attention", _PLACES), ("layer_inputs", _PLACES[1:])):
            if (value := getattr(self, name)) not in values:
                *others, last = map(repr, values)
                raise InputError(
                    f"placement.{name} is {value!r}; it must be {', '.join(others)} or {last}"
                )
        conflict = next((text for applies, text in self._conflicts() if applies), None)
        if conflict is not None:
            raise InputError(f"placement.{conflict}")

    def _conflicts(self) -> Iterator[tuple[bool, str]]:
        """Messages for choices that exclude each other, with remedies."""
        yield (
            self.prefetch is not None and self.prefetch > max(0, self.slots - 1),
            f"prefetch is {self.prefetch}; with {self.slots} slots it must be between 0 and "
            f"{max(0, self.slots - 1)}",
        )
        yield (
            self.save_attention != "none" and self.compile and self.chunk_tokens is None,
            f"save_attention is {self.save_attention!r}, but whole layers are compiled; set "
            "chunk_tokens, or compile: false",
        )
        yield (
            self.own_experts and (self.compile or self.chunk_tokens is not None),
            "own_experts is true, and layers that exchange tokens are not compiled or in chunks; "
            "set compile: false and chunk_tokens: null, or own_experts: false",
        )
        yield (
            self.passes > 1 and not self.keep_rows,
            "keep_rows is false, but in several passes the embedding's rows stay on the device; "
            "set it true, or set passes: 1",
        )

    def __str__(self) -> str:
        """The choices that differ from the defaults, as YAML in flow style for a run file."""
        chosen = [f.name for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{{{', '.join(f'{name}: {_written(getattr(self, name))}' for name in chosen)}}}"

    @property
    def on_disk(self) -> bool:
        """True if any plane rests on a disk."""
        return bool(self.disk_moments or self.disk_remainder or self.disk_weights)

    @property
    def prefetch_distance(self) -> int:
        return max(0, self.slots - 1) if self.prefetch is None else self.prefetch

    def policies(self, num_layers: int) -> tuple[ActivationPolicy, ...]:
        """The activation policy of each layer."""
        # Layers with graphs on the host are evenly spread: each graph has time to leave.
        num_on_host = self.offload_activations
        on_host = {v for v in range(num_layers) if v * num_on_host % num_layers < num_on_host}
        elsewhere = [v for v in range(num_layers) if v not in on_host]
        on_device = elsewhere[max(0, len(elsewhere) - self.save_activations) :]
        policy, where = RECOMPUTE, self.save_attention
        if where != "none":
            policy = ActivationPolicy("attention", where)
        graphs = dict.fromkeys(on_host, ActivationPolicy("graph", "host"))
        graphs |= dict.fromkeys(on_device, ActivationPolicy("graph", "device"))
        save_all = on_device[max(0, len(on_device) - self.save_all) :]
        graphs |= dict.fromkeys(save_all, ActivationPolicy("all", "device"))
        return tuple(graphs.get(visit, policy) for visit in range(num_layers))

    def as_dict(self) -> dict[str, Any]:
        """The placement as plain data, for logs and result files."""
        return asdict(self)

    @classmethod
    def names(cls) -> list[str]:
        """The names of all choices, for messages about misspelt ones."""
        return [field.name for field in fields(cls)]


@dataclass(frozen=True)
class Planned:
    """The step of one rank for which a placement was chosen."""

    tokens_per_step: int
    micro_batch_tokens: int  # tokens of the largest micro-batch
    has_media: bool = False  # True if rows have images or sounds


def _written(value: Any) -> str:
    """A choice as YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)


CPU_PLACEMENT = Placement(slots=0, head_tokens=1024)
"""The default on a CPU: planes are used in place, with few logits beside them at once."""
