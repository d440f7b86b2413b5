"""The dossier of a run: what its folder says of it, for a data-protection impact assessment.

    clauses.py     the clauses that the dossier follows, and where their text was read
    questions.py   what only people can answer, by section, and their answers (`dossier.toml`)
    document.py    sentences and sections, as JSON with a digest
    evidence.py    what a run folder holds, read once
    brief.py       what it says first
    described.py   who took part, with what data, what was done
    recipients.py  what each role received, and which of it is personal data
    risks.py       attacks by severity, and what remains
    sections.py    what stands in which section
    hashes.py      digests of the run's files
    page.py        the HTML page, of which each sentence is one of the JSON, and the pair of files
    signing.py     signatures of silos' identities below both

A dossier states what was recorded and measured. It judges nothing: what the law makes of it, people say.
"""
