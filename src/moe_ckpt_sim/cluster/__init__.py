"""The cluster that trains a model: machines, links, copies, and the costs of snapshots."""
