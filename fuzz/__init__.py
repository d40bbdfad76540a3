"""Fuzzing: hostile bytes through the entry points that outside input takes, and a fleet that gets hostile input.

    python -m fuzz.run TARGET             one target, for some seconds or inputs
    python -m fuzz.run TARGET --replay F  one input that was saved
    python -m fuzz.all                    all targets one after the other; `make fuzz`

A target is a function of bytes that raises when something is wrong; `targets` holds them, with a seed corpus of valid
inputs for each. The engines are atheris, which follows coverage, and a mutation loop of our own where atheris is not
installed and for targets that need a server. tests/property runs a few hundred inputs of each target with hypothesis.

Nothing in here is shipped. It may import everything of parti, and nothing imports it but tests.
"""
