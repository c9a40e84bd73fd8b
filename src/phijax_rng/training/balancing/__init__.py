"""How named losses become one number."""

from phijax_rng._base.exports import publish
from phijax_rng.training.balancing.gradnorm import GradNormBalancer
from phijax_rng.training.balancing.ntk import NTKBalancer
from phijax_rng.training.balancing.protocol import AdaptiveBalancer, LossBalancer, ObservingBalancer
from phijax_rng.training.balancing.relobralo import ReLoBRaLoBalancer
from phijax_rng.training.balancing.static import StaticLossBalancer
from phijax_rng.training.balancing.uncertainty import UncertaintyBalancer

__all__ = [
    "AdaptiveBalancer",
    "GradNormBalancer",
    "LossBalancer",
    "NTKBalancer",
    "ObservingBalancer",
    "ReLoBRaLoBalancer",
    "StaticLossBalancer",
    "UncertaintyBalancer",
]

publish(globals())
