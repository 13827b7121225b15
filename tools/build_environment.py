"""Variables of its environment that a build reads, checked. Imports neither torch nor setuptools.

    python tools/build_environment.py     prints jobs, backends, label and torch of a build here

GPU_ARCHS, PYTORCH_ROCM_ARCH and GPU compilers are read by cmake/FlashAttnGpu.cmake, FLASH_ATTN_BUILD_DIR, CMAKE_ARGS,
CXX and SOURCE_DATE_EPOCH by setup.py. docs/building.md describes them all.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRUE = ("true", "1", "on", "yes")
FALSE = ("false", "0", "off", "no")
TRITON_PACKAGE = "flash_attn.flash_attn_triton_amd"
# The earliest time that a zip archive can hold. Wheels carry it unless SOURCE_DATE_EPOCH says otherwise, so that two
# builds of one tree are the same bytes.
EPOCH = "315532800"
FIND_TORCH = """
import importlib.util
spec = importlib.util.find_spec("torch")
print((spec.submodule_search_locations or [""])[0] if spec else "")
"""


def switch(name):
    """True, False, or None where the variable is unset or empty."""
    value = os.environ.get(name, "")
    if value and value.lower() not in TRUE + FALSE:
        raise SystemExit(
            f"{name} is {value!r}; accepted, in any case, are {', '.join(TRUE)}, and {', '.join(FALSE)} or unset."
        )
    return value.lower() in TRUE if value else None


def max_jobs():
    """Compilers at a time: MAX_JOBS, else one per processor as far as memory allows 2 GiB for each."""
    given = os.environ.get("MAX_JOBS", "")
    if given:
        if not re.fullmatch(r"[1-9][0-9]*", given):
            raise SystemExit(f"MAX_JOBS is {given!r}; it must be an integer of at least 1, or unset.")
        return int(given)
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        gibibytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2**30
    except (AttributeError, ValueError, OSError):
        return processors
    return max(1, min(processors, gibibytes // 2))


def local_version():
    """The local label of the version, without its plus sign: FLASH_ATTN_LOCAL_VERSION, or ""."""
    given = os.environ.get("FLASH_ATTN_LOCAL_VERSION", "")
    if given and not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", given):
        raise SystemExit(
            f"FLASH_ATTN_LOCAL_VERSION is {given!r}; it must be lower-case letters and digits, in parts separated by "
            "dots, such as rocm62torch2.5, or unset."
        )
    return given


def with_triton():
    """Whether the package holds the Triton backend: yes if it is in the tree, unless BUILD_TRITON_BACKEND says no."""
    there = (ROOT / TRITON_PACKAGE.replace(".", "/") / "__init__.py").is_file()
    build, enable = switch("BUILD_TRITON_BACKEND"), switch("FLASH_ATTENTION_TRITON_AMD_ENABLE")
    if enable and build is False:
        raise SystemExit(
            "FLASH_ATTENTION_TRITON_AMD_ENABLE asks for the Triton backend and BUILD_TRITON_BACKEND for a package "
            "without it; unset one of them."
        )
    if (build or enable) and not there:
        name = "BUILD_TRITON_BACKEND" if build else "FLASH_ATTENTION_TRITON_AMD_ENABLE"
        raise SystemExit(f"{name} asks for the Triton backend, which this source tree does not hold; unset it.")
    return there and build is not False


@dataclass(frozen=True)
class Settings:
    """One build's settings."""

    jobs: int  # compilers at a time
    compiles: bool  # FLASH_ATTENTION_SKIP_CUDA_BUILD leaves out all compiled code, as for a source distribution
    triton: bool  # the package holds the Triton backend
    local: str  # label behind the version, "" for none

    def jobs_text(self):
        origin = "MAX_JOBS" if os.environ.get("MAX_JOBS") else "from processors and memory; MAX_JOBS changes it"
        return f"flash_attn: compilers at a time: {self.jobs} ({origin})"


def read():
    """The settings of this build; SystemExit, with what is accepted, for a value that is not."""
    # Upstream looks for a compiled package to download unless this is TRUE; here every build compiles, so both are met.
    switch("FLASH_ATTENTION_FORCE_BUILD")
    compiles = not switch("FLASH_ATTENTION_SKIP_CUDA_BUILD")
    return Settings(jobs=max_jobs(), compiles=compiles, triton=with_triton(), local=local_version())


def require_linux():
    """Names of libraries and how they find each other are Linux's."""
    if not sys.platform.startswith("linux"):
        raise SystemExit(
            f"flash_attn's package is built on Linux so far, and this is {sys.platform}: "
            "on Windows install it inside WSL2."
        )


def torch_dir():
    """Directory of the installed torch package, also from inside pip's isolated build environment, which hides it."""
    given = os.environ.get("FLASH_ATTN_TORCH_DIR", "")
    if given:
        return given
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.submodule_search_locations:
        return spec.submodule_search_locations[0]
    # Build isolation is made of these variables; without them the same Python sees its own environment.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    done = subprocess.run([sys.executable, "-c", FIND_TORCH], env=environment, stdout=subprocess.PIPE, text=True)
    if done.stdout.strip():
        return done.stdout.strip()
    raise SystemExit(
        f"flash_attn is compiled for the torch of its environment and {sys.executable} has none: install torch first, "
        "and where it is installed but hidden from the build (uv does that), pass --no-build-isolation or set "
        "FLASH_ATTN_TORCH_DIR to what `python -c 'import torch; print(torch.__path__[0])'` prints."
    )


def torch_release(folder):
    """ "2.13" for the torch package in that directory; "unknown" when CMake will have to complain about it."""
    try:
        text = Path(folder, "version.py").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    match = re.search(r"^__version__.*?(\d+\.\d+)", text, re.MULTILINE)
    return match[1] if match else "unknown"


def main():
    settings = read()
    for field in fields(settings):
        print(f"{field.name:<10}{getattr(settings, field.name)}")
    folder = torch_dir()
    print(f"torch     {torch_release(folder)} in {folder}")


if __name__ == "__main__":
    main()
