"""Readable reports on run folders: a page for people, a table for the terminal.

    folder.py       a finished run folder -> a frozen `RunRecord`; a broken one -> one sentence
    table.py        runs side by side, over seeds and by class, as rows, and those as a `rich` table; scales in words
    statements.py   the model's quality, what was hidden from whom, and the results of attacks that tested it
    audit.py        the results of attacks: by role, runs side by side, pictures
    plots.py        the figures as inline SVG (matplotlib, imported only when a figure is drawn)
    page.py         one HTML page with all of it, readable offline, made by the Jinja2 templates in templates/
    living.py       the news for the page of a running run; page_server.py serves it
    terminal.py     text that is safe to print on a terminal
    dossier/        a run's part in a data-protection impact assessment, each sentence with its source

A report computes almost nothing new. Each number on the page is in a `result.json` or a `history.jsonl`, except sums
over phases and the moving averages of the curves.
"""
