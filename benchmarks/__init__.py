"""How fast a population trains beside plain trainers, TRL and the machine's limits.

``python -m benchmarks`` measures; chapter 12 reads what is recorded.
"""
