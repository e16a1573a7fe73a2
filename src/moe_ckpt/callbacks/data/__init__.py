"""The position in the data under Lightning: of samplers, loaders and loops."""
