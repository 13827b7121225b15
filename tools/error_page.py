#!/usr/bin/env python3
"""Write docs/errors.md: every error text of the package, with the messages of calls that really raise them.

    tools/error_page.py            rewrites docs/errors.md
    tools/error_page.py --check    exits with 1 if it is out of date

The texts come from the sources (error_sites.py), the calls from tests/python/error_cases.py. A text that no call raises
has to be named in NOT_PROVOKED with a reason; a message that comes from no text is an error of this tool.
"""

from __future__ import annotations

import argparse
import collections
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "errors.md"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "python")]

import error_sites  # noqa: E402

MADE_BY = "<!-- Made by tools/error_page.py from the sources and from calls that raise; do not edit. -->\n"
INTRODUCTION = """What is wrong with a call is said before anything is computed or written. `{...}` stands for what is
filled in. `RuntimeError`: an argument is not accepted. `NotImplementedError`: it is meaningful, but not there for this
backend or dtype. `AssertionError`, `ValueError`, `TypeError`: where upstream's Python code raises these. `ImportError`:
the installation does not fit. An argument of a wrong Python type is refused by torch (`Expected a value of type ...`)
or pybind11 (`incompatible function arguments`), in their own words."""
# Section: what to know about it, and the paths whose texts belong there.
SECTIONS = {
    "Tensors and numbers of attention": (
        "A message names the argument, what came and what is accepted: change the tensor or number accordingly. "
        "Letters in shapes: B batch, Sq and Sk rows of queries and keys, Tq and Tk packed rows, H and Hk heads of "
        "queries and keys, D and Dv head dims of keys and values.",
        ("csrc/core/checks.h", "csrc/core/validate.cpp", "csrc/torch/", "flash_attn/_operators.py",
         "flash_attn/_explain.py", "flash_attn/_function_classes.py", "flash_attn/_raw.py",
         "flash_attn/_tensor_kinds.py"),
    ),
    "Biases, masks, bounds and sinks": (
        "Shapes may have 1 where the text says `|1`, or leave leading dimensions out where it lists shorter shapes.",
        ("csrc/core/score_arguments.cpp",),
    ),
    "Key/value cache and pages": (
        "Lengths and page numbers are read before anything is written: after such an error the caches hold what they "
        "held. Give the cache more slots or pages, or fewer keys.",
        ("csrc/core/key_storage.cpp", "flash_attn/_kvcache.py"),
    ),
    "FlashAttention-3's functions": (
        "`import flash_attn_interface`; what is honoured there: [fa3.md](fa3.md).",
        ("flash_attn/_fa3",),
    ),
    "Rotary position embedding": (
        "AssertionErrors come from the Python functions, RuntimeErrors from the operators that they call, "
        "`torch.ops.flash_attn.rotate` and `rotate_`. Nothing was rotated. Letters: "
        "`csrc/include/flash_attn/rotary.h`.",
        ("csrc/core/rotary_arguments.cpp", "flash_attn/layers/rotary.py", "flash_attn/ops/triton/rotary.py"),
    ),
    "Layers, modules, losses and operations": (
        "Most are AssertionErrors, as upstream's are. What is accepted: [layers.md](layers.md).",
        ("flash_attn/layers/", "flash_attn/modules/", "flash_attn/losses/", "flash_attn/ops/", "flash_attn/utils/",
         "flash_attn/bert_padding.py"),
    ),
    "Installation, environment and the CPU": (
        "Nothing was computed. `python -m flash_attn` shows what was found.",
        ("flash_attn/_native.py", "flash_attn/_backend_choice.py", "flash_attn/testing.py", "csrc/cpu/",
         "csrc/core/thread_pool.cpp"),
    ),
    "Client libraries": (
        "Nothing in the library was changed. What is done to which version: [clients.md](clients.md).",
        ("flash_attn/integrations/",),
    ),
    "The Triton backend": (
        "It runs where FLASH_ATTENTION_TRITON_AMD_ENABLE asks for it; unset that to use the native backend. What it "
        "lacks is NotImplementedError; what is not accepted by any backend has the words of the sections above.",
        ("flash_attn/flash_attn_triton_amd/",),
    ),
    "GPUs": (
        "Tensors on a GPU are never copied elsewhere in silence. Move them to the CPU, leave out what is missing, or "
        "build for that GPU.",
        ("csrc/hip/", "csrc/core/features.cpp", "csrc/core/backend.h", "csrc/core/attention.cpp"),
    ),
    "The C interface": (
        "Functions return a status; the text is that of `flash_attn_last_error()`. `RuntimeError` here is "
        "`FLASH_ATTN_INVALID`, `FLASH_ATTN_VERSION` for struct sizes, or `FLASH_ATTN_FAILED`.",
        ("csrc/core/c_api.cpp",),
    ),
}  # fmt: skip

