"""The dossier of a run: the facts in its folder, for a data-protection impact assessment.

    questions.py    the clauses that it follows; questions that only people can answer, and answers (`dossier.toml`)
    document.py     sentences and sections, as JSON with a digest
    evidence.py     the content of a run folder, read once, and digests of its files
    description.py  the participants, the data and the training; what each role received, and which is personal data
    risks.py        attacks by severity, and the remaining risks
    page.py         the brief and the order of sections; the HTML page, whose sentences are those of the JSON, and the
                    signatures on both

A dossier states what was recorded and measured. It does not judge: people apply the law.
"""
