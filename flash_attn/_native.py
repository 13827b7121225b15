"""Finds and loads the extension module `flash_attn_2_cuda`, the only part that is built per torch and Python version.

    lib/libflash_attn.so                                      the core: no torch, no Python
    lib/torch-<major>.<minor>/flash_attn_2_cuda<EXT_SUFFIX>   one binding per torch and Python
    lib/torch-<major>.<minor>/libflash_attn.so                the core again, where a torch has another C++ ABI

Loading a binding registers the operators `torch.ops.flash_attn.*`.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import os
import re
import sys
import sysconfig
from types import ModuleType
from typing import Dict, List, Optional

MODULE_NAME = "flash_attn_2_cuda"
CORE_NAME = "libflash_attn.so"
LIBRARY_DIR = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib")
_REMEDY = "run `pip install --no-build-isolation .` in its source tree, in this environment"


def require_torch() -> None:
    """ImportError, in one sentence with the remedy, where there is no torch to compute with."""
    if importlib.util.find_spec("torch") is None:
        raise ImportError(
            f"flash_attn computes with torch, and {sys.executable} has none: install torch, and flash_attn once more, "
            "for that torch."
        )


def torch_release(version: str) -> str:
    """The part of a torch version that a binding is built for: "2.13" of "2.13.0+cpu", "1.13" of "1.13.0a0"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ImportError(f"torch.__version__ is {version!r}; it must start with a release number such as 2.13.")
    return f"{match[1]}.{match[2]}"


def core_library(binding: Optional[str] = None) -> str:
    """Path of the core library that a binding uses: the one beside it if there is one, else the common one."""
    beside = os.path.join(os.path.dirname(binding), CORE_NAME) if binding else ""
    return beside if os.path.exists(beside) else os.path.join(LIBRARY_DIR, CORE_NAME)


def extension_suffix() -> str:
    """What a binding's file name ends with under the running Python."""
    return sysconfig.get_config_var("EXT_SUFFIX")


def available_bindings() -> Dict[str, List[str]]:
    """Torch release -> file names of the bindings built for it."""
    found = {}
    for folder in sorted(os.listdir(LIBRARY_DIR)) if os.path.isdir(LIBRARY_DIR) else []:
        prefix, _, release = folder.partition("-")
        if prefix == "torch":
            names = sorted(os.listdir(os.path.join(LIBRARY_DIR, folder)))
            found[release] = [name for name in names if name.startswith(MODULE_NAME + ".")]
    return found


def _python_tag(name: str) -> str:
    """The Python that a binding is for: cpython-311-x86_64-linux-gnu of flash_attn_2_cuda.<that>.so."""
    return name.split(".")[1]


def built_for() -> str:
    """The bindings that are there, for people: "torch 2.13 (cpython-311-x86_64-linux-gnu), ..."; empty if none."""
    bindings = [(release, name) for release, names in available_bindings().items() for name in names]
    return ", ".join(f"torch {release} ({_python_tag(name)})" for release, name in bindings)


def _installed_elsewhere() -> str:
    """The folder of another flash_attn with a binding, which a source tree in front of it on sys.path hides; or ""."""
    package = os.path.dirname(LIBRARY_DIR)
    if not os.path.isfile(os.path.join(os.path.dirname(package), "setup.py")):
        return ""
    for entry in sys.path:
        folder = os.path.join(os.path.abspath(entry), "flash_attn")
        if folder != package and glob.glob(os.path.join(folder, "lib", "torch-*")):
            return folder
    return ""


def binding_path(torch_version: str) -> str:
    """The binding for a torch version and the running Python; ImportError when it was not built."""
    release = torch_release(torch_version)
    bindings = available_bindings()
    name = MODULE_NAME + extension_suffix()
    if name in bindings.get(release, []):
        return os.path.join(LIBRARY_DIR, f"torch-{release}", name)
    package, elsewhere = os.path.dirname(LIBRARY_DIR), "" if bindings else _installed_elsewhere()
    if elsewhere:
        raise ImportError(
            f"flash_attn was imported from the source tree {package}, where nothing was built, and is installed in "
            f"{elsewhere}: leave the tree, or run `pip install -e .` in it to use it from there."
        )
    raise ImportError(
        f"flash_attn is built for {built_for() or 'no torch at all'}, and this is torch {torch_version} "
        f"({_python_tag(name)}): {_REMEDY}."
    )


@functools.cache
def load() -> ModuleType:
    """The extension module `flash_attn_2_cuda` for the running torch, loaded once per process.

    Raises ImportError, in one sentence with the remedy, when there is none or it does not fit.
    """
    import torch  # first: the binding's undefined symbols resolve to the libraries that this loads

    path = binding_path(torch.__version__)
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise ImportError(
            f"flash_attn's binding {path} does not load under torch {torch.__version__} "
            f"({' '.join(str(error).split())}): {_REMEDY}."
        ) from error
    return module
