"""Migrating a stream from one consumer per partition to one per worker, and back.

What lives here: looking at what there is (`survey`), what every step works with (`site`), and the steps: shadow
consumers (`shadow`), parity windows (`validate`), the switch of partitions (`switch`), the way back (`rollback`), the
end (`cleanup`) and the end where it stands (`abandon`). Decisions are `parti.core.migration…`,
`parti.core.abandonment` and `parti.core.parity`; records and their lease are `parti.coordination.migration_desk`.

Invariant: a partition is handled by its old consumer or by the fleet, never by both, and whoever gets it begins where
the other one stopped, whatever ends the process that migrates. (In dual mode both handle it, because that was asked
for, and after an end that was confirmed they may.)
"""
