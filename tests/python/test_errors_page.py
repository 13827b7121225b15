"""docs/errors.md is what the sources say and what calls really raise, and no error text is left out."""

from __future__ import annotations

import re

import error_page
import error_sites
import pytest

newest_texts = pytest.mark.requires_torch(
    2, 4, "some texts are about torch.func, torch.compile and tensors of torch 2.4"
)


@pytest.fixture(scope="module")
def collected():
    return error_page.collect()


@newest_texts
def test_page_is_up_to_date(collected):
    assert error_page.PAGE.read_text() == error_page.page(collected[0]), "run tools/error_page.py"


@newest_texts
def test_every_text_is_provoked_or_has_a_reason(collected):
    _, missing, unknown = collected
    assert error_page.complaints(missing, unknown) == []


def test_every_text_says_what_to_do_or_what_is_accepted():
    remedy = re.compile(
        r"\b(must|accepted|pass|needs?|give|leave|set|build|install|run|move|make|compute[d]?|unset|call|split|takes"
        r"|update|use|shorten|pad)\b|\{_?remedy\}",
        re.IGNORECASE,
    )
    # What happened outside of the package; its own words follow.
    reports = ("flash_attn: out of memory", "flash_attn: unknown failure", "flash_attn: {what} failed: ")
    texts = [site.template for site in error_sites.all_sites() if not remedy.search(site.template)]
    texts = [text for text in texts if not text.startswith(reports)]
    assert texts == []


def test_what_is_missing_is_noticed():
    site = error_sites.all_sites()[0]
    new = error_sites.Site("csrc/core/new.cpp", range(1, 2), "RuntimeError", ("flash_attn: a new text",), ())
    wrong = error_page.complaints([new], {"flash_attn_func, q: RuntimeError: a text from nowhere": 1})
    assert any("no reason is stated: csrc/core/new.cpp: flash_attn: a new text" in text for text in wrong)
    assert any("raised by no known text" in text for text in wrong)
    # Nothing of what NOT_PROVOKED names was missing here, so each of its lines is out of date.
    assert sum("NOT_PROVOKED names" in text for text in wrong) == len(error_page.NOT_PROVOKED)
    assert error_page.reason_for(site) is not None


CPP = """
// throw Error("of a comment");
if (n < 0) fail(name, " must be \\"whole\\", got ", t.sizes[0], "; pass ", f(a, b));
throw NotSupported(std::string("flash_attn: no ") + to_string(p.dtype) +
                   " here");
TORCH_CHECK(x.dim() == (varlen ? 3 : 4), "flash_attn: ", varlen ? "T" : "B, S", " rows, got ", x.sym_sizes());
throw;
"""
PYTHON = '''
def f(x, y):
    """raise ValueError("of a docstring")"""
    assert x > 0, f"x is {x}; " "it must be positive."
    assert y
    if y:
        raise TypeError(
            f"{type(y).__name__} was given; "
            "pass None."
        )
    if x < y:
        raise RuntimeError(f"flash_attn: {x}")
    raise
'''


def test_texts_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(error_sites, "ROOT", tmp_path)
    cpp, python = tmp_path / "a.cpp", tmp_path / "a.py"
    cpp.write_text(CPP)
    python.write_text(PYTHON)
    assert [(s.error, s.template) for s in error_sites.cpp_sites(cpp)] == [
        ("RuntimeError", 'flash_attn: {name} must be "whole", got {size}; pass {b}'),
        ("NotImplementedError", "flash_attn: no {dtype} here"),
        ("RuntimeError", "flash_attn: {T | B, S} rows, got {shape}"),
    ]
    found = sorted(error_sites.python_sites(python), key=lambda site: site.lines.start)
    assert [(s.error, s.template, 6 in s.lines) for s in found] == [
        ("AssertionError", "x is {x}; it must be positive.", False),
        ("TypeError", "{y} was given; pass None.", False),
    ]
    assert found[0].matches("x is -1; it must be positive.") and not found[0].matches("x is -1.")


def test_no_error_is_raised_by_other_means():
    """What error_sites.py does not know would be left out in silence."""
    known = {"Error", "NotSupported", "VersionError"}
    for folder in error_sites.CPP_FOLDERS:
        for path in (error_sites.ROOT / folder).rglob("*"):
            if path.suffix not in (".cpp", ".h") or path.name == "pack.cpp":  # a tool of the build
                continue
            text = re.sub(r"//[^\n]*", "", path.read_text())
            assert set(re.findall(r"\bthrow\s+([\w:]+)\s*\(", text)) <= known, path
            assert not re.search(r"\b(TORCH_CHECK_(?!NOT_IMPLEMENTED)\w+|AT_ERROR|TORCH_INTERNAL_ASSERT)\b", text), path
