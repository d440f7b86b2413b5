"""The clauses that a dossier follows. Only such are here as were read, or read as others quote them; docs/dossier.md
says which was read where.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GDPR = "GDPR"
TEMPLATE = "EDPB template 2026 (draft)"
WP248 = "WP 248 rev.01, Annex 2"
OPINION = "EDPB Opinion 28/2024"
NIST = "NIST SP 800-226"
SECURITY = "SECURITY.md"

DOCUMENTS: Mapping[str, str] = {
    GDPR: "Regulation (EU) 2016/679, the General Data Protection Regulation",
    TEMPLATE: "EDPB, Template for Data Protection Impact Assessment, version 1.0 of 10 March 2026, as put to public "
    "consultation",
    WP248: "Article 29 Working Party, Guidelines on Data Protection Impact Assessment, WP 248 rev.01 of 4 October "
    "2017, Annex 2, endorsed by the EDPB",
    OPINION: "EDPB, Opinion 28/2024 of 17 December 2024 on certain data protection aspects related to the processing "
    "of personal data in the context of AI models",
    NIST: "NIST Special Publication 800-226, Guidelines for Evaluating Differential Privacy Guarantees, March 2025",
    SECURITY: "Moretta’s SECURITY.md",
}
"""The documents by their short names."""


@dataclass(frozen=True)
class Clause:
    """One clause. asks: what it says or asks for, in our words."""

    document: str
    clause: str
    asks: str


CLAUSES: Mapping[str, Clause] = {
    "gdpr-4-1": Clause(
        GDPR, "Article 4(1)", "personal data is any information relating to an identified or identifiable person"
    ),
    "gdpr-35-2": Clause(GDPR, "Article 35(2)", "the advice of the data-protection officer is sought"),
    "gdpr-35-7-a": Clause(GDPR, "Article 35(7)(a)", "a systematic description of the processing and its purposes"),
    "gdpr-35-7-b": Clause(GDPR, "Article 35(7)(b)", "an assessment of necessity and proportionality"),
    "gdpr-35-7-c": Clause(GDPR, "Article 35(7)(c)", "an assessment of the risks to the rights and freedoms of people"),
    "gdpr-35-7-d": Clause(GDPR, "Article 35(7)(d)", "the measures envisaged to address the risks"),
    "gdpr-35-9": Clause(GDPR, "Article 35(9)", "the views of data subjects are sought where appropriate"),
    "wp248-description": Clause(
        WP248, "systematic description", "personal data, recipients, storage period, functions and assets are recorded"
    ),
    "wp248-necessity": Clause(WP248, "necessity and proportionality", "measures that serve both are determined"),
    "wp248-risks": Clause(WP248, "risks", "origin, nature, particularity and severity of risks are appreciated"),
    "opinion-34": Clause(
        OPINION, "paragraph 34", "models trained on personal data cannot in all cases be considered anonymous"
    ),
    "opinion-43": Clause(
        OPINION,
        "paragraph 43",
        "for anonymity the likelihood of extracting personal data, and of obtaining it by queries, must be "
        "insignificant for any person",
    ),
    "opinion-attacks": Clause(
        OPINION,
        "section 3.2.2",
        "tests against attacks such as membership inference, model inversion and reconstruction",
    ),
    "assumptions": Clause(SECURITY, "Assumptions", "what is assumed of roles and links"),
    "nist-2-1-1": Clause(
        NIST, "section 2.1.1", "a guarantee is defined by its privacy parameters and its unit of privacy together"
    ),
    "nist-2-4": Clause(NIST, "section 2.4", "the unit of privacy says exactly what a guarantee protects"),
}
"""The clauses by the name that sources have; those of the template are added below."""

_SECTIONS = {
    "0.1": "the controllers, their tasks and contacts",
    "0.2": "processors and sub-processors with their tasks",
    "0.3": "the internal name of the processing",
    "0.4": "the planned begin and end",
    "0.5": "team, references, reasons and scope of the assessment",
    "1.1.a": "each item of personal data, whose it is, and whether it is of a special category",
    "1.1.b": "each purpose, and the data that it needs",
    "1.1.c": "secondary or compatible uses",
    "1.1.d": "nature, scope and context; transfers",
    "1.2": "the stages of the processing, from collection to deletion",
    "1.3": "the means of processing and the assets that it relies on",
    "1.4": "approved codes of conduct",
    "2.1.a": "the legal basis of each purpose",
    "2.1.b": "the reason that lifts the prohibition for special categories",
    "2.2.a": "need, recipients and retention of each item",
    "2.2.b": "requirements on the quality of the data",
    "2.3.a": "measures for the principles of Article 5(1)",
    "2.3.b": "measures for the rights of data subjects",
    "2.3.c": "consent, processors and transfers",
    "2.3.d": "measures by design and by default",
    "2.3.e": "measures for the security of processing",
    "3.1": "impacts of the processing as designed",
    "3.2": "whether the processing is necessary",
    "3.3": "whether it is proportionate",
    "4.1.a": "impacts of accidental, unlawful or abnormal events",
    "4.1.b": "the method of the risk assessment",
    "4.1.c": "each risk with its likelihood and severity",
    "4.2.a": "additional measures",
    "4.2.b": "the risks that remain",
    "4.2.c": "the plan for measures and reviews",
    "5.1": "the advice of the data-protection officer",
    "5.2": "the views of data subjects or their representatives",
    "6": "the decision",
}

CLAUSES = {**CLAUSES, **{f"template-{name}": Clause(TEMPLATE, name, asks) for name, asks in _SECTIONS.items()}}
