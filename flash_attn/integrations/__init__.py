"""Help for libraries that use flash_attn. Nothing here takes effect by being imported."""
