"""Writes the tables of upstream's signatures that tests/python/test_signatures*.py compare this package with.

    python tools/fetch_upstream_signatures.py                  # fetches the source distribution with pip
    python tools/fetch_upstream_signatures.py --sdist FILE     # reads that file
    python tools/fetch_upstream_signatures.py --download DIR   # only fetches it, and prints its path

Upstream's source is parsed, never imported. (pip itself runs its setup.py for the metadata, which needs torch in this
environment; nothing is compiled.)
"""

from __future__ import annotations

import argparse
import ast
import glob
import json
import os
import subprocess
import sys
import tarfile
import tempfile

VERSION = "2.8.3"
MODULES = ("flash_attn_interface", "bert_padding")
# Modules around attention, of which functions and modules count and autograd classes and kernels do not.
LAYERS = (
    "layers.patch_embed",
    "layers.rotary",
    "losses.cross_entropy",
    "modules.block",
    "modules.mha",
    "modules.mlp",
    "ops.activations",
    "ops.fused_dense",
    "ops.layer_norm",
    "ops.rms_norm",
    "ops.triton.cross_entropy",
    "ops.triton.layer_norm",
    "ops.triton.rotary",
    "utils.distributed",
)
DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "data")
TABLE = os.path.join(DATA, "upstream_signatures.json")
LAYERS_TABLE = os.path.join(DATA, "upstream_layer_signatures.json")


def download(folder: str) -> str:
    """Fetches the source distribution into folder with pip's own configuration, and returns its path."""
    options = "--quiet --no-deps --no-binary :all: --no-build-isolation --dest".split()
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, folder, f"flash-attn=={VERSION}"],
        check=True,
        env={**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"},
    )
    (path,) = glob.glob(os.path.join(folder, f"flash_attn-{VERSION}*.tar.gz"))
    return path


def parameters(arguments: ast.arguments) -> list:
    """One item per parameter: ["q"], or with the source of its default ["window_size", "(-1, -1)"]; then ["*args"]."""
    positional = [*arguments.posonlyargs, *arguments.args]
    if arguments.kwonlyargs:
        raise ValueError(f"keyword-only parameters are not expected: {ast.unparse(arguments)}")
    required = len(positional) - len(arguments.defaults)
    defaults = [[] for _ in range(required)] + [[ast.unparse(default)] for default in arguments.defaults]
    listed = [[argument.arg, *default] for argument, default in zip(positional, defaults)]
    listed += [["*" + arguments.vararg.arg]] if arguments.vararg else []
    return listed + ([["**" + arguments.kwarg.arg]] if arguments.kwarg else [])


def module_signatures(source: str) -> dict:
    """Functions by name, and the forward of each class (what its apply takes, without ctx) as `Class.apply`."""
    table = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            table[node.name] = parameters(node.args)
        elif isinstance(node, ast.ClassDef):
            (forward,) = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "forward"]
            table[node.name + ".apply"] = parameters(forward.args)[1:]
    return table


def layer_signatures(source: str) -> dict:
    """Public functions by name, without device code, and __init__ and forward of torch modules, without self."""
    table = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            if not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                table[node.name] = parameters(node.args)
        elif isinstance(node, ast.ClassDef) and not any("Function" in ast.unparse(base) for base in node.bases):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and (
                    method.name == "__init__" or not method.name.startswith("_")
                ):
                    table[f"{node.name}.{method.name}"] = parameters(method.args)[1:]
    return table


def assigned_names(source: str) -> list:
    """Names that a module assigns at its top level, in either branch of an `if`, and renames of its own imports."""

    def names(body):
        for node in body:
            if isinstance(node, ast.If):
                yield from names([*node.body, *node.orelse])
            elif isinstance(node, ast.Assign):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from (a.asname for a in node.names if a.asname and not a.name.startswith("torch"))

    return sorted(set(names(ast.parse(source).body)))


def exported_names(source: str) -> list:
    """What `flash_attn/__init__.py` imports from its modules."""
    imports = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
    return sorted(alias.name for node in imports for alias in node.names)


def reader(archive: tarfile.TarFile):
    """Source text of a module of the source distribution, by its dotted name inside the package."""
    return lambda module: (
        archive.extractfile(f"flash_attn-{VERSION}/flash_attn/{module.replace('.', '/')}.py").read().decode()
    )


def read_signatures(sdist: str) -> dict:
    """The table of attention's modules."""
    with tarfile.open(sdist) as archive:
        source = reader(archive)
        return {
            "version": VERSION,
            "exports": exported_names(source("__init__")),
            "names": {module: assigned_names(source(module)) for module in MODULES},
            **{module: module_signatures(source(module)) for module in MODULES},
        }


def read_layer_signatures(sdist: str) -> dict:
    """The table of the modules around attention."""
    with tarfile.open(sdist) as archive:
        source = reader(archive)
        return {module: layer_signatures(source(module)) for module in LAYERS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--sdist", metavar="FILE", help="a source distribution that is already here")
    action.add_argument("--download", metavar="DIR", help="only fetch the source distribution into DIR")
    options = parser.parse_args()
    if options.download:
        print(download(options.download))
        return
    with tempfile.TemporaryDirectory() as folder:
        sdist = options.sdist or download(folder)
        tables = {TABLE: read_signatures(sdist), LAYERS_TABLE: read_layer_signatures(sdist)}
    for path, table in tables.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(render(table))
        print(os.path.normpath(path))


def render(table: dict) -> str:
    """JSON with one signature or list of names per line."""
    blocks = []
    for key, value in table.items():
        if isinstance(value, dict):
            lines = [f"    {json.dumps(name)}: {json.dumps(item)}" for name, item in sorted(value.items())]
            blocks.append(f"  {json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n  }")
        else:
            blocks.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


if __name__ == "__main__":
    main()
