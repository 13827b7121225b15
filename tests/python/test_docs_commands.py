"""Documentation: every command is run or run dry; every message of docs/install-amd.md is what is printed; links."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import flash_attention_amd
import flash_attn
import flash_attn_interface
from flash_attn import _backend_choice, _native, verify

ROOT = Path(__file__).resolve().parents[2]
READMES = [ROOT / folder / "README.md" for folder in (".", "benchmarks", "examples")]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *READMES]
GUIDE = ROOT / "docs" / "install-amd.md"


def blocks(page, language):
    """The lines of all fenced blocks of that language."""
    texts = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [line for text in texts for line in text.splitlines()]


def commands_of(page):
    """Without what is only said about them."""
    return [re.split(r"\s+# ", line)[0] for line in blocks(page, "bash")]


MESSAGES = blocks(GUIDE, "text")
# Command to the first page that has it.
COMMANDS = {command: page for page in reversed(PAGES) for command in reversed(commands_of(page))}

# Options that make a command dry, by how it begins.
PIP_DRY = "--dry-run --no-deps --no-build-isolation --no-index"
ADDED = {
    "uv pip install": f"--dry-run --no-deps --offline --python {sys.executable}",
    "pip install .": PIP_DRY,
    "pip install -e .": PIP_DRY,
    "pip install --no-build-isolation .": PIP_DRY,
    "python setup.py install": "--help",
    "./build_rocm.sh": "--dry-run",
    "cmake -S": "-N -B {folder}",  # reads a cache, configures nothing
    "make ": "--dry-run",
}
SIMULATED = [command for command in COMMANDS if "--simulate" in command]


def test_the_blocks_are_found():
    assert len(commands_of(GUIDE)) > 20 and len(COMMANDS) > 50 and len(MESSAGES) >= 10 and len(SIMULATED) == 1
    for page in PAGES:
        unmarked = [line for line in blocks(page, "") if re.match(r"(pip|python|uv|cmake|make|git|docker) ", line)]
        assert not unmarked, f"commands of {page.name} in a block that is not marked as bash"


def run(command, folder):
    """Runs one line of the guide as written, with what makes it dry added."""
    added = next((extra for start, extra in ADDED.items() if start in command), "").format(folder=folder)
    words = shlex.split(f"{command} {added}")
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    if words[0] in ("python", "pip"):
        words = [sys.executable, *(["-m", "pip"] if words[0] == "pip" else []), *words[1:]]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_docker(command):
    """No engine is at hand: the file exists, and names the same `run` line."""
    words = shlex.split(command)
    file = words[words.index("-f") + 1] if "-f" in words else f"docker/{command.rpartition(':')[2]}.Dockerfile"
    assert f"#   {command}\n" in (ROOT / file).read_text()


def check_options(command):
    """Its options are accepted, those for a GPU as on a machine with one; other tests run the script."""
    words = [str(ROOT / "README.md") if word == "book.txt" else word for word in shlex.split(command)]
    script = next(word for word in words if word.endswith(".py"))
    path = ROOT / script
    if path.name == "attention.py" and "none" not in words and not hasattr(F, "scaled_dot_product_attention"):
        pytest.skip(f"torch {torch.__version__}: the peer is torch's scaled_dot_product_attention")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path.parent))
        patch.setitem(sys.modules, path.stem, module)
        spec.loader.exec_module(module)
        patch.setattr("torch.cuda.is_available", lambda: True)
        if hasattr(module, "measuring"):
            patch.setattr(module.measuring, "best_device", lambda: torch.device("cpu"))
        module.parse_arguments(words[words.index(script) + 1 :])


def check_instruction_set(command):
    """It is one that the guide names; no machine executes all of them, so the options alone are checked."""
    name = re.match(r"FLASH_ATTN_CPU_ISA=(\w+) ", command)[1]
    assert re.search(rf"[`=]{name}`", (ROOT / "docs" / "cpu-backend.md").read_text())
    check_options(command)


def check_file(command):
    """The files of requirements are there; the set-up or a stage of CI installs from them."""
    scripts = "".join((ROOT / "tools" / name).read_text() for name in ("setup.sh", "test.sh", "wheel.sh"))
    names = [word for word in shlex.split(command) if word.startswith("requirements/")]
    assert names and all((ROOT / name).is_file() for name in names)
    assert all(name in scripts or f"install_requirements {Path(name).stem}" in scripts for name in names)


def check_suite(command):
    """CI runs that very suite, with that variable."""
    variable, _, path = shlex.split(command)
    stages = (ROOT / "tools" / "test.sh").read_text()
    assert re.search(rf"{variable} .*\n.*-m pytest .*\n? +{path}", stages)


def check_tree(command):
    """A build folder that the same page configures, or a placeholder; its target exists. Building takes minutes."""
    words = shlex.split(command)
    assert words[2].startswith("<") or any(f"-B {words[2]}" in other for other in commands_of(COMMANDS[command]))
    if "--target" in words:
        lists = "".join(path.read_text() for path in (ROOT / "tools" / "gfxsim").rglob("CMakeLists.txt"))
        assert f"add_library({words[words.index('--target') + 1]} " in lists


def check_project(command):
    """Of another project in this tree, which needs the installed library: packaging's C++ tests build it."""
    words = shlex.split(command.partition(" && ")[0])
    assert (ROOT / words[words.index("-S") + 1] / "CMakeLists.txt").is_file()


