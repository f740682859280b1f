"""Modules and losses of several networks of one shape at once; all tensors have the networks in dimension 0.

Layers in sequence have forms of their own, as in HFTA (Wang et al., MLSys 2021): for small ones `vmap` takes
longer than their products. It computes whatever has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import vmap

from hetctl.model.values import dataclass

Form = Callable[..., torch.Tensor]
"""Function of a layer, stacked inputs, the layer's stacked tensors, and in training its dropouts' factors."""
Dropouts = Sequence[nn.Module]
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Layers that multiply their inputs by random numbers, whatever the inputs are."""


def _linear(
    _layer: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    # In this order the gradients of the weights have their layout: to turn them takes as long as a product.
    columns = x.flatten(1, -2).transpose(1, 2)
    turned = torch.bmm(weight, columns) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, columns)
    y = turned.transpose(1, 2)
    return y if x.dim() == y.dim() else y.unflatten(1, x.shape[1:-1])


def _channelwise(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply a layer of channels to those of all networks."""
    return layer(x.transpose(0, 1).flatten(1, 2)).unflatten(1, (len(x), -1)).transpose(0, 1)


def _convolution(
    layer: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    call: Any,
    memory: torch.memory_format,
) -> torch.Tensor:
    options = layer.stride, layer.padding, layer.dilation, layer.groups * len(x)
    # On a core, a convolution and a pooling of many channels take two thirds of the time in this format.
    used = memory if x.is_cpu else torch.contiguous_format
    filters = weight.flatten(0, 1).contiguous(memory_format=used)
    biases = None if bias is None else bias.flatten()
    return _channelwise(lambda all_: call(all_.contiguous(memory_format=used), filters, biases, *options), x)


def _dropout(_layer: nn.Module, x: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
    return x * factors[0] if factors else x


def _elementwise(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(layer(x))


FORMS: Mapping[type[nn.Module], tuple[Form, Mapping[str, Any]]] = {
    nn.Linear: (_linear, {}),
    **{
        kind: (partial(_convolution, call=call, memory=memory), {"padding_mode": "zeros"})
        for kind, call, memory in (
            (nn.Conv1d, torch.conv1d, torch.contiguous_format),
            (nn.Conv2d, torch.conv2d, torch.channels_last),
            (nn.Conv3d, torch.conv3d, torch.channels_last_3d),
        )
    },
    nn.Flatten: (lambda _layer, x: x.flatten(2), {"start_dim": 1, "end_dim": -1}),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), (_channelwise, {"return_indices": False})),
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), (_channelwise, {})),
    **dict.fromkeys(DROPOUTS, (_dropout, {})),
    **dict.fromkeys(
        (nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
        (_elementwise, {}),
    ),
}
"""Forms by class of layer, with attributes of which only these values are supported."""


@dataclass(frozen=True, eq=False)
class Part:
    """Module in a sequence of modules.

    Parameters
    ----------
    places : list of (dict, str, int)
        Where it holds its tensors, and their numbers among all of the whole module.
    dropouts : sequence of modules
        Those in it.
    form : callable or None
        None: `vmap` calls it.
    """

    module: nn.Module
    places: list[tuple[dict[str, Any], str, int]]
    dropouts: Dropouts
    form: Form | None

    def __call__(self, tensors: Sequence[torch.Tensor], x: Any, factors: list[torch.Tensor]) -> Any:
        """Return the outputs of all networks.

        Parameters
        ----------
        factors : list of torch.Tensor
            Factors of its dropouts in the order of their calls, in training.
        """
        own = [tensors[number] for _, _, number in self.places]
        if self.form is not None:
            return self.form(self.module, x, *own, *factors)
        return vmap(self._with_factors)(own, x, factors)

    def called(self, own: Sequence[torch.Tensor], x: Any) -> Any:
        """Call the module with other tensors."""
        # What `functional_call` does takes as long as the small networks that profit the most.
        kept = [holder[key] for holder, key, _ in self.places]
        for (holder, key, _), tensor in zip(self.places, own, strict=True):
            holder[key] = tensor
        try:
            y = self.module(x)
            if any(
                holder[key] is not tensor for (holder, key, _), tensor in zip(self.places, own, strict=True)
            ):
                raise TypeError("the module replaces a buffer by another tensor")
            return y
        finally:
            for (holder, key, _), tensor in zip(self.places, kept, strict=True):
                holder[key] = tensor

    def _with_factors(self, own: Sequence[torch.Tensor], x: Any, factors: list[torch.Tensor]) -> Any:
        left = iter(factors)
        with _replaced(self.dropouts if factors else (), lambda _, values: values * next(left)):
            return self.called(own, x)


class StackedModule:
    """A module that computes the outputs of all networks at once.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Its parameters and buffers, in the order in which calls get stacked ones.
    """

    def __init__(self, module: nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._tensors = tensors
        self._parts = [self._part(one) for one in _in_sequence(module)]
        self._dropouts = dropouts_in(module)

    def __call__(
        self, tensors: Sequence[torch.Tensor], x: Any, factors: Sequence[list[torch.Tensor]] | None = None
    ) -> Any:
        """Return the outputs of all networks.

        Parameters
        ----------
        factors : sequence of lists of torch.Tensor, or None
            In training, those of each part's dropouts, as `dropout_calls` has them.
        """
        for number, part in enumerate(self._parts):
            x = part(tensors, x, factors[number] if factors else [])
        return x

    def dropout_calls(self, x: Any) -> list[list[tuple[int, torch.Tensor]]]:
        """Return the numbers of the dropouts that each part calls in training, in order, and their inputs."""
        numbers = {dropout: number for number, dropout in enumerate(self._dropouts)}
        found: list[list[tuple[int, torch.Tensor]]] = []

        def note(dropout: nn.Module, values: torch.Tensor) -> torch.Tensor:
            found[-1].append((numbers[dropout], values))
            return values

        for part in self._parts:
            found.append([])
            # Copies: buffers change in place.
            own = [self._tensors[number].detach().clone() for _, _, number in part.places]
            with torch.no_grad(), _replaced(part.dropouts, note):
                x = part.called(own, x)
        return found

    def _part(self, module: nn.Module) -> Part:
        places = [
            (holder, key, self._numbers[id(tensor)])
            for each in module.modules()
            for holder in (each._parameters, each._buffers)
            for key, tensor in holder.items()
            if tensor is not None
        ]
        return Part(module, places, dropouts_in(module), _form_of(module))


def dropouts_in(module: nn.Module) -> list[nn.Module]:
    """Return the layers of `DROPOUTS` in a module, in its order."""
    return [each for each in module.modules() if type(each) in DROPOUTS]


def losses_of(loss: Callable[..., Any], outputs: Any, y: Any) -> torch.Tensor:
    """Return the losses of all networks, of shape (networks,)."""
    is_known = loss is nn.functional.cross_entropy or type(loss) is nn.CrossEntropyLoss
    is_plain = getattr(loss, "reduction", "mean") == "mean" and getattr(loss, "weight", None) is None
    if not is_known or not is_plain or not isinstance(y, torch.Tensor) or y.is_floating_point():
        return torch.as_tensor(vmap(loss)(outputs, y))
    # With `vmap` it is Python that computes it.
    ignored = getattr(loss, "ignore_index", -100)
    # Of few classes, logarithms of sums over rows take a third of the time of those within rows.
    flat = (outputs.transpose(1, 2), y) if y.dim() == 2 else (outputs.flatten(0, 1), y.flatten(0, 1))
    each = nn.functional.cross_entropy(
        *flat,
        ignore_index=ignored,
        reduction="none",
        label_smoothing=getattr(loss, "label_smoothing", 0.0),
    )
    return each.reshape(len(y), -1).sum(1) / (y != ignored).flatten(1).sum(1)


def _in_sequence(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that a `Sequential` calls one after the other, or the module itself."""
    if type(module) is not nn.Sequential or _is_changed(module):
        yield module
        return
    for each in module:
        yield from _in_sequence(each)


def _form_of(layer: nn.Module) -> Form | None:
    form, only = FORMS.get(type(layer), (None, {}))
    fits = all(getattr(layer, name) == value for name, value in only.items())
    return form if fits and not _is_changed(layer) else None


def _is_changed(module: nn.Module) -> bool:
    """Return true for a module of which more than the `forward` of its class would have to run."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)


@contextmanager
def _replaced(dropouts: Dropouts, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let a function of it and its inputs stand for each dropout."""
    for module in dropouts:
        module.forward = partial(call, module)
    try:
        yield
    finally:
        for module in dropouts:
            del module.forward
