"""What `colocate.policy.operations` defines, as Triton kernels.

All of it is bound by memory, so each kernel reads and writes every byte once. A sum over tokens (the
gradient of a norm's weight) is taken by a fixed number of programs, each of its own rows, and then over the
programs: no atomics, so the same step gives the same gradient on every run.
"""
