"""The `parti` command: one file for each noun, errors as one clear line.

Exit codes: 0 done, 1 something failed while running, 2 the input or the surroundings must be changed first.
"""
