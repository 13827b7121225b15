"""The Triton backend: this project's own kernels in Triton's language, for AMD's and NVIDIA's GPUs.

FLASH_ATTENTION_TRITON_AMD_ENABLE=TRUE, read when flash_attn is imported, makes it compute tensors on GPUs; on CPU
tensors Triton's interpreter runs the same kernels where TRITON_INTERPRET=1 was set, else they keep the CPU backend.
docs/triton.md lists what it has. `interface_fa` and `interface_v2` hold upstream's five raw functions.
"""
