"""The dossier of a run: what its folder says of it, for a data-protection impact assessment.

    questions.py    the clauses that it follows; what only people can answer, and their answers (`dossier.toml`)
    document.py     sentences and sections, as JSON with a digest
    evidence.py     what a run folder holds, read once, and digests of its files
    description.py  who took part, with what data, what was done; what each role received, and which is personal data
    risks.py        attacks by severity, and what remains
    page.py         what it says first, and what stands in which section; the HTML page, of which each sentence is
                    one of the JSON, and the signatures below both

A dossier states what was recorded and measured. It judges nothing: what the law makes of it, people say.
"""
