"""Chaos on real processes: publishers, `parti worker` processes and servers that are killed, stopped and cut off.

What lives here: the app whose handlers note what they do (`handler`), the publishers (`publisher`, `odd_publisher`
with `odd_messages`), what all of them wrote down (`notes`), the judgement of it (`checker`, `timings`) and of logs
(`log_rules`), what a run is made of (`site`, `servers`, `workers`, `faults`, `orders`), the report (`outcome`), and
one program for each kind of run: `moves`, `kills`, `restarts`, `stops`, `standby`, `cluster`, `rolling`, `storm`,
`migration`.

Invariant: the checker sees only what was published and what handlers noted, never what parti says of itself. Logs can
fail a run, and never excuse anything.
"""
