"""A target's eager forward with fused kernels: Liger's norms, activations and rotary embedding, on this instance only.

Liger's own patches rebind names of transformers' modules for the whole process. Here they are taken for one instance:
what Liger changes in those modules is put back at once, and functions that the instance's own modules call are given to
those modules alone. Owns nothing of what the kernels compute.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from draftmill.target.model import Target
from draftmill.target.step import EagerForward

_OFF = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Parts of a training loss, which a target does not have."""


class NoFusedKernels(RuntimeError):
    """Liger is not installed, or does not know this architecture."""


class FusedForward(EagerForward):
    """The model as it is, with Liger's kernels in its modules while it is applied."""

    name = "fused"

    def __init__(self, target: Target, layer_ids: Sequence[int], by_document: bool = False) -> None:
        """Raises NoFusedKernels."""
        super().__init__(target, layer_ids, by_document)
        self.patch = patch_for(target)
        self._changes: list[_Change] = []

    def apply(self) -> None:
        """Put the kernels in. Holds no lock: the caller holds BUILD_LOCK."""
        if not self._changes:
            self._changes = patched(self.target, self.patch)

    def undo(self) -> None:
        """Take the kernels out."""
        for change in reversed(self._changes):
            change.undo()
        self._changes = []


def patch_for(target: Target) -> Callable[..., None]:
    """Liger's function that patches an instance of this target. Raises NoFusedKernels."""
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise NoFusedKernels(f"liger-kernel can't be imported ({error})") from None
    kind = str(getattr(target.text_config, "model_type", ""))
    known: dict[str, Callable[..., None]] = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in known:
        raise NoFusedKernels(f"Liger knows no kernels for {kind}")
    return known[kind]


class _Change:
    """A module's own attributes before they were changed."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.before = module, dict(vars(module))

    def changed(self) -> bool:
        now = vars(self.module)
        return now.keys() != self.before.keys() or any(now[name] is not value for name, value in self.before.items())

    def undo(self) -> None:
        now = vars(self.module)
        for name in set(now) - set(self.before):
            del now[name]
        now.update(self.before)


def patched(target: Target, patch: Callable[..., None]) -> list[_Change]:
    """Patch the target's modules and leave the process as it was; returns what undoes it.

    patch: called with the decoder and options, as Liger's functions are.
    """
    modules = [_Change(module) for module in target.model.modules()]
    namespaces = {name: dict(vars(module)) for name, module in _modeling_modules().items()}
    classes = {
        one: dict(vars(one)) for one in {type(change.module) for change in modules} if "transformers" in one.__module__
    }
    options = {name: off for name, off in _OFF.items() if name in inspect.signature(patch).parameters}
    try:
        patch(model=target.decoder, **options)
        replaced = _replaced_functions(namespaces)
    finally:
        _restore(namespaces, classes)
    _give(modules, replaced)
    return [change for change in modules if change.changed()]


def _modeling_modules() -> dict[str, types.ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.startswith("transformers.models.")}


def _replaced_functions(before: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By module name, the functions that now stand for others. Classes concern only instances made later."""
    found: dict[str, dict[str, Any]] = {}
    for name, old in before.items():
        now = vars(sys.modules[name])
        changed = {
            key: now[key]
            for key, value in old.items()
            if key in now and now[key] is not value and callable(now[key]) and not isinstance(now[key], type)
        }
        if changed:
            found[name] = changed
    return found


def _restore(namespaces: dict[str, dict[str, Any]], classes: dict[type, dict[str, Any]]) -> None:
    for name, old in namespaces.items():
        now = vars(sys.modules[name])
        for key, value in old.items():
            if now.get(key) is not value:
                now[key] = value
    for one, attributes in classes.items():
        for key in set(vars(one)) - set(attributes):
            delattr(one, key)
        for key, value in attributes.items():
            if vars(one).get(key) is not value:
                setattr(one, key, value)


def _give(modules: list[_Change], replaced: dict[str, dict[str, Any]]) -> None:
    """Bind to each module whose forward calls a replaced function a forward that calls the new one."""
    for change in modules:
        module = change.module
        new = replaced.get(type(module).__module__)
        if new is None or "forward" in vars(module):
            continue
        forward = inspect.unwrap(type(module).forward)
        if isinstance(forward, types.FunctionType) and set(new) & set(forward.__code__.co_names):
            own = types.FunctionType(
                forward.__code__,
                {**forward.__globals__, **new},
                forward.__name__,
                forward.__defaults__,
                forward.__closure__,
            )
            own.__kwdefaults__ = forward.__kwdefaults__
            module.forward = types.MethodType(own, module)
