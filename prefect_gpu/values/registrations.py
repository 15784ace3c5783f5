"""Registrations with Keras by a script's module-level code, and a note in errors about other missing registrations.

Module-level code of a script does not run in a task's process. Keras finds the classes of a model by its registry, so
private classes of the flow's registry are registered in the task's process, too. Other registries cannot be read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from prefect_gpu.errors import add_note
from prefect_gpu.frameworks.adapter import imported
from prefect_gpu.frameworks.hooks import AfterImport
from prefect_gpu.values.by_value import Key
from prefect_gpu.values.importable import travels_by_value
from prefect_gpu.values.made_anew import own_name
from prefect_gpu.values.stand_ins import stand_in

#: Words in errors about missing registrations: Keras, `codecs`, OmegaConf, Transformers, PyTorch.
_UNREGISTERED = re.compile(
    r"regist|deserializ|unknown (encoding|error handler)|unsupported interpolation|unrecognized configuration"
    r"|could not locate|_OpNamespace|add_safe_globals",
    re.IGNORECASE,
)

#: Note in errors about missing registrations.
NOTE = (
    "The module-level code of a script does not run in the process of a GPU task. If something is registered there, "
    "register it in a module that the script imports, or in the task"
)


def find_registered() -> dict[str, Key]:
    """Return module and name of the private functions and classes in Keras' registry, by their registered names."""
    keras = imported("keras", "saving")
    if keras is None:
        return {}
    found = {}
    for name, value in dict(keras.saving.get_custom_objects()).items():
        key = own_name(value)
        if key is not None and travels_by_value(value):
            found[name] = key
    return found


def register_after_import(registered: Mapping[str, Key]) -> None:
    """Register functions and classes of the flow's process with Keras, now or right after its first import."""
    if registered:
        AfterImport({"keras": lambda: _register(registered)}).install()


def _register(registered: Mapping[str, Key]) -> None:
    saving = import_module("keras").saving
    known = saving.get_custom_objects()
    for name, (module, qualified) in registered.items():
        found: Any = stand_in(module)
        for part in qualified.split("."):
            # A stand-in asks the flow's process.
            found = getattr(found, part, None)
        if found is not None and name not in known:
            package, _, short = name.rpartition(">")
            saving.register_keras_serializable(package or "Custom", short)(found)


def note_missing(error: BaseException, function: Any) -> None:
    """Add `NOTE` to an error of a task's body if its text suggests a missing registration of a script's function."""
    try:
        fits = travels_by_value(function) and _UNREGISTERED.search(str(error)) is not None
    except Exception:  # the error's own `__str__` failed
        return
    if fits:
        add_note(error, NOTE)
