"""Builds flash_attn: setuptools packs the Python files, CMake compiles the core library and the binding for one torch.

Metadata is given here, and nothing imports torch, so `pip` can ask for it in an environment without torch.
tools/build_environment.py reads the environment, docs/building.md describes every variable.
"""

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

try:
    from setuptools import Extension, find_packages, setup
    from setuptools.command.build_ext import build_ext
    from setuptools.command.build_py import build_py
except ModuleNotFoundError:
    raise SystemExit(
        f"{sys.executable} has no setuptools, with which flash_attn is built: run `pip install .` instead, which "
        "brings it, or `pip install setuptools wheel` first."
    ) from None

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import build_environment  # noqa: E402

CMAKE_MINIMUM = (3, 25)


def package_version(local):
    """The version in flash_attn/__init__.py, without importing the package, with the local label."""
    text = (ROOT / "flash_attn" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)[1]
    return f"{version}+{local}" if local else version


def require_wheel_command():
    """setuptools has had its own bdist_wheel since 70.1; an older one needs the package wheel, and does not say so."""
    if not {"bdist_wheel", "dist_info", "editable_wheel"} & set(sys.argv):
        return
    for name in ("setuptools.command.bdist_wheel", "wheel"):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
            return
    raise SystemExit(
        f"the setuptools of {sys.executable} builds wheels only together with the package wheel: run "
        "`pip install --upgrade setuptools` or `pip install wheel` first."
    )


def find_program(name):
    """Paths of a program: on PATH, then beside the running Python, where pip puts it in an environment."""
    return [path for path in (shutil.which(name), shutil.which(name, path=os.path.dirname(sys.executable))) if path]


def find_cmake():
    """The first CMake that is new enough."""
    found = []
    for path in find_program("cmake"):
        output = subprocess.run([path, "--version"], stdout=subprocess.PIPE, text=True).stdout
        match = re.search(r"version (\d+)\.(\d+)", output)
        if match and (int(match[1]), int(match[2])) >= CMAKE_MINIMUM:
            return path
        found.append(f"{path} ({match[0] if match else 'does not run'})")
    raise SystemExit(
        f"CMake {CMAKE_MINIMUM[0]}.{CMAKE_MINIMUM[1]} or newer is needed and {', '.join(found) or 'none'} was found: "
        "run `pip install cmake ninja`."
    )


def run_cmake(*arguments, hint=""):
    """Runs CMake; ends the build when it fails, with its output above the message."""
    print("+", *arguments, flush=True)
    status = subprocess.run(arguments).returncode
    if status:
        raise SystemExit(
            f"`{' '.join(arguments[:3])} ...` failed with status {status}; the reason is printed above.{hint}"
        )


class CMakeBuild(build_ext):
    """Compiles with CMake and installs lib/ into the package: of the wheel, or of this tree for an editable install."""

    def run(self):
        build_environment.require_linux()
        torch = build_environment.torch_dir()
        build_dir = self._build_dir(torch)
        cmake = find_cmake()
        self._configure(cmake, build_dir, torch)
        print(SETTINGS.jobs_text(), flush=True)
        hint = f" A compiler that was killed had no memory left: set MAX_JOBS below {SETTINGS.jobs}."
        jobs = str(SETTINGS.jobs)
        run_cmake(cmake, "--build", str(build_dir), "--parallel", jobs, hint=hint if SETTINGS.jobs > 1 else "")
        package = ROOT / "flash_attn" if self.inplace or self.editable_mode else Path(self.build_lib) / "flash_attn"
        run_cmake(cmake, "--install", str(build_dir), "--component", "python", "--prefix", str(package), "--strip")

    def _build_dir(self, torch):
        """Kept between builds, so that the next one compiles what has changed; one per torch and Python."""
        given = os.environ.get("FLASH_ATTN_BUILD_DIR", "")
        name = f"torch-{build_environment.torch_release(torch)}{sysconfig.get_config_var('EXT_SUFFIX')}"
        return ROOT / given if given else ROOT / "build" / name

    def _configure(self, cmake, build_dir, torch):
        ninja = find_program("ninja")
        generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja[0]}"] if ninja else ["-G", "Unix Makefiles"]
        if not self._reusable(build_dir / "CMakeCache.txt", generator[1]):
            shutil.rmtree(build_dir)
        run_cmake(
            cmake,
            "-S",
            str(ROOT),
            "-B",
            str(build_dir),
            *generator,
            f"-DFLASH_ATTN_TORCH_DIR={torch}",
            f"-DPython_EXECUTABLE={sys.executable}",
            # A user's newer compiler may have warnings that this release does not know.
            "-DFLASH_ATTN_WERROR=OFF",
            "-DFLASH_ATTN_TESTS=OFF",
            *os.environ.get("CMAKE_ARGS", "").split(),
        )

    def _reusable(self, cache, generator):
        """Whether CMake can go on there: not after the tree moved, nor with another generator or compiler."""
        if not cache.is_file():
            return True
        text = cache.read_text(encoding="utf-8")
        compiler = shutil.which(os.environ.get("CXX", "")) or ""
        cached = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", text, re.MULTILINE)
        return (
            f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" in text
            and f"CMAKE_GENERATOR:INTERNAL={generator}\n" in text
            and (not compiler or cached is None or cached[1] == compiler)
        )

    def get_outputs(self):
        return []

    def get_output_mapping(self):
        return {}


class CleanBuildPy(build_py):
    """Starts from an empty build/lib; setuptools would pack what an earlier build left there."""

    def run(self):
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


SETTINGS = build_environment.read()
require_wheel_command()
os.environ.setdefault("SOURCE_DATE_EPOCH", build_environment.EPOCH)
without = [] if SETTINGS.triton else [build_environment.TRITON_PACKAGE, f"{build_environment.TRITON_PACKAGE}.*"]
setup(
    name="flash_attn",
    version=package_version(SETTINGS.local),
    description="FlashAttention for AMD GPUs and CPUs, with the interface of flash-attn",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="flash_attn for AMD contributors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    python_requires=">=3.9",
    packages=find_packages(include=["flash_attn", "flash_attn.*"], exclude=without),
    py_modules=["flash_attn_2_cuda", "flash_attn_interface", "flash_attention_amd"],
    ext_modules=[Extension("flash_attn.lib.flash_attn_2_cuda", sources=[])] if SETTINGS.compiles else [],
    cmdclass={"build_ext": CMakeBuild, "build_py": CleanBuildPy},
    # Written so that Debian's 1.13.0a0, a release by its content but not by its number, is accepted too.
    install_requires=["torch>1.12.1", "einops"],
    zip_safe=False,
)
