"""Placement of arrays: on devices, rows divided over them, and on several processes."""

from phijax_rng._base.exports import publish
from phijax_rng.devices.placement import Placement, resolve
from phijax_rng.devices.row_masks import masked_mean, masked_sum

__all__ = [
    "Placement",
    "masked_mean",
    "masked_sum",
    "resolve",
]

publish(globals())
