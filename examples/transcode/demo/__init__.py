"""`make demo-transcode`: a server, a worker process, uploads good and bad, and a check of what was made of them.

`videos` makes files, `uploads` says which and what is expected of each, `check` compares that with what the store and
the job records hold afterwards, `picture` draws the use of slots over time, `__main__` runs it and draws the screen.
"""
