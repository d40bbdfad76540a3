"""The app that users write, the worker made of it, and the processes that run it.

The only room that knows both halves of a worker: `coordination` (what to own) and `worker` (reading and handling).
"""
