"""The arithmetic of PowerSGD: matrices of gradients as products of thin factors.

Factors are stored transposed, ``(rank, rows)`` and ``(rank, columns)``: matrix products of few
columns are many times slower on the CPU than those of few rows.
"""
