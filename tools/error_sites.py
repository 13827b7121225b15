"""Every place in the sources that raises an error with a text of its own, and the text with placeholders.

A site's template is its string literals with {} for what is filled in when the error is raised. tools/error_page.py
writes docs/errors.md from them.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPP_FOLDERS = ("csrc/core", "csrc/cpu", "csrc/torch", "csrc/hip/host", "csrc/hip/runtime")
# What raises, and how many of its arguments come before the text.
CPP_CALLS = {"fail": 0, "TORCH_CHECK": 1, "TORCH_CHECK_NOT_IMPLEMENTED": 1, "throw Error": 0, "throw NotSupported": 0}
CPP_CALLS.update({"throw VersionError": 0})
CPP_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)\'|//[^\n]*|[()\[\]{}]|,|\+|[^"\'()\[\]{},+/]+|/')
ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@dataclass(frozen=True)
class Site:
    path: str  # in the repository
    line: int
    parts: tuple  # literal text, and None for what is filled in
    names: tuple  # of what is filled in, in order; "" where it has none

    @property
    def template(self):
        names = iter(self.names)
        return "".join(f"{{{next(names)}}}" if part is None else part for part in self.parts)

    @property
    def literals(self):
        """How many characters of the text are fixed."""
        return sum(len(part) for part in self.parts if part is not None)

    def matches(self, message):
        """Whether `message` is this text with something filled in; what precedes the prefix flash_attn: is free."""
        pattern = "".join(".*" if part is None else re.escape(part) for part in self.parts)
        return re.fullmatch(pattern, message, re.DOTALL) is not None


def _site(path, line, pieces):
    """pieces: ("literal", text) or ("filled", name); neighbours of one kind are joined."""
    parts, names = [], []
    for kind, text in pieces:
        if kind == "filled":
            if not parts or parts[-1] is not None:
                parts.append(None)
                names.append(text)
        elif parts and parts[-1] is not None:
            parts[-1] += text
        else:
            parts.append(text)
    return Site(str(path.relative_to(ROOT)), line, tuple(parts), tuple(names))


# ---- C++


def _arguments(text, start):
    """The arguments of a call as lists of tokens, split at commas and + of the call's own depth; `start` follows (."""
    arguments, depth = [[]], 1
    for token in CPP_TOKEN.finditer(text, start):
        token = token.group()
        depth += (token in "([{") - (token in ")]}") if len(token) == 1 else 0
        if depth == 0:
            return arguments
        if token == "," and depth == 1:
            arguments.append([])
        elif not token.startswith("//") and token.strip():
            arguments[-1].append(token.strip())
    raise ValueError("the call does not end")


def _pieces(tokens):
    """Of one argument: what + joins."""
    depth, terms = 0, [[]]
    for token in tokens:
        depth += (token in "([{") - (token in ")]}") if len(token) == 1 else 0
        if token == "+" and depth == 0:
            terms.append([])
        else:
            terms[-1].append(token)
    for term in terms:
        if term[:2] == ["std::string", "("] and all(t.startswith('"') for t in term[2:-1]):
            term = term[2:-1]
        if term and all(token.startswith('"') for token in term):
            text = "".join(token[1:-1] for token in term)
            yield "literal", re.sub(r"\\.", lambda m: ESCAPES.get(m.group(), m.group()), text)
        else:
            inner = [t for t in term if re.fullmatch(r"[\w.:>-]+", t)]
            yield "filled", re.split(r"\.|::|->", inner[-1])[-1] if inner else ""


def cpp_sites(path):
    text = path.read_text()
    call = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, sorted(CPP_CALLS, key=len, reverse=True))) + r")\s*\(")
    for match in call.finditer(text):
        line_start = text.rfind("\n", 0, match.start()) + 1
        if "//" in text[line_start : match.start()] or "[[noreturn]]" in text[line_start : match.start()]:
            continue
        arguments = _arguments(text, match.end())[CPP_CALLS[match.group(1)] :]
        pieces = [piece for argument in arguments for piece in _pieces(argument)]
        if match.group(1) == "fail":
            pieces.insert(0, ("literal", "flash_attn: "))
        if any(kind == "literal" and text != "flash_attn: " for kind, text in pieces):
            yield _site(path, text.count("\n", 0, match.start()) + 1, pieces)


# ---- Python


def _python_pieces(node):
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield "literal", node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _python_pieces(value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _python_pieces(node.left)
        yield from _python_pieces(node.right)
    else:
        if isinstance(node, ast.FormattedValue):
            node = node.value
        yield "filled", node.id if isinstance(node, ast.Name) else ""


def python_sites(path):
    for node in ast.walk(ast.parse(path.read_text())):
        text = None
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = node.exc.args[0]
        elif isinstance(node, ast.Assert):
            text = node.msg
        pieces = list(_python_pieces(text)) if text is not None else []
        if any(kind == "literal" for kind, _ in pieces):
            yield _site(path, node.lineno, pieces)


def all_sites():
    """In the order of paths and lines."""
    sites = []
    for folder in CPP_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".cpp", ".h"):
                sites += cpp_sites(path)
    package = ROOT / "flash_attn"
    for path in [*sorted(package.rglob("*.py")), *sorted(ROOT.glob("flash*.py"))]:
        sites += sorted(python_sites(path), key=lambda site: site.line)
    return sites
