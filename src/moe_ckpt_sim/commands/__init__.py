"""``moe-ckpt simulate``, ``moe-ckpt plan`` and ``moe-ckpt window``: what would be, not what is."""