def check_crate(command):
    """It and the program are there, and it has no dependencies; packaging's C++ tests build it."""
    words = shlex.split(command)
    manifest = ROOT / words[words.index("--manifest-path") + 1]
    assert "dependencies" not in manifest.read_text()
    programs = [manifest.parent / f"src/bin/{words[-1]}.rs"] if "--bin" in words else []
    assert all(path.is_file() for path in [manifest.parent / "src/main.rs", *programs])


def check_clone(command):
    assert os.access(ROOT / command.split()[-1], os.X_OK)


def check_torch(command):
    """The version and the index are a pair of the matrix; every version has a build for CPUs."""
    version, index = re.search(r"torch==([0-9.]+) .*/whl/(cpu|rocm[0-9.]+)$", command).groups()
    rocm = index.replace("rocm", "") if index != "cpu" else "6.4"
    subprocess.run([sys.executable, "create_matrix.py", "--check", "3.11", version, rocm], cwd=ROOT, check=True)


def check_packages(command):
    """The set-up installs the same packages."""
    setup = (ROOT / "tools" / "setup.sh").read_text()
    assert all(name in setup for name in shlex.split(command)[2:])


STATIC = {
    "docker": check_docker,
    "python benchmarks/": check_options,
    "python examples/": check_options,
    "torchrun": check_options,
    "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE python examples/": check_options,
    "FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE pytest": check_suite,
    "FLASH_ATTN_CPU_ISA=": check_instruction_set,
    "pip install torch": check_torch,
    "pip install -r": check_file,
    "uv pip install -r": check_file,
    "apt-get": check_packages,
    "cmake --build": check_tree,
    "cmake --install": check_tree,
    "cmake -S examples": check_project,
    "PKG_CONFIG_PATH=<prefix>/lib/pkgconfig cargo": check_crate,
    "git clone": check_clone,
}