CPP_CALLERS = "only C and C++ programs can cause it; Python's arguments always give these tensors"
GPU = "it needs a GPU, a simulated one or a damaged installation"
# Beginning of "path: text" of texts that no call of error_cases.py raises, and why.
NOT_PROVOKED = {
    "csrc/core/c_api.cpp: ": "only C programs can cause it; tests/cpp has calls that do",
    "csrc/hip/": GPU,
    "flash_attn/flash_attn_triton_amd/": "it needs Triton, and `tests/test_flash_attn_triton_amd.py` raises each",
    "csrc/core/features.cpp: ": GPU,
    "csrc/core/backend.h: ": GPU,
    "csrc/core/attention.cpp: ": "it needs a device for which there is no backend",
    "csrc/core/thread_pool.cpp: ": "only C and C++ programs choose the threads of a pool",
    "csrc/core/rotary_arguments.cpp: flash_attn: out ": CPP_CALLERS,
    "csrc/core/score_arguments.cpp: flash_attn: {name} is the gradient of": CPP_CALLERS,
    "csrc/core/score_arguments.cpp: flash_attn: {name} must have the shape of": CPP_CALLERS,
    "csrc/core/checks.h: flash_attn: {name} must have a shape that memory can hold": CPP_CALLERS,
    "csrc/core/checks.h: flash_attn: {name} must be where q is": CPP_CALLERS,
    "csrc/core/key_storage.cpp: flash_attn: block_table must not have more slots": CPP_CALLERS,
    "csrc/core/key_storage.cpp: flash_attn: cache_batch_idx was given with cu_seqlens": CPP_CALLERS,
    "csrc/core/key_storage.cpp: flash_attn: cu_seqlens were given": CPP_CALLERS,
    "csrc/torch/ops.cpp: {name} has no kernel for this kind of tensor": "another text names the argument first",
    "csrc/core/validate.cpp: flash_attn: {name} is missing; pass": CPP_CALLERS,
    "csrc/core/validate.cpp: flash_attn: q is missing": CPP_CALLERS,
    "csrc/core/validate.cpp: flash_attn: S_dmask (return_softmax) needs": CPP_CALLERS,
    "csrc/core/validate.cpp: flash_attn: block_table, cache_batch_idx, seqused_k": CPP_CALLERS,
}
# Their messages differ between machines.
WITHOUT_EXAMPLE = ("flash_attn/_native.py", "flash_attn/testing.py", "csrc/cpu/")
# What torch and pybind11 say of an argument of a wrong Python type.
FOREIGN = ("Expected a value of type", "incompatible function arguments", "could not be coerced")


@dataclass
class Entry:
    """One text, which several places in the sources may raise."""

    template: str
    error: str
    sites: list = field(default_factory=list)
    arguments: dict = field(default_factory=dict)  # an ordered set
    functions: dict = field(default_factory=dict)
    example: str = ""

    def lines(self):
        yield f"**{_code(self.template)}**\n"
        if not self.example and not self.functions:
            reason = reason_for(self.sites[0])
            why = f"Not provoked when this page is made: {reason}" if reason else "Its words are those of a text above"
            yield f"`{self.error}`. {why}.\n"
            return
        functions = list(self.functions)
        more = f" and {len(functions) - 3} more" if len(functions) > 3 else ""
        about = f"about {', '.join(map(_code, self.arguments))}, " if self.arguments else ""
        yield f"`{self.error}`, {about}from {', '.join(map(_code, functions[:3]))}{more}."
        if self.example and self.example != self.template:
            yield f"For example: {_code(self.example)}"
        yield ""


