"""A conformance suite for distillation losses: exact enumeration on small vocabularies."""

from asyncopd.audit.checks import CHECKS
from asyncopd.audit.measure import Measurement, measure
from asyncopd.audit.registered import registered_subjects
from asyncopd.audit.report import HELP, AuditReport, AuditRow, audit, audit_subject, load_subject, run_audit
from asyncopd.audit.subject import AuditBatch, Subject, audited
from asyncopd.audit.targets import TARGETS

__all__ = [
    "CHECKS",
    "HELP",
    "TARGETS",
    "AuditBatch",
    "AuditReport",
    "AuditRow",
    "Measurement",
    "Subject",
    "audit",
    "audit_subject",
    "audited",
    "load_subject",
    "measure",
    "registered_subjects",
    "run_audit",
]
