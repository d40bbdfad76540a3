"""The simulation: parti's real code in virtual time, against a model of nats-server.

What lives here: the model of the server (`server`, `streams`, `consumers`, `api`) and the virtual time, processes and
network that run parti's code against it. The model answers only what parti asks; a differential test holds it to the
real nats-server.
"""
