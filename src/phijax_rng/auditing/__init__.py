"""Which key draws what, and which keys are used twice."""

from phijax_rng._base.exports import publish
from phijax_rng.auditing.audit import audit
from phijax_rng.auditing.audit_report import AuditReport
from phijax_rng.auditing.findings import Draw, Finding

__all__ = [
    "AuditReport",
    "Draw",
    "Finding",
    "audit",
]

publish(globals())
