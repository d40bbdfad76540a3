"""Load: the measured work of partitions shared out, near enough and not for the sake of noise."""

from __future__ import annotations

from fractions import Fraction

from parti.strategies.weighted import Weighted


class MeasuredLoad(Weighted):
    """Weighted by what the workers have measured: seconds of handler work a second.

    When partitions are moved, they are moved until everybody is close to its share, closer than what sets off a move
    (the setting `hysteresis`), so that a little noise does not set off the next one. A partition moves only if that
    leaves the two workers at most half as far apart as they were: to come back, it would have to look as bad the
    other way round. One that is more than a worker's share stays, and the others leave it. As few move as will do.
    """

    name = "load"
    bound = Fraction(41, 40)
    reach = Fraction(3, 4)
    few = True
    learns_loads = True
