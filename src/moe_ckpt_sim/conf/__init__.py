"""Config group ``simulate``: models, clusters, failures and systems for ``moe-ckpt simulate`` and ``moe-ckpt plan``."""
