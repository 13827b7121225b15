"""The grid: which problems the tests run.

A full product of the features would be millions of cases. Instead each list is either a sweep over one axis or a
pairwise covering array: every two values of two different axes meet in at least one case (Cohen et al., "The AETG
system", IEEE TSE 1997). The arrays are generated when tests are collected, without randomness.

CPU tiles are up to 1024 keys (2048 for head dims below 128) and 256 queries, so the lengths of the feature and head-dim
grids span at least three blocks of keys (two) and two of queries; the contract's pairs, mostly shorter, are swept
besides.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import pytest

DTYPES = ("fp32", "fp16", "bf16", "fp64")
HEAD_DIMS = (1, 8, 16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256, 257, 576)

PAIRS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256),
    (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048),
    (1, 1), (1, 147), (147, 1), (1, 1537), (3, 799), (799, 3), (203, 113), (1100, 129),
)  # fmt: skip

MASKS: Dict[str, Dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "left": {"window": (37, -1)},
    "right": {"window": (-1, 29)},
    "both": {"window": (201, 53)},
    "narrow": {"window": (0, 0)},
    "causal-left": {"causal": True, "window": (130, 7)},
}


@dataclass(frozen=True)
class Case:
    """One problem. `lengths` holds the (Sq, Sk) of each sequence; a dense batch repeats one pair."""

    dtype: str = "fp32"
    lengths: Tuple[Tuple[int, int], ...] = ((113, 203),)
    varlen: bool = False
    slack: Tuple[int, int] = (0, 0)  # rows of q and of k, v past the last sequence; varlen only
    H: int = 2
    Hk: int = 2
    D: int = 64
    Dv: Optional[int] = None  # None: D
    causal: bool = False
    window: Tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: Optional[str] = None  # "H" or "BH"
    dropout_p: float = 0.0
    scale: Optional[float] = None
    bias: Optional[str] = None  # the dimensions that are not broadcast, of "BHQ"; "" broadcasts over all three
    bias_dtype: Optional[str] = None  # None: dtype
    mask: Optional[str] = None  # "padding", "3-D", "4-D", "heads"
    sink: bool = False
    bounds: Optional[str] = None  # "documents", "prefix", "heads"
    lse_gradient: bool = False
    packing: str = "separate"  # "kv", "qkv"
    strides: str = "contiguous"  # "heads first", "sliced"
    deterministic: bool = False

    @property
    def B(self) -> int:
        return len(self.lengths)

    @property
    def head_dim_v(self) -> int:
        return self.D if self.Dv is None else self.Dv

    @property
    def id(self) -> str:
        pairs = sorted(set(self.lengths), key=self.lengths.index)
        parts = [self.dtype, "varlen" if self.varlen else "dense", "+".join(f"{q}x{k}" for q, k in pairs)]
        parts += [f"H{self.H}:{self.Hk}", f"D{self.D}"]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in ("dtype", "varlen", "lengths", "H", "Hk", "D") and value != f.default:
                parts.append(f.name if value is True else f"{f.name}={value}".replace(" ", ""))
        return "-".join(parts)

    def upstream(self) -> Case:
        """The case without what upstream lacks."""
        return replace(self, bias=None, bias_dtype=None, mask=None, sink=False, bounds=None, lse_gradient=False)

    def features(self) -> List[str]:
        """Rows of the support matrix that this case proves when forward and backward agree with the oracle."""
        both = ["varlen" if self.varlen else "dense"]
        for name, used in [
            ("head dim 1 to 256", max(self.D, self.head_dim_v) <= 256),
            ("head dim 257 to 576", max(self.D, self.head_dim_v) > 256),
            ("Dv different from D", self.Dv not in (None, self.D)),
            ("causal", self.causal),
            ("window", self.window != (-1, -1)),
            ("softcap", self.softcap > 0),
            ("ALiBi", self.alibi is not None),
            ("dropout", self.dropout_p > 0),
            ("attn_bias", self.bias is not None),
            ("attn_mask", self.mask is not None),
            ("learnable_sink", self.sink),
            ("key_begin and key_end", self.bounds is not None),
            ("MQA/GQA", self.H != self.Hk),
            ("packed qkv and kv", self.packing != "separate"),
        ]:
            both += [name] if used else []
        rows = [f"{name} {way}" for name in both for way in ("forward", "backward")] + ["softmax_lse"]
        rows += ["gradient of softmax_lse"] if self.lse_gradient else []
        return rows + (["S_dmask"] if self.dropout_p > 0 else []) + (["deterministic"] if self.deterministic else [])

    def param(self, *marks):
        """For pytest.mark.parametrize("case", ...)."""
        return pytest.param(self, id=self.id, marks=[pytest.mark.feature(*self.features(), dtype=self.dtype), *marks])


Row = Dict[str, Any]


def covering(factors: Dict[str, Sequence], allowed: Callable[[Row], bool] = lambda row: True) -> List[Row]:
    """Rows in which every allowed pair of values of two factors occurs. `allowed` also judges partial rows."""
    names = list(factors)
    spread: Dict[Tuple, int] = {(n, v): 0 for n in names for v in factors[n]}
    missing = {
        ((a, x), (b, y)): None
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(factors[a], factors[b])
        if allowed({a: x, b: y})
    }

    def extend(row: Row) -> Optional[Row]:
        """The row with one more factor, preferring values that cover most, then those used least; None: dead end."""
        rest = [n for n in names if n not in row]
        if not rest:
            return row
        name = rest[0]

        def gain(value):
            pairs = (tuple(sorted([(name, value), item], key=lambda nv: names.index(nv[0]))) for item in row.items())
            return sum(pair in missing for pair in pairs)

        order = sorted(factors[name], key=lambda v: (-gain(v), spread[name, v]))
        for value in order:
            candidate = {**row, name: value}
            if allowed(candidate):
                done = extend(candidate)
                if done is not None:
                    return done
        return None

    rows = []
    while missing:
        pair = next(iter(missing))
        row = extend(dict(pair))
        missing.pop(pair)
        if row is None:
            continue  # the pair is allowed, but in no full row
        row = {n: row[n] for n in names}
        rows.append(row)
        for item in row.items():
            spread[item] += 1
        for two in itertools.combinations(row.items(), 2):
            missing.pop(two, None)
    return rows


HEADS = {"one": (1, 1), "mha": (2, 2), "gqa": (6, 2), "mqa": (3, 1)}

# Sq, Sk of each sequence; two query blocks and three key blocks (two where D < 128, but in "wide") in at least one of
# them, or many of either.
DENSE_LENGTHS = {"wide": ((530, 4180),) * 2, "tall": ((2100, 67),) * 2, "square": ((2060, 2060),)}
VARLEN_LENGTHS = {
    "ragged": ((530, 2100), (1, 1), (130, 40), (5, 129)),
    "empty ends": ((0, 40), (300, 300), (530, 2070), (0, 0), (33, 0)),
    "tall": ((3, 2), (1100, 67), (0, 7), (530, 2065)),
    "self": ((40, 40), (0, 0), (2055, 2055), (1, 1)),
}
FEATURES: Dict[str, Sequence] = {
    "lengths": (*(("dense", n) for n in DENSE_LENGTHS), *(("varlen", n) for n in VARLEN_LENGTHS)),
    "mask": tuple(MASKS),
    "dtype": DTYPES,
    "heads": tuple(HEADS),
    "head_dims": ((64, None), (40, None), (128, None), (32, 64), (72, 24)),
    "softcap": (0.0, 15.0),
    "alibi": (None, "H", "BH"),
    "dropout_p": (0.0, 0.17, 0.5),
    "bias": (None, "BHQ", "HQ", "B", ""),
    "hide": (
        None,
        ("mask", "padding"),
        ("mask", "3-D"),
        ("mask", "heads"),
        ("bounds", "documents"),
        ("bounds", "heads"),
    ),
    "sink": (False, True),
    "lse_gradient": (False, True),
    "packing": ("separate", "kv", "qkv"),
    "strides": ("contiguous", "heads first", "sliced"),
    "scale": (None, 0.31),
    "deterministic": (False, True),
}


def feature_row_allowed(row: Row) -> bool:
    """Combinations that are a problem at all: softcap excludes dropout, packing wants equal shapes.

    The longest sequences come with few and narrow heads, since the oracle takes Sq * Sk for each.
    """
    if row.get("softcap") and row.get("dropout_p"):
        return False
    if row.get("lengths", ("", ""))[1] in ("square", "self"):
        if row.get("heads", "one") not in (("one", "mha") if row.get("head_dims", (0,))[0] <= 64 else ("one",)):
            return False
    packing = row.get("packing", "separate")
    Dv = row.get("head_dims", (1, None))[1]
    if packing != "separate" and Dv is not None:
        return False
    if packing == "qkv":
        H, Hk = HEADS[row.get("heads", "one")]
        kind, name = row.get("lengths", ("dense", "square"))
        pairs = (DENSE_LENGTHS if kind == "dense" else VARLEN_LENGTHS)[name]
        return H == Hk and all(Sq == Sk for Sq, Sk in pairs)
    return True


def feature_case(row: Row) -> Case:
    kind, name = row["lengths"]
    H, Hk = HEADS[row["heads"]]
    D, Dv = row["head_dims"]
    plain = {
        n: row[n]
        for n in ("dtype", "softcap", "alibi", "dropout_p", "packing", "strides", "scale", "deterministic", "bias",
                  "sink", "lse_gradient")
    }  # fmt: skip
    return Case(
        lengths=(DENSE_LENGTHS if kind == "dense" else VARLEN_LENGTHS)[name],
        varlen=kind == "varlen",
        slack=(3, 5) if name == "ragged" and row["packing"] != "qkv" else (0, 0),
        H=H,
        Hk=Hk,
        D=D,
        Dv=Dv,
        **MASKS[row["mask"]],
        **dict([row["hide"]] if row["hide"] else []),
        **plain,
    )


def feature_cases() -> List[Case]:
    return [feature_case(row) for row in covering(FEATURES, feature_row_allowed)]


def lone_feature_cases(short: bool = False) -> List[Case]:
    """Each feature by itself, dense and varlen, in every dtype, over two query and two key blocks; short: over one."""
    alone: List[Dict[str, Any]] = [dict(settings) for settings in MASKS.values()]
    alone += [{"softcap": 15.0}, {"alibi": "H"}, {"alibi": "BH"}, {"dropout_p": 0.17}, {"Hk": 1, "H": 3}, {"Dv": 24},
              {"scale": 0.31}, {"packing": "kv"}, {"deterministic": True}]  # fmt: skip
    alone += [{"bias": which} for which in ("BHQ", "HQ", "BQ", "H", "")] + [{"bias": "HQ", "bias_dtype": "fp32"}]
    alone += [{"mask": which} for which in ("padding", "3-D", "4-D", "heads")] + [
        {"sink": True},
        {"lse_gradient": True},
    ]
    alone += [{"bounds": which} for which in ("documents", "prefix", "heads")]
    first, square = ((53, 210), (96, 96)) if short else ((530, 2100), (2060, 2060))
    bases = [Case(lengths=(first,) * 2), Case(lengths=(first, *VARLEN_LENGTHS["ragged"][1:]), varlen=True)]
    bases = [replace(base, D=48, dtype=dtype) for base in bases for dtype in DTYPES]
    return [replace(base, **settings) for base in bases for settings in alone] + [
        replace(base, packing="qkv", lengths=(square, (33, 33))[: 1 + base.varlen]) for base in bases
    ]


def head_dim_cases(varlen: bool) -> List[Case]:
    """Every head dim in every dtype; values of another head dim, causal and grouped heads in turn."""
    cases = []
    for n, (D, dtype) in enumerate(itertools.product(HEAD_DIMS, DTYPES)):
        Dv = HEAD_DIMS[(n * 7 + 3) % len(HEAD_DIMS)] if n % 2 else None
        pair = (260, 2100) if D < 128 else (140, 1100)  # longer tiles for narrower heads
        case = Case(
            dtype=dtype,
            D=D,
            Dv=Dv,
            H=3 if n % 3 == 0 else 2,
            Hk=1 if n % 3 == 0 else 2,
            causal=n // 4 % 2 == 0,
            lengths=(pair if n % 4 < 2 else pair[::-1],),
        )
        if varlen:
            case = replace(case, varlen=True, lengths=((5, 9), *case.lengths, (70, 66)))
        cases.append(case)
    return cases


def length_cases() -> List[Case]:
    """The contract's pairs of lengths and degenerate ones, pairwise with dtype, mask and heads."""

    def allowed(row: Row) -> bool:
        Sq, Sk = row.get("pair", (1, 1))
        return Sq * Sk < 2**20 or row.get("heads") in (None, "one")

    rows = covering(
        {"pair": PAIRS, "mask": tuple(MASKS), "dtype": DTYPES, "heads": ("one", "gqa", "mqa"), "D": (32, 64, 111)},
        allowed,
    )
    return [
        Case(
            dtype=r["dtype"],
            lengths=(r["pair"],),
            H=HEADS[r["heads"]][0],
            Hk=HEADS[r["heads"]][1],
            D=r["D"],
            **MASKS[r["mask"]],
        )
        for r in rows
    ]


def full_cases(pair: Tuple[int, int], mask: str) -> List[Case]:
    """For the wide sweep behind --full: every dtype and head dim at one pair of lengths with one mask.

    A batch for the short ones, so that E_pt is the largest of many numbers and not the luck of a few.
    """
    B = max(1, min(16, 2**14 // (pair[0] * pair[1])))
    return [
        Case(dtype=dtype, lengths=(pair,) * B, H=2, Hk=1, D=D, **MASKS[mask])
        for dtype, D in itertools.product(DTYPES, HEAD_DIMS)
    ]


def describe(case: Case) -> str:
    """For a failure: how to build the case again."""
    defaults = asdict(Case())
    changed = {f.name: getattr(case, f.name) for f in fields(case) if getattr(case, f.name) != defaults[f.name]}
    return "Case(" + ", ".join(f"{name}={value!r}" for name, value in changed.items()) + ")"
