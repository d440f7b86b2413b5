"""What run folders say, made readable: a page for people, a table for the terminal.

    folder.py    a finished run folder -> a frozen `RunRecord`; a broken one -> one sentence
    table.py     the comparison of several runs, as rows, and those as a `rich` table
    privacy.py   what was hidden from whom, each sentence marked as tested by an attack or not
    plots.py     the figures as inline SVG (matplotlib, imported only when a figure is drawn)
    audit.py     what attacks came to: by role, runs side by side, pictures
    summary.py   what a page says first, in a few sentences
    page.py      one HTML page that holds all of it and opens offline, made by the Jinja2 templates in templates/
    dossier/     what a data-protection impact assessment needs of a run, each sentence with its source

A report reads what the run wrote and computes nothing new: each number on the page is in a `result.json` or a
`history.jsonl`, but for sums over phases and the moving averages of the curves.
"""
