"""Domains to draw points in."""

from phijax_rng._base.exports import publish
from phijax_rng.sampling.geometry.balls import Ball, Sphere
from phijax_rng.sampling.geometry.base import Geometry
from phijax_rng.sampling.geometry.boxes import Box, BoxEdges, BoxFaces, interval
from phijax_rng.sampling.geometry.composites import InitialSlab, SpaceTimeCylinder, Union

__all__ = [
    "Ball",
    "Box",
    "BoxEdges",
    "BoxFaces",
    "Geometry",
    "InitialSlab",
    "SpaceTimeCylinder",
    "Sphere",
    "Union",
    "interval",
]

publish(globals())
