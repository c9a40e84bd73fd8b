"""Points in domains and on their boundaries, drawn into geometries.png.

Every panel shows the batch of one step. Red arrows are outward normals at the points of a boundary; a point
of an edge has two.
"""

import matplotlib.pyplot as plt
import numpy as np

from phijax_rng import LatinHypercubeSampler, NamedBatchSource, SobolSampler, keys
from phijax_rng.sampling.geometry import (
    Ball,
    Box,
    BoxEdges,
    BoxFaces,
    InitialSlab,
    SpaceTimeCylinder,
    Sphere,
    Union,
)

SQUARE, CUBE = [(0, 1), (0, 1)], [(0, 1), (0, 1), (0, 1)]
DISK, CIRCLE = Ball((0.0, 0.0), 1.0), Sphere((0.0, 0.0), 1.0)
SAMPLERS = {  # and how many points
    "Box": (Box(SQUARE), 256),
    "SobolSampler(Box)": (SobolSampler(Box(SQUARE)), 256),
    "LatinHypercubeSampler(Box)": (LatinHypercubeSampler(Box(SQUARE)), 256),
    "Ball of two axes": (DISK, 256),
    "SobolSampler(Ball)": (SobolSampler(DISK), 256),
    "Union of two Balls": (Union((DISK, Ball((1.6, 0.0), 0.5))), 256),
    "BoxFaces of two axes": (BoxFaces(SQUARE), 40),
    "Sphere of two axes": (CIRCLE, 40),
    "BoxFaces of three axes": (BoxFaces(CUBE), 90),
    "BoxEdges of three axes": (BoxEdges(CUBE), 60),
    "Sphere of three axes": (Sphere((0.0, 0.0, 0.0), 1.0), 90),
    "SpaceTimeCylinder of a Sphere": (SpaceTimeCylinder(CIRCLE, (0, 2), time_axis=2), 90),
    "InitialSlab of a Ball": (InitialSlab(DISK, time_axis=2), 120),
}
SAME_PANEL = {"InitialSlab of a Ball": "SpaceTimeCylinder of a Sphere"}  # drawn in one panel


def draw(axes, rows, color):
    points = np.asarray(rows["inputs"])
    axes.scatter(*points.T, color=color, s=5)
    if "normals" in rows:
        normals = np.asarray(rows["normals"]).reshape(len(points), -1, points.shape[1])
        arrows = {"length": 0.2, "linewidth": 0.7} if points.shape[1] == 3 else {"scale": 12, "width": 0.005}
        for one in np.moveaxis(normals, 1, 0):
            axes.quiver(*points.T, *one.T, color="tab:red", **arrows)
    axes.set_aspect("equal")
    axes.margins(0.12)
    axes.tick_params(labelbottom=False, labelleft=False, labelright=False)


samplers = {name: sampler for name, (sampler, _) in SAMPLERS.items()}
source = NamedBatchSource(
    samplers, {name: size for name, (_, size) in SAMPLERS.items()}, keys.split_root(0).sampling
)
batches = source(0)

figure = plt.figure(figsize=(12, 9.5), layout="constrained")
panels = {}
for name, rows in batches.items():
    color = "tab:orange" if name in SAME_PANEL else "tab:blue"
    if name not in SAME_PANEL:
        spatial = {"projection": "3d"} if rows["inputs"].shape[1] == 3 else {}
        panels[name] = figure.add_subplot(3, 4, len(panels) + 1, title=name, **spatial)
        panels[name].title.set_size(9)
    draw(panels[SAME_PANEL.get(name, name)], rows, color)
figure.savefig("geometries.png", dpi=80, metadata={"Software": None})

edges = np.asarray(batches["BoxEdges of three axes"]["inputs"])
assert (((edges == 0) | (edges == 1)).sum(axis=1) >= 2).all()
print(f"{sum(len(rows['inputs']) for rows in batches.values())} points in geometries.png")
