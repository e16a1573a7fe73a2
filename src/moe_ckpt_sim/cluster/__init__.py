"""Where a model is trained: machines, links, copies and what snapshots cost on them."""
