"""MoE layers, and the tokens that they route."""
