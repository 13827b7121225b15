"""The build backend that pyproject.toml names: setuptools', and one sentence where setuptools is missing.

That happens with --no-build-isolation alone: environments of Python 3.12 and later begin without setuptools.
"""

import sys

try:
    from setuptools.build_meta import *  # noqa: F403
except ModuleNotFoundError:
    raise SystemExit(
        f"{sys.executable} has no setuptools, with which flash_attn is built: run `pip install .` without "
        "--no-build-isolation, which brings it, or `pip install -r requirements/build.txt` first."
    ) from None