def _code(text):
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def reason_for(site):
    """Why no call raises the site's text; None if no reason is stated."""
    return next((reason for start, reason in NOT_PROVOKED.items() if _key(site).startswith(start)), None)


def _key(site):
    return f"{site.path}: {site.template}"


def _raised_at(error, sites):
    """The sites that raised `error`: by line where that is Python, by text where it is C++."""
    message, place = str(error), None
    trace = error.__traceback__
    while trace is not None:
        place, trace = (Path(trace.tb_frame.f_code.co_filename), trace.tb_lineno), trace.tb_next
    path, line = place
    if path.is_relative_to(ROOT):
        here = [s for s in sites if s.path == str(path.relative_to(ROOT)) and line in s.lines and s.matches(message)]
        if here:
            return here
    return [s for s in sites if s.path.startswith("csrc/") and s.matches(message)]


def collect():
    """(entries by section, sites that no call raises, messages of no site)."""
    import error_cases

    sites = error_sites.all_sites()
    sections = {title: {} for title in SECTIONS}
    entry_of = {}
    for site in sites:
        title = next(t for t, (_, paths) in SECTIONS.items() if site.path.startswith(paths))
        entry = sections[title].setdefault((site.template, site.error), Entry(site.template, site.error))
        entry.sites.append(site)
        entry_of[site] = entry
    unknown, provoked = collections.Counter(), set()
    for case in error_cases.all_cases():
        error = error_cases.provoke(case)
        raised = _raised_at(error, sites)
        if not raised and not any(words in str(error) for words in FOREIGN):
            unknown[f"{case.function}, {case.argument}: {type(error).__name__}: {error}"] += 1
        provoked.update(raised)
        if raised:
            # Of C++ texts that fit, the one with most fixed words is what was raised.
            entry = entry_of[max(raised, key=lambda site: site.literals)]
            entry.arguments.update(dict.fromkeys([case.argument] if case.argument else []))
            entry.functions[case.function] = None
            if not entry.sites[0].path.startswith(WITHOUT_EXAMPLE):
                entry.example = entry.example or str(error)
            if type(error).__name__ != entry.error:
                unknown[f"{type(error).__name__}, not {entry.error}: {error}"] += 1
    return sections, [site for site in sites if site not in provoked], unknown


def page(sections):
    lines = ["# Errors\n", MADE_BY, textwrap.fill(INTRODUCTION, 120) + "\n"]
    for title, entries in sections.items():
        lines += [f"## {title}\n", textwrap.fill(SECTIONS[title][0], 120) + "\n"]
        for entry in entries.values():
            lines += entry.lines()
    return "\n".join(lines).rstrip() + "\n"


def complaints(missing, unknown):
    """What keeps the page from being complete, in words."""
    found = [f"no call raises, and no reason is stated: {_key(site)}" for site in missing if reason_for(site) is None]
    for start in NOT_PROVOKED:
        if not any(_key(site).startswith(start) for site in missing):
            found.append(f"NOT_PROVOKED names what is provoked, or is not there: {start}")
    return found + [f"raised by no known text: {message}" for message in unknown]


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    args = parser.parse_args(arguments)
    sections, missing, unknown = collect()
    wrong = complaints(missing, unknown)
    text = page(sections)
    if args.check and PAGE.read_text() != text:
        wrong.append("docs/errors.md is out of date: run tools/error_page.py")
    if not args.check:
        PAGE.write_text(text)
    for complaint in wrong:
        print(f"error_page: {complaint}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
