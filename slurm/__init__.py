"""A real Slurm cluster of several nodes on one machine, for tests and demonstrations.

Nothing of vitra is imported here, and the standard library is enough: `slurm/cluster` runs with the
system's Python.
"""
