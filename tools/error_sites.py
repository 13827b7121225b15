"""Every place in the sources that raises an error with a text of its own, and the text with placeholders.

A site's template is its string literals with {} for what is filled in when the error is raised. tools/error_page.py
writes docs/errors.md from them.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPP_FOLDERS = ("csrc/core", "csrc/cpu", "csrc/torch", "csrc/hip/host", "csrc/hip/runtime")
# What raises, and how many of its arguments come before the text.
CPP_CALLS = {"fail": 0, "TORCH_CHECK": 1, "TORCH_CHECK_NOT_IMPLEMENTED": 1, "throw Error": 0, "throw NotSupported": 0}
CPP_CALLS.update({"throw VersionError": 0})
CPP_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)\'|//[^\n]*|[()\[\]{}]|,|\+|[^"\'()\[\]{},+/]+|/')
FILLERS = ("tuple", "str", "map", "join", "len", "type", "tolist", "__name__")
ESCAPES = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}


@dataclass(frozen=True)
class Site:
    path: str  # in the repository
    lines: range
    error: str  # the exception's type
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
        """Whether `message` is this text with something filled in."""
        return self._pattern.fullmatch(message) is not None

    @functools.cached_property
    def _pattern(self):
        return re.compile("".join(".*" if part is None else re.escape(part) for part in self.parts), re.DOTALL)


def _has_words(pieces):
    """Whether a text is written there; otherwise one from elsewhere is passed on."""
    return any(kind == "literal" and text != "flash_attn: " for kind, text in pieces)


def _site(path, lines, error, pieces):
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
    return Site(str(path.relative_to(ROOT)), lines, error, tuple(parts), tuple(names))


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


def _name(term):
    """What to call an expression: its choices where it chooses between texts, else its last identifier."""
    choices = [token[1:-1] for token in term if token.startswith('"') and len(token) > 2]
    if choices:
        return " | ".join(choice.strip(" ,") for choice in choices)
    words = [word for token in term for word in re.findall(r"[A-Za-z_]\w*", token)]
    for function, name in (("shape_of", "shape"), ("strides", "strides"), ("sym_sizes", "shape"), ("sizes", "size")):
        if function in words:
            return name
    words = [word for word in words if word not in ("std", "string", "to_string", "c_str", "toStringRef")]
    return words[-1] if words else "number"


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
            yield "filled", _name(term)


def cpp_sites(path):
    text = path.read_text()
    call = re.compile(r"(?<![\w.])(" + "|".join(map(re.escape, sorted(CPP_CALLS, key=len, reverse=True))) + r")\s*\(")
    for match in call.finditer(text):
        line_start = text.rfind("\n", 0, match.start()) + 1
        if "//" in text[line_start : match.start()] or "[[noreturn]]" in text[line_start : match.start()]:
            continue
        raises, prefixed = match.group(1), match.group(1) == "fail"
        first = CPP_CALLS[raises]
        if prefixed and path.name == "c_api.cpp":
            prefixed, first = False, 1  # A function of its own: (status, text).
        pieces = [piece for argument in _arguments(text, match.end())[first:] for piece in _pieces(argument)]
        if prefixed:
            pieces.insert(0, ("literal", "flash_attn: "))
        if _has_words(pieces):
            line = text.count("\n", 0, match.start()) + 1
            unsupported = "NotSupported" in raises or "NOT_IMPLEMENTED" in raises
            yield _site(path, range(line, line + 1), "NotImplementedError" if unsupported else "RuntimeError", pieces)


# ---- Python


def _python_name(node):
    """What to call an expression: its last attribute or name."""
    if isinstance(node, ast.Name):
        return node.id
    names = [n.attr if isinstance(n, ast.Attribute) else n.id for n in ast.walk(node)
             if isinstance(n, (ast.Attribute, ast.Name))]  # fmt: skip
    for name in ("shape", "stride", "dtype", "device"):
        if name in names:
            return "strides" if name == "stride" else name
    return next((name for name in names if name not in FILLERS), "value")


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
        yield "filled", _python_name(node)


def _checked_pieces(node):
    """(error, pieces) of the Triton backend's `check(condition, text)` or `lacks(condition, what, remedy)`."""
    texts = [list(_python_pieces(text)) for text in node.args[1:]]
    if node.func.id == "check":
        return "RuntimeError", [("literal", "flash_attn: "), *texts[0]]
    what, remedy = texts
    before = ("literal", "flash_attn: the Triton backend has no ")
    return "NotImplementedError", [before, *what, ("literal", "; "), *remedy]


def python_sites(path):
    has_checks = path.parent.name == "flash_attn_triton_amd"
    for node in ast.walk(ast.parse(path.read_text())):
        text, error = None, "AssertionError"
        if has_checks and isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("check", "lacks"):
            error, pieces = _checked_pieces(node)
            yield _site(path, range(node.lineno, node.end_lineno + 1), error, pieces)
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text, error = node.exc.args[0], ast.unparse(node.exc.func)
        elif isinstance(node, ast.Assert):
            text = node.msg
        pieces = list(_python_pieces(text)) if text is not None else []
        if _has_words(pieces):
            yield _site(path, range(node.lineno, node.end_lineno + 1), error, pieces)


def all_sites():
    """In the order of paths and lines."""
    sites = []
    for folder in CPP_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".cpp", ".h"):
                sites += cpp_sites(path)
    package = ROOT / "flash_attn"
    for path in [*sorted(package.rglob("*.py")), *sorted(ROOT.glob("flash*.py"))]:
        sites += sorted(python_sites(path), key=lambda site: site.lines.start)
    return sites
