"""Puts together a step that computes nothing."""

from dataclasses import dataclass

from megatrain.engine.assemble import Assembly
from megatrain.engine.head import HeadMath
from megatrain.engine.host_offload import HostOffload
from megatrain.engine.layer import Layer
from megatrain.engine.vocab_split import VocabSplit
from megatrain.forecast.meta_layer import MetaLayer
from megatrain.forecast.meta_program import MetaHead, MetaVocabSplit
from megatrain.forecast.op_counter import OpCounter
from megatrain.forecast.profile import Profile
from megatrain.placement import ActivationPolicy


@dataclass(kw_only=True)
class MetaAssembly(Assembly):
    """Of a model of which only works and shapes are known."""

    measured: Profile
    counter: OpCounter

    def layer(self, visit: int, policy: ActivationPolicy, offload: HostOffload | None) -> Layer:
        given = self.device, self.program, self.layers[visit], visit, policy, offload
        return MetaLayer(*given, self.measured, self.counter)

    def whole_head(self) -> HeadMath:
        tokens, layout = self.placement.head_tokens, self.head.layout
        return MetaHead(tokens, self.measured, layout, self.counter)

    def vocab_split(self) -> VocabSplit:
        return MetaVocabSplit(self.placement.head_tokens, self.measured, self.counter)
