"""Questions that only people can answer, and `dossier.toml` with their answers: for each key a text or a list."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moretta.contract.wording import did_you_mean
from moretta.engines.files import read_text
from moretta.errors import ParameterError

NAME = "dossier.toml"
LONGEST = 20_000  # characters of an answer

PARTIES, CONTROLLERS, OFFICER = "the parties", "the controllers", "the data-protection officer"


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        key: Its key in `dossier.toml`.
        section: The section of the dossier.
        by: The role that must answer.
    """

    key: str
    section: str
    by: str
    asks: str


QUESTIONS: Sequence[Question] = (
    Question("controllers", "0.1", PARTIES, "who are the controllers, and how are they and their officers reached"),
    Question(
        "processors",
        "0.2",
        CONTROLLERS,
        "who are the processors, such as the operator of the server, and what does each process",
    ),
    Question("planning", "0.4", CONTROLLERS, "when does the processing begin and end"),
    Question("team", "0.5", CONTROLLERS, "who makes the assessment, and in which role"),
    Question("reasons", "0.5", CONTROLLERS, "why is the assessment made, and what does it leave out"),
    Question("data-subjects", "1.1.a", CONTROLLERS, "whom are the rows about, and which columns relate to a person"),
    Question("special-categories", "1.1.a", CONTROLLERS, "which columns are of special categories, such as health"),
    Question("purpose", "1.1.b", CONTROLLERS, "which purpose does the model serve, and why does it need these data"),
    Question("secondary-uses", "1.1.c", CONTROLLERS, "what else may the data or the model be used for"),
    Question("context", "1.1.d", CONTROLLERS, "how many people are concerned, where, and how are they related to you"),
    Question("transfers", "1.1.d", CONTROLLERS, "does anything go to a third country or cross a border"),
    Question("collection", "1.2", PARTIES, "how were the rows collected, where are they kept, how are they deleted"),
    Question("assets", "1.3", PARTIES, "which machines are used, and who operates them"),
    Question("codes", "1.4", CONTROLLERS, "which approved codes of conduct apply"),
    Question("legal-basis", "2.1.a", CONTROLLERS, "which legal basis does each purpose have"),
    Question("lifted-prohibition", "2.1.b", CONTROLLERS, "what lifts the prohibition for special categories"),
    Question("need", "2.2.a", CONTROLLERS, "why is each column needed"),
    Question("retention", "2.2.a", CONTROLLERS, "how long are rows, models, run folders and recordings kept"),
    Question("data-quality", "2.2.b", PARTIES, "which quality must the data have, and how is it kept"),
    Question("principles", "2.3.a", CONTROLLERS, "which measures serve the principles of Article 5(1)"),
    Question("rights", "2.3.b", CONTROLLERS, "how do people exercise their rights, also where a model was trained"),
    Question("other-requirements", "2.3.c", CONTROLLERS, "which agreements cover consent, processors and transfers"),
    Question("security", "2.3.e", PARTIES, "how are machines, keys and run folders guarded"),
    Question("impacts", "3.1", CONTROLLERS, "how may the processing, as designed, affect people"),
    Question(
        "necessity", "3.2", CONTROLLERS, "which less intrusive ways were considered, and why were they not chosen"
    ),
    Question("proportionality", "3.3", CONTROLLERS, "are the benefits proportionate to the impacts"),
    Question("events", "4.1.a", PARTIES, "what may go wrong: access, change, loss, and with what impact"),
    Question("likelihood", "4.1.c", CONTROLLERS, "how likely and how severe is each risk, and is it acceptable"),
    Question("measures", "4.2.a", CONTROLLERS, "which further measures are taken against which risk"),
    Question("acceptance", "4.2.b", CONTROLLERS, "are the risks that remain acceptable, and why"),
    Question("plan", "4.2.c", CONTROLLERS, "who does what by when, and when is this reviewed"),
    Question("advice", "5.1", OFFICER, "how do you advise on this processing"),
    Question(
        "views",
        "5.2",
        CONTROLLERS,
        "which views did data subjects or their representatives give, or why were they not asked",
    ),
    Question(
        "decision",
        "6",
        CONTROLLERS,
        "is the processing approved (on which conditions), rejected, or referred to the supervisory authority for "
        "prior consultation",
    ),
)


def read_answers(path: Path) -> Mapping[str, Sequence[str]]:
    """Return the answers of a file by key, each as its texts; an empty text is no answer.

    Raises:
        ParameterError: The file cannot be read, has an unknown key, or has an answer that is not text or is too long.
    """
    try:
        tables = tomllib.loads(read_text(path.parent, path.name))
    except OSError as error:
        raise ParameterError(f"{path}: it cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{path}: this is not TOML: {str(error).splitlines()[0]:.120}") from None
    known = [question.key for question in QUESTIONS]
    for key in tables:
        if key not in known:
            raise ParameterError(f"{path}: unknown question {key!r:.80}; {did_you_mean(key, known)}")
    return {key: texts for key, value in tables.items() if (texts := _texts(path, key, value))}


def _texts(path: Path, key: str, value: object) -> Sequence[str]:
    values = value if isinstance(value, list) else [value]
    texts = [text for text in values if isinstance(text, str) and len(text) <= LONGEST]
    if len(texts) < len(values):
        raise ParameterError(
            f"{path}: {key}: expected a text in quotes or a list of texts, up to {LONGEST} letters each"
        )
    return [" ".join(text.split()) for text in texts if text.strip()]


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
"""The documents, by their short names."""


@dataclass(frozen=True)
class Clause:
    """One clause. asks: its statement or demand, in our words."""

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
    "assumptions": Clause(SECURITY, "Assumptions", "assumptions on roles and links"),
    "nist-2-1-1": Clause(
        NIST, "section 2.1.1", "a guarantee is defined by its privacy parameters and its unit of privacy together"
    ),
    "nist-2-4": Clause(NIST, "section 2.4", "the unit of privacy says exactly what a guarantee protects"),
}
"""The clauses, by their names in sources; those of the template are added below."""

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
