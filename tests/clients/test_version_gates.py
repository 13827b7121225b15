"""The conditions under which client libraries use flash_attn, evaluated on what is installed here.

Every constraint is the client's own, written as a specifier; none of these libraries has to be installed.
"""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import flash_attn

# Client and version, its constraint, and what is decided by it.
GATES = {
    "transformers 5.24": (">=2.3.3", "utils/import_utils.py: FlashAttention-2 at all"),
    "diffusers 0.42": (">=2.6.3", "models/attention_dispatch.py: backends flash and flash_varlen"),
    "NVIDIA TransformerEngine": (
        ">=2.1.1,<2.8.4",
        "attention/dot_product_attention/utils.py: minimum, and the next release",
    ),
    "ROCm TransformerEngine": (">=2.1.1,<=2.8.3", "the same file: maximum included, so any suffix is too new"),
    "TransformerEngine, four results": (">=2.7.0", "context_parallel.py: the underscore functions' style"),
    "TransformerEngine, packed LSE": (">=2.6.0", "context_parallel.py: softmax_lse (H,total) in varlen"),
    "xformers to October 2025": (">=2.7.1,<=2.8.4", "ops/fmha/flash.py"),
    "axolotl": ("==2.8.3", "pyproject.toml, extra flash-attn"),
    "unsloth 2026.10": (">=2.6.3", "models/_utils.py: softcapping for Gemma 2"),
    "DeepSpeed 0.19": (">=2.7.0", "sequence/fpdt_layer.py: the underscore functions' style"),
    "exllamav2": (">=2.5.7", "attn.py: paged attention"),
}


def versions():
    """What clients ask: the attribute, and the metadata of the distribution under both spellings of its name."""
    return [
        flash_attn.__version__,
        importlib.metadata.version("flash-attn"),
        importlib.metadata.version("flash_attn"),
    ]


@pytest.mark.parametrize("client", GATES)
def test_gate(client):
    constraint, _ = GATES[client]
    for version in versions():
        assert SpecifierSet(constraint, prereleases=True).contains(version), (client, version)
        # Some compare parsed versions instead, where a local suffix counts.
        for specifier in SpecifierSet(constraint):
            assert compare(Version(version), specifier)


def compare(version, specifier):
    bound = Version(specifier.version)
    return {
        ">=": version >= bound,
        "<=": version <= bound,
        "<": version < bound,
        "==": version == bound,
    }[specifier.operator]


@pytest.mark.parametrize("version", ["2.8.3+rocm", "2.8.3.post1", "2.8.4"])
def test_suffixes_would_be_refused(version):
    """Why the version has none: ROCm's TransformerEngine and axolotl compare with 2.8.3 exactly."""
    for client in ("ROCm TransformerEngine", "axolotl"):
        assert not all(compare(Version(version), specifier) for specifier in SpecifierSet(GATES[client][0]))


def test_name_of_the_distribution():
    """transformers and diffusers look the import name up among the installed distributions."""
    owners = {name.replace("_", "-") for name in importlib.metadata.packages_distributions()["flash_attn"]}
    assert owners == {"flash-attn"}


def test_fa3_is_not_claimed():
    """transformers and diffusers take FlashAttention-3 only from a distribution flash-attn-3, which this is not."""
    owners = {name.replace("_", "-") for name in importlib.metadata.packages_distributions()["flash_attn_interface"]}
    assert owners == {"flash-attn"}
    from transformers.utils.import_utils import is_flash_attn_3_available, is_flash_attn_4_available

    assert not is_flash_attn_3_available() and not is_flash_attn_4_available()


def test_transformers_sees_the_package():
    """All of transformers' checks but the one for a GPU pass: is the package there, and new enough."""
    from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX
    from transformers.utils import is_flash_attn_greater_or_equal

    assert FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]["pkg_availability_check"]()
    assert is_flash_attn_greater_or_equal("2.3.3")


def test_diffusers_backends_are_usable():
    from diffusers.models import attention_dispatch

    assert attention_dispatch._CAN_USE_FLASH_ATTN and not attention_dispatch._CAN_USE_FLASH_ATTN_3
    for backend in ("flash", "flash_varlen"):
        attention_dispatch._check_attention_backend_requirements(attention_dispatch.AttentionBackendName(backend))


def test_axolotl_imports():
    """axolotl imports the cross entropy of both places when its option flash_attn_cross_entropy is set."""
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.losses.cross_entropy import CrossEntropyLoss
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    assert all(map(callable, (CrossEntropyLoss, cross_entropy_loss, index_first_axis, pad_input, unpad_input)))
