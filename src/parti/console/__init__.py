"""The console: one read-only web page of a fleet, fed by server-sent events.

Imports `coordination`, `jobs`, `jetstream`, `core`, `config`, `strategies` and `model`; nothing of `cli`, `app` and
`worker`. It alone imports starlette and uvicorn (extra `console`). `picture` decides what is shown and does no I/O;
`watcher` reads the fleet, once for all browsers, with `tails` of its streams; `hub` hands changes to them; `access`
says who may look; `document` makes one answer of the page's files (`static`); `web` and `server` speak HTTP. Guards
that nothing is ever written to the fleet, that no secret is in what is sent, that it listens beyond this machine only
with a secret, and that a browser that does not read holds up nobody.
"""
