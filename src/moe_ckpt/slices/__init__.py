"""From a plan to the slices of tensors that this rank copies, claims and writes."""
