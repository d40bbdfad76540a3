"""`parti dev demo`: a server, a worker process, messages, and a check of what happened.

`command` runs it and draws the screen, `traffic` makes, publishes and reads back messages, `app` is what the worker
process runs, `check` compares the stream with what the handler wrote down. Guards its own honesty: the figures come
from the stored stream and the handler's notes, never from the worker's counters.
"""
