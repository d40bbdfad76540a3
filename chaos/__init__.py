"""Chaos on real processes: publishers, `parti worker` processes and servers that are killed, stopped and cut off.

What lives here: the app whose handlers note what they do (`handler`), the publisher (`publisher`), what both wrote
down (`notes`), the judgement of it (`checker`, `timings`), what a run is made of (`site`, `servers`, `workers`,
`faults`, `orders`), the report (`outcome`), and one program for each kind of run: `moves`, `kills`, `stops`,
`standby`, `cluster`, `rolling`, `storm`, `migration`.

Invariant: the checker sees only what was published and what handlers noted, never what parti says of itself.
"""
