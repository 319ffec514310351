"""Networks that were trained elsewhere: built by timm or by a function in a file, with preprocessing inside.

    model = Preprocessed(network("timm/resnet18", (3, 32, 32), 10), mean=(0.5,), std=(0.5,))
    load(model, "my.pt", from_file("my.pt", Path("my.pt")))

So attacks work in [0, 1] on RGB images and see logits, whatever the network's own conventions.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fatbench.errors import MachineError, SpecError, article, did_you_mean
from fatbench.models.own_modules import OwnModules
from fatbench.models.pretrained import SHOWN, first_line, fitted, mismatches, other_numbers, prefixes

TINY = 1e-30  # probabilities are clipped here before the logarithm: far below what a float32 softmax resolves
HALF_A_UNIT = 2**-24  # of float32 just below 1, where a sigmoid ends


class Called(nn.Module):
    """A network, or a function of images, as attacks call it: (B, C, H, W) to logits (B, classes) of the images' type.

    It gets the images in the type of its weights, and its own copy of them, which it may change. The modules that a
    bound method, a partial or another object holds are in its state. SpecError: `network` is nothing of that kind, has
    no weights yet, or returns no tensor.
    """

    network: Any

    def __init__(self, network: Any) -> None:
        super().__init__()
        if not callable(network) or isinstance(network, type):
            raise SpecError(f"model: expected a torch.nn.Module or a function of images, got {_description(network)}")
        self.network, self.held = network, nn.ModuleList(_modules_of(network))
        if any(is_lazy(tensor) for tensor in (*self.parameters(), *self.buffers())):
            raise SpecError(f"model: {name_of(network)} has lazy layers without weights: call it once on images")

    def forward(self, x: Tensor) -> Tensor:
        weights_type = next((weight.dtype for weight in self.parameters() if weight.is_floating_point()), x.dtype)
        outputs = self.network(x.to(weights_type, copy=True))
        if not issubclass(type(outputs), Tensor | torch.fx.Proxy):  # a Proxy where batch normalisation is folded
            kind = article(type(outputs).__name__)
            raise SpecError(f"model: {name_of(self.network)} returns {kind}, not logits (B, classes) as a tensor")
        logits: Tensor = outputs.to(x.dtype)
        return logits


def name_of(function: Any) -> str:
    """The name of a function, of the one in a partial, or of an object's class."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def _modules_of(function: Any) -> list[nn.Module]:
    """The modules that a function holds in what a copy of it copies: not those that it reads around it."""
    if isinstance(function, nn.Module) or (inspect.isroutine(function) and not inspect.ismethod(function)):
        return []
    if inspect.ismethod(function):
        parts = [function.__self__]
    elif isinstance(function, functools.partial):
        parts = [function.func, *function.args, *function.keywords.values()]
    else:
        parts = list(getattr(function, "__dict__", {}).values())
    modules = [part for part in parts if isinstance(part, nn.Module)]
    held = [part for part in parts if inspect.ismethod(part) or isinstance(part, functools.partial)]
    return modules + [module for part in held for module in _modules_of(part)]


def _description(value: Any) -> str:
    """What was given in place of a network, and where one may be: "a Classifier (a module is its .model)"."""
    if isinstance(value, type):
        return f"the class {value.__name__}: call it"
    if isinstance(value, Mapping):
        return f"{article(type(value).__name__)}: load the state dict into its module"
    names = [
        name for name in ("model", "module", "network", "net") if isinstance(getattr(value, name, None), nn.Module)
    ]
    return article(type(value).__name__) + (f" (its .{names[0]} is a module)" if names else "")


class Preprocessed(Called):
    """Images (B, C, H, W) in [0, 1], RGB, to logits (B, classes), through a network with its own conventions.

    mean, std: as in the network's training, one for each channel in its order; empty: none. outputs: "probabilities"
    become logits by the logarithm, a "sigmoid" of each class by log p - log(1 - p). Mean and std are no part of the
    state.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        outputs: Literal["logits", "probabilities", "sigmoid"] = "logits",
        channels: Literal["rgb", "bgr"] = "rgb",
    ) -> None:
        super().__init__(network)
        self.outputs, self.channels = outputs, channels
        for name, value in (("mean", mean or (0.0,)), ("std", std or (1.0,))):
            self.register_buffer(name, torch.tensor(value).view(1, -1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.channels == "bgr":
            x = x.flip(1)  # before mean and std, which are in the network's order
        network_outputs = super().forward((x - self.mean) / self.std)
        if self.outputs == "logits":
            return network_outputs
        logits = network_outputs.clamp(min=TINY).log()
        return (
            logits if self.outputs == "probabilities" else logits - (1 - network_outputs).clamp(min=HALF_A_UNIT).log()
        )


def network(source: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Build the network that `source` names, with random weights.

    "timm/NAME": timm's network for images of `shape` (C, H, W) and `classes` classes. "FILE.py:FUNCTION": the result of
    a function without arguments in a Python file. Raises SpecError for any other form or an unknown name, and
    MachineError if the function or the file raises.
    """
    source = full_name(source)
    kind, slash, name = source.partition("/")
    if kind == "timm" and slash and not source.endswith(".py") and ":" not in source:
        return _from_timm(name, shape, classes)
    file, colon, function = source.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise SpecError(f"expected timm/NAME or FILE.py:FUNCTION, got '{source}'", option="model")
    return _with_weights(_from_python(Path(file), function), source, shape)


