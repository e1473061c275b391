"""Whether a model's own code leaves padding on the left of a prompt out of account."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megatrain.generate.cache import takes_cache

_PROMPT = (5, 7, 6, 9)  # ids that every vocabulary has
_PADDED = 3
_SHARE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the logits' spread: more is no rounding
_known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def heeds_mask(model: PreTrainedModel) -> bool:
    """Whether a padded prompt has the logits of the prompt; tried once for a model.

    States and convolutions of some families run on over padding.
    """
    if model not in _known:
        plain, padded = _logits(model, 0), _logits(model, _PADDED)
        spread = float((plain - plain.mean()).abs().max())
        share = _SHARE.get(model.dtype, 0.1)
        _known[model] = float((plain - padded).abs().max()) <= share * spread
    return _known[model]


def _logits(model: PreTrainedModel, padding: int) -> Tensor:
    ids = torch.tensor([[_PROMPT[0]] * padding + list(_PROMPT)], device=model.device)
    mask = (torch.arange(ids.shape[1], device=model.device) >= padding).long()[None]
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=1,
        do_sample=False,
        use_cache=takes_cache(model),
        output_logits=True,
        return_dict_in_generate=True,
    )
    return made.logits[0].float()
