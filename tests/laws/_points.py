"""Rows of the table of `test_every_sampler` for samplers of points: geometries, sequences, adaptive ones."""

from phijax_rng import (
    LatinHypercubeSampler,
    ResidualDistributionSampler,
    ResidualRefinementSampler,
    SobolSampler,
    UniformDomainSampler,
)
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

BOUNDS = [(0.1, 0.7), (-1.7, 1.7)]
SIZE = 16
NO_GEOMETRY = "domain must be a geometry, registered as a pytree, got 3. Pass for example a Box."


def row(make, other, *refused, size=SIZE, **more):
    """Arguments of a `Case`."""
    return {"make": make, "other": other, "size": size, "refused": refused, **more}


def distribution(exponent=1.0, **options):
    """Refreshed before steps 2, 4, 6, ..., so that the resumed run of the suite meets it on both sides."""
    domain = UniformDomainSampler(BOUNDS)
    return ResidualDistributionSampler(domain, 2, num_candidates=64, exponent=exponent, **options)


def refinement(method="distribution", capacity=40):
    return ResidualRefinementSampler(
        Box(BOUNDS), 2, capacity=capacity, num_initial=32, num_added=4, num_candidates=64, method=method
    )


def initial_state(sampler, key):
    return sampler.init(key)


OUT_OF_ORDER = "bounds[0] must be finite with lo < hi in float32, got (1.0, 0.0). Pass (lo, hi)."

POINTS = {
    "inside of a box": row(
        lambda: Box(BOUNDS),
        lambda: Box([(0.1, 0.7), (-1.7, 1.6)]),
        (lambda: Box([(1.0, 0.0)]), ValueError, OUT_OF_ORDER),
    ),
    "faces": row(
        lambda: BoxFaces(BOUNDS),
        lambda: BoxFaces(BOUNDS, faces=((0, "low"), (0, "high"), (1, "low"))),
        (lambda: BoxFaces([(1.0, 0.0)]), ValueError, OUT_OF_ORDER),
    ),
    "edges": row(
        lambda: BoxEdges([*BOUNDS, (2.0, 5.0)]),
        lambda: BoxEdges([*BOUNDS, (2.0, 4.0)]),
        (lambda: BoxEdges([(1.0, 0.0), (0.0, 1.0)]), ValueError, OUT_OF_ORDER),
    ),
    "disk": row(
        lambda: Ball((0.3, -1.0), 0.7),
        lambda: Ball((0.3, -1.0), 0.6),
        (
            lambda: Ball((0.3, -1.0), -1.0),
            ValueError,
            "radius must be positive in float32, got -1.0. Pass more than 0.",
        ),
    ),
    "ball": row(
        lambda: Ball((0.3, -1.0, 2.0), 0.7),
        lambda: Ball((0.3, -1.0, 2.1), 0.7),
        (
            lambda: Ball(((0.3,),), 1.0),
            ValueError,
            "center must be numbers of shape (n,), got shape (1, 1). Pass that shape.",
        ),
    ),
    "sphere": row(
        lambda: Sphere((0.3, -1.0, 2.0), 0.7),
        lambda: Sphere((0.3, -1.0, 2.0), 0.6),
        (
            lambda: Sphere((0.3, float("nan")), 1.0),
            ValueError,
            "center must be finite in float32, got (0.3, nan). Pass finite numbers.",
        ),
    ),
    "union": row(
        lambda: Union((Ball((0.3, -1.0), 0.7), Box(BOUNDS)), (1, 3)),
        lambda: Union((Ball((0.3, -1.0), 0.7), Box(BOUNDS)), (1, 2)),
        (
            lambda: Union((Ball((0.3,), 0.7), Box(BOUNDS)), (1, 2)),
            ValueError,
            "parts must have the same fields; parts[0] has {'inputs': 'float32[1]'} and parts[1] has "
            "{'inputs': 'float32[2]'}. Unite geometries of one space, all with normals or all without.",
        ),
    ),
    "cylinder": row(
        lambda: SpaceTimeCylinder(Sphere((0.3, -1.0), 0.7), (0.0, 0.6)),
        lambda: SpaceTimeCylinder(Sphere((0.3, -1.0), 0.7), (0.0, 0.6), time_axis=1),
        (
            lambda: SpaceTimeCylinder(Box(BOUNDS), (0.6, 0.0)),
            ValueError,
            "time_bounds[0] must be finite with lo < hi in float32, got (0.6, 0.0). Pass (lo, hi).",
        ),
    ),
    "slab": row(
        lambda: InitialSlab(Box(BOUNDS), 0.1),
        lambda: InitialSlab(Box(BOUNDS), 0.2),
        (
            lambda: InitialSlab(Box(BOUNDS), float("inf")),
            ValueError,
            "time must be finite in float32, got inf. Pass finite numbers.",
        ),
    ),
    "Sobol": row(
        lambda: SobolSampler(Ball((0.3, -1.0), 0.7)),
        lambda: SobolSampler(Box(BOUNDS)),
        (lambda: SobolSampler(3), TypeError, NO_GEOMETRY),
        (
            lambda: SobolSampler(Box(BOUNDS)).check_size(2**24 + 1, "size"),
            ValueError,
            "size must be at most 16777216, got 16777217. Draw less, or use independent points.",
        ),
    ),
    "Latin hypercube": row(
        lambda: LatinHypercubeSampler(Box(BOUNDS)),
        lambda: LatinHypercubeSampler(BoxFaces(BOUNDS)),
        (lambda: LatinHypercubeSampler(3), TypeError, NO_GEOMETRY),
        (
            lambda: LatinHypercubeSampler(Box(BOUNDS)).check_size(2**20 + 1, "size"),
            ValueError,
            "size must be at most 1048576, got 1048577. Draw less, or use independent points.",
        ),
    ),
    "residual distribution": row(
        distribution,
        lambda: distribution(2.0),
        (
            lambda: distribution(-1.0),
            ValueError,
            "exponent must not be negative, got -1.0. Use 0 or more.",
        ),
        state=initial_state,
    ),
    "residual refinement": row(
        refinement,
        lambda: refinement("greedy"),
        (
            lambda: refinement(capacity=41),
            ValueError,
            "capacity must be num_initial and a multiple of num_added, got "
            "capacity=41, num_initial=32, num_added=4. Use for example capacity=40.",
        ),
        state=initial_state,
    ),
}