def _with_weights(network: nn.Module, source: str, shape: tuple[int, int, int]) -> nn.Module:
    """Give lazy layers their weights, by a pass over two blank images of `shape`."""
    if any(is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        modes = {module: module.training for module in network.modules()}
        try:
            with torch.no_grad():
                network.eval()(torch.zeros(2, *shape))
        except Exception as error:
            size = "x".join(map(str, shape))
            raise SpecError(f"{source} does not take images of {size} (see size): {first_line(error)}") from None
        for module, mode in modes.items():
            module.training = mode
    return network


def full_name(source: str) -> str:
    """ "timm/NAME" or "FILE.py:FUNCTION" for the short forms "net:Net", "net.py" (with one network) and "resnet18".

    Anything else is returned unchanged. Raises SpecError if a file has several networks, or none.
    """
    file, colon, function = source.rpartition(":")
    if colon:
        module = Path(*file.split(".")).with_suffix(".py") if re.fullmatch(r"[\w.]+", file) else Path()
        return f"{module}:{function}" if not file.endswith(".py") and module.is_file() else source
    if source.endswith(".py") and Path(source).is_file():
        candidates = _network_candidates(Path(source))
        if len(candidates) != 1:
            raise SpecError(
                f"expected one network, not {', '.join(candidates) or 'none'}: {source}:FUNCTION",
                option=f"model {source}",
            )
        return f"{source}:{candidates[0]}"
    if re.fullmatch(r"[A-Za-z]\w*", source):
        import timm

        return f"timm/{source}" if timm.is_model(source) else source
    return source


def _network_candidates(file: Path) -> list[str]:
    """The classes of a file that may be modules and that no other of them uses; without any, its functions."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.bases]
    modules = [node for node in classes if any(ast.unparse(base).endswith("Module") for base in node.bases)]
    modules = modules or classes  # a class of an imported network
    # a block that another class builds is a part of a network
    used_inside = {name_node.id for node in modules for name_node in ast.walk(node) if isinstance(name_node, ast.Name)}
    outer_modules = [node.name for node in modules if node.name not in used_inside]
    return outer_modules or [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]


def _from_timm(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    import timm

    if not timm.is_model(name):
        raise SpecError(f"timm has no network '{name}'{did_you_mean(name, timm.list_models())}", option="model")
    try:
        network: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes, in_chans=shape[0])
    except Exception as error:  # networks raise all kinds of errors for unsupported channels
        raise MachineError(f"timm cannot build {name}: {first_line(error)}", option="model") from error
    return network


def _from_python(file: Path, function: str) -> nn.Module:
    if not file.is_file():
        raise SpecError(f"no such file: {file}", option="model")
    try:
        neighbours = OwnModules(file)
    except SpecError as error:
        raise SpecError(f"{error}", option="model") from None
    except Exception as error:
        raise _error_of_source(str(file), error) from error
    with neighbours.importable():
        try:
            module = neighbours.module()
        except Exception as error:
            raise _error_of_source(str(file), error) from error
        make = getattr(module, function, None)
        if not callable(make):
            callables = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
            raise SpecError(f"{file} has no function '{function}'{did_you_mean(function, callables)}", option="model")
        try:
            network = make()
        except Exception as error:
            raise _error_of_source(f"{file}:{function}()", error) from error
    if not isinstance(network, nn.Module):
        raise SpecError(
            f"{file}:{function}() returned a {type(network).__name__}, not a torch.nn.Module", option="model"
        )
    if neighbours.imports_late():
        _with_neighbours(network, neighbours)
    return network


def _error_of_source(source: str, error: Exception) -> MachineError:
    return MachineError(f"{source}: {type(error).__name__}: {first_line(error)}", option="model")


def _with_neighbours(network: nn.Module, neighbours: OwnModules) -> None:
    """Let the network's functions import neighbouring files whenever it is called."""
    open_contexts: list[contextlib.ExitStack] = []  # a stack, as a network may call itself

    def enter(*_: object) -> None:
        open_contexts.append(contextlib.ExitStack())
        open_contexts[-1].enter_context(neighbours.importable())

    def leave(*_: object) -> None:
        open_contexts.pop().close()

    network.register_forward_pre_hook(enter)
    network.register_forward_hook(leave, always_call=True)  # also when the network raises


def load(network: nn.Module, source: str, state: Mapping[str, Tensor]) -> str:
    """Load every tensor of a state dict into a network; what was done to make them fit, in words, or "".

    Raises SpecError with the tensors that do not fit.
    """
    needed = network.state_dict()
    fitting_state, changes = fitted(state, needed)
    if differences := mismatches(fitting_state, needed):
        remainder = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        starts = [start.removesuffix(".") for start in prefixes(state, [*needed]) if start]
        hint = f" (every name is there below '{', '.join(starts)}': choose with entry)" if starts else ""
        how = "".join(f" ({change})" for change in changes)
        raise SpecError(
            f"{source} holds another network's weights{how}: {'; '.join(differences[:SHOWN])}{remainder}{hint}"
        )
    if other := other_numbers(fitting_state, needed):
        raise SpecError(f"{source}: {other[0]}: whole numbers are weights with their scale only, complex ones never")
    network.load_state_dict(fitting_state)
    return f"{source}: {'; '.join(changes)}" if changes else ""
