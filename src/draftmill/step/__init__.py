"""How a drafter's step runs: eager, compiled or captured, and which of them is used. Knows no data.

Import from the modules: a light command must not load torch through this file.
"""