@pytest.fixture(scope="module")
def uv(tmp_path_factory):
    """Folder of uv: beside this Python, on PATH, or in an environment made for it."""
    beside = str(Path(sys.executable).parent)
    if found := shutil.which("uv", path=f"{beside}{os.pathsep}{os.environ['PATH']}"):
        return str(Path(found).parent)
    folder = tmp_path_factory.mktemp("uv")
    wanted = next(line for line in (ROOT / "requirements/package.txt").read_text().splitlines() if line[:2] == "uv")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    done = subprocess.run([folder / "bin/python", "-m", "pip", "install", wanted], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"uv is not on this machine and could not be installed: {done.stderr}")
    return str(folder / "bin")


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in SIMULATED])
def test_commands(command, tmp_path, monkeypatch, request):
    for start, check in STATIC.items():
        if command.startswith(start):
            return check(command)
    if re.search("setup.py|pip install", command):
        pytest.importorskip("setuptools", reason="setuptools is not installed here")
    folders = [request.getfixturevalue("uv")] if command.startswith("uv ") else []
    folders += [str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(folders))
    if command.startswith("cmake -S"):
        source = ROOT / shlex.split(command)[2]
        (tmp_path / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={source.resolve()}\n")
    run(command, tmp_path)


@pytest.mark.gpu
@pytest.mark.simulated
def test_the_simulated_proof(tmp_path):
    assert "all good" in run(SIMULATED[0], tmp_path)


# Messages. In the guide `...` stands for what differs between machines.


def message(start):
    """The one message of the guide that begins so, as a pattern."""
    (text,) = (line for line in MESSAGES if line.startswith(start))
    return ".*".join(re.escape(part) for part in text.split("..."))


def said(call, error=ImportError):
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import build_environment

    monkeypatch.delenv("FLASH_ATTN_TORCH_DIR", raising=False)
    return build_environment


def binding_for_another_torch(environment, monkeypatch, tmp_path):
    return said(lambda: _native.binding_path("9.9.0+rocm9.9"))


def broken_binding(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(_native, "binding_path", lambda version: str(tmp_path / "flash_attn_2_cuda.so"))
    (tmp_path / "flash_attn_2_cuda.so").write_bytes(b"not a library")
    return said(_native.load.__wrapped__)


def tree_in_front(environment, monkeypatch, tmp_path):
    (tmp_path / "tree" / "flash_attn").mkdir(parents=True)
    (tmp_path / "tree" / "setup.py").touch()
    (tmp_path / "site" / "flash_attn" / "lib" / "torch-2.13").mkdir(parents=True)
    monkeypatch.setattr(_native, "LIBRARY_DIR", str(tmp_path / "tree" / "flash_attn" / "lib"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return said(lambda: _native.binding_path("2.13.0"))


def no_torch(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout="\n"))
    return said(environment.torch_dir, SystemExit)


def no_setuptools(environment, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "setuptools", None)
    source = compile((ROOT / "setup.py").read_text(), "setup.py", "exec")
    return said(lambda: exec(source, {"__file__": str(ROOT / "setup.py")}), SystemExit)


def no_setuptools_for_pip(environment, monkeypatch, tmp_path):
    for name in ("setuptools", "setuptools.build_meta"):
        monkeypatch.setitem(sys.modules, name, None)
    source = compile((ROOT / "tools" / "build_backend.py").read_text(), "build_backend.py", "exec")
    return said(lambda: exec(source, {}), SystemExit)


def import_without_torch(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    return said(_native.require_torch)


def jobs(environment, monkeypatch, tmp_path):
    monkeypatch.delenv("MAX_JOBS", raising=False)
    return environment.read().jobs_text()


def wrong_jobs(environment, monkeypatch, tmp_path):
    monkeypatch.setenv("MAX_JOBS", "all")
    return said(environment.max_jobs, SystemExit)


def windows(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "win32")
    return said(environment.require_linux, SystemExit)


def wrong_backend(environment, monkeypatch, tmp_path):
    monkeypatch.setenv(_backend_choice.VARIABLE, "maybe")
    return said(_backend_choice.triton_requested)


def no_gpu(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(verify.torch.cuda, "is_available", lambda: False)
    place = verify.find_place()
    return str(verify.Line("device", f"{place.name} ({place.note})"))


CAUSES = {
    "flash_attn is built for": binding_for_another_torch,
    "flash_attn's binding": broken_binding,
    "flash_attn was imported from the source tree": tree_in_front,
    "flash_attn is compiled for the torch": no_torch,
    "... has no setuptools, with which flash_attn is built: run `pip install .` instead": no_setuptools,
    "... has no setuptools, with which flash_attn is built: run `pip install .` without": no_setuptools_for_pip,
    "flash_attn computes with torch": import_without_torch,
    "flash_attn: compilers at a time": jobs,
    "MAX_JOBS is 'all'": wrong_jobs,
    "flash_attn's package is built on Linux": windows,
    "FLASH_ATTENTION_TRITON_AMD_ENABLE is 'maybe'": wrong_backend,
    "device ": no_gpu,
}
# Beginning of a message that another test provokes: that test, which has these words.
ELSEWHERE = {
    "not compared: triton cannot run": ("test_benchmarks_of_guides.py", "; --allow-single reports the other alone"),
    "the setuptools of": (
        "test_build_without.py",
        "run `pip install --upgrade setuptools` or `pip install wheel` first.",
    ),
    "`... --build": ("test_build.py", "A compiler that was killed .*: set MAX_JOBS below 4"),
    "GPU kernels: none": ("test_build_gpu.py", "none (no compiler for gfx942 (install ROCm, or clang 20 or later"),
    "GPU_ARCHS names": ("test_build_gpu.py", "names the GPU target 'mi300'; accepted are gfx900;gfx906;"),
}


@pytest.mark.parametrize("start", CAUSES)
def test_messages_are_what_is_printed(start, environment, monkeypatch, tmp_path):
    text = CAUSES[start](environment, monkeypatch, tmp_path)
    assert re.fullmatch(message(start), text), text


def test_every_message_has_a_cause():
    assert all(line.startswith((*CAUSES, *ELSEWHERE)) for line in MESSAGES)
    for start, (name, words) in ELSEWHERE.items():
        assert message(start) and words in (Path(__file__).parent / name).read_text(), start


# Every page


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface, flash_attention_amd], ids=lambda m: m.__name__)
def test_api_page_has_every_public_function_with_its_docstring(module):
    """`make docs` fails for a name of the page that is not there."""
    page = (ROOT / "docs" / "api.md").read_text()
    public = {name: value for name, value in vars(module).items() if name[0] != "_" and callable(value)}
    ours = {name: v for name, v in public.items() if v.__module__.startswith("flash_att") and name != "check_mask"}
    assert len(ours) > 2
    for name, value in ours.items():
        assert f"\n::: {module.__name__}.{name}\n" in page, name
        assert value.__doc__, name


def test_site_has_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f" {page.name}\n" not in navigation]
    assert not missing, "mkdocs.yml's nav lacks them"
