"""docs/install-amd.md: every command is run or run dry, every message is what the software prints; links."""

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

from flash_attn import _backend_choice, _native, verify

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "install-amd.md").read_text(encoding="utf-8")


def blocks(language):
    """The lines of all fenced blocks of that language."""
    return [line for text in re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL) for line in text.splitlines()]


COMMANDS, MESSAGES = blocks("bash"), blocks("text")

# Options that make a command dry, by how it begins.
ADDED = {
    "pip install .": "--dry-run --no-deps --no-build-isolation --no-index",
    "uv pip install": f"--dry-run --no-deps --offline --python {sys.executable}",
    "python setup.py install": "--help",
    "./build_rocm.sh": "--dry-run",
    "cmake -S": "-N -B {folder}",  # reads a cache, configures nothing
}
SIMULATED = [command for command in COMMANDS if "--simulate" in command]


def test_the_blocks_are_found():
    assert len(COMMANDS) > 20 and len(MESSAGES) >= 10 and len(SIMULATED) == 1


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


def check_benchmark(command):
    """Its options are accepted; test_benchmarks_of_guides.py runs it."""
    _, script, *options = shlex.split(command)
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    benchmark = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        spec.loader.exec_module(benchmark)
    benchmark.parse_arguments(options)


def check_torch(command):
    """The version and the index are a pair of the matrix."""
    torch, rocm = re.search(r"torch==([0-9.]+) .*/whl/rocm([0-9.]+)$", command).groups()
    subprocess.run([sys.executable, "create_matrix.py", "--check", "3.11", torch, rocm], cwd=ROOT, check=True)


def check_packages(command):
    """The set-up installs the same packages."""
    setup = (ROOT / "tools" / "setup.sh").read_text()
    assert all(name in setup for name in shlex.split(command)[2:])


def check_build_target(command):
    """The target exists; building it takes minutes."""
    assert f"add_library({shlex.split(command)[-1]} " in "".join(
        path.read_text() for path in (ROOT / "tools" / "gfxsim").rglob("CMakeLists.txt")
    )


def needs(command):
    """The program or module without which the command cannot be tried here, or None."""
    if command.startswith("uv ") and not shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        return "uv"
    if re.search("setup.py|pip install", command):
        pytest.importorskip("setuptools", reason="setuptools is not installed here")
    return None


STATIC = {
    "docker": check_docker,
    "python benchmarks/": check_benchmark,
    "pip install torch": check_torch,
    "apt-get": check_packages,
    "cmake --build": check_build_target,
}


@pytest.mark.parametrize("command", [command for command in COMMANDS if command not in SIMULATED])
def test_commands(command, tmp_path, monkeypatch):
    for start, check in STATIC.items():
        if command.startswith(start):
            return check(command)
    if (missing := needs(command)) is not None:
        pytest.skip(f"{missing} is not on this machine")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command.startswith("cmake -S"):
        (tmp_path / "CMakeCache.txt").write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT / 'tools' / 'gfxsim'}\n")
    run(command, tmp_path)


@pytest.mark.gpu
@pytest.mark.simulated
def test_the_simulated_proof(tmp_path):
    assert "all good" in run(SIMULATED[0], tmp_path)


# Messages. In the guide `...` stands for what differs between machines.


def message(start):
    """The guide's message that begins so, as a pattern."""
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
    "... has no setuptools": no_setuptools,
    "MAX_JOBS is 'all'": wrong_jobs,
    "flash_attn's package is built on Linux": windows,
    "FLASH_ATTENTION_TRITON_AMD_ENABLE is 'maybe'": wrong_backend,
    "device ": no_gpu,
}
ELSEWHERE = ("not compared: triton cannot run",)  # test_benchmarks_of_guides.py


@pytest.mark.parametrize("start", CAUSES)
def test_messages_are_what_is_printed(start, environment, monkeypatch, tmp_path):
    text = CAUSES[start](environment, monkeypatch, tmp_path)
    assert re.fullmatch(message(start), text), text


def test_every_message_has_a_cause():
    assert all(line.startswith((*CAUSES, *ELSEWHERE)) for line in MESSAGES)


# Every page


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_site_has_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text()
    missing = [page.name for page in (ROOT / "docs").glob("*.md") if f" {page.name}\n" not in navigation]
    assert not missing, "mkdocs.yml's nav lacks them"
