"""From a copied snapshot to a committed checkpoint: threads, acknowledgements, manifest, retention."""
