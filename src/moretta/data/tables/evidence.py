"""Evidence in cells: ids, dates, codes, marks, spellings of one word, and numbers for absent values.

Each function looks at the set of cells, never at their order. `moretta.data.tables.inference` turns the evidence into
questions.
"""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from moretta.data.tables.files import DATE_LIKE, are_numbers
from moretta.data.tables.rows import marked, without_unit
from moretta.data.tables.schema import Mark, Number

FEW_ROWS = 10  # with fewer, cells that all differ are no evidence

# Names of ids: of rows, the words for ids, and words for a person's number, in some languages.
_ROWS = re.compile(
    r"^(index|idx|unnamed [0-9 ]+|(index )?level [0-9]+|row ?(names?|nums?|numbers?|id|no|nr|index)|zeilennummer|序号)$"
)
_COUNTED = re.compile(
    r"^(row|rn|nr|no|num|number|lfd( ?nr)?|obs|s ?no|sr ?no|sl ?no|serial( no| number)?|seq|sequence|line|zeile|riga"
    r"|ligne|fila|rij|番号|번호)$"
)
_ALONE = re.compile(
    r"(^| )(ids?|uid|uuid|guid|mrn|ssn|pid|nhs|nhc|ipp|nip|dni|nif|cpf|bsn|pesel|cpr|rut|patid|patnr|patientid|subjid"
    r"|usubjid|personnummer|fodselsnummer|henkilotunnus|codice fiscale|identifi(er|ant|cativo|cador|kator|cacion)"
    r"|code (no|nr|num|number)|(sample|specimen|proben?|muestra|campione) (no|nr|num|number|code|nummer|numero)"
    r"|kennung|kennzeichen|aktenzeichen|matricol[ae]|matricule|nosologico|historia clinica|prontuario)( [0-9]+)?$"
    r"|^id( |$)|(patient|fall|akten?|proband|person|kranken|versicherten|aufnahme|kunde)\w*(nummer|nr|kennung|id)$"
    r"|(編號|编号|病历号|住院号|門診號|환자번호|患者番号)$"
)
_WHOSE = (
    r"(record|hospital|account|visit|encounter|admission|person|member|customer|patient|subject|case|chart|file|study"
    r"|patientin|proband|fall|akte|aufnahme|person|paziente|cartella|ricovero|soggetto|caso|paciente|sujeto|expediente"
    r"|episodio|historia|ficha|registro|usuario|sujet|dossier|sejour|malade|opname|pacjent|pacient|potilas|asiakas)"
)
_NUMBER_OF = r"(id|no|nr|n|num|number|key|code|nummer|numero|nro|cod|codice|codigo|numer|cislo|[0-9])"
_OF_WHOM = re.compile(
    rf"(^| )({_WHOSE}( de| di| del| du| della)? {_NUMBER_OF}|{_NUMBER_OF}( de| di| del| du| della| d)? {_WHOSE})$"
)
_WHOM = re.compile(r"(^| )(patients?|subject|case|paziente|paciente|patientin|proband|pacjent|potilas|soggetto|sujet)$")
_PEOPLE = re.compile(
    r"^names?$|(^| )(first|last|given|family|middle|maiden|full|sur|fore|patient|customer|person|doctor) ?names?$"
    r"|^((vor|nach|familien)namen?|apellidos?|nombres?|nome|cognome|nom|prenoms?|fornavn|etternavn|efternamn|imie"
    r"|nazwisko|voornaam|achternaam|e ?mail|(tele)?phone( number)?|telefono?|address|adresse|street)$"
)
_CODED = re.compile(
    r"(^| )(zip( ?code)?|post ?(al )?code?|plz|postleitzahl|code postal|codigo postal|postnummer|postnr|postnumero"
    r"|icd ?(9|10)?|(icd|atc|drg|ops|cpt|hcpcs|loinc|snomed|ndc) ?codes?)$"
)

_DAYS = (
    *("%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d", "%d-%m-%Y", "%m-%d-%Y"),
    *("%y-%m-%d", "%d.%m.%y", "%m/%d/%y", "%d/%m/%y", "%y/%m/%d", "%d-%m-%y", "%m-%d-%y"),
    *("%Y-%m", "%Y/%m", "%m/%Y"),
)
_DAYS_IN_WORDS = tuple(
    day.replace("%b", month)
    for month in ("%b", "%B")
    for day in (
        *("%d %b %Y", "%d-%b-%Y", "%d/%b/%Y", "%d.%b.%Y", "%d. %b %Y", "%d%b%Y", "%Y-%b-%d", "%Y %b %d"),
        *("%b %d, %Y", "%b %d %Y", "%a, %d %b %Y", "%A, %d %b %Y", "%A, %b %d, %Y", "%b %Y", "%b-%Y"),
        *("%d-%b-%y", "%d/%b/%y", "%d %b %y", "%d%b%y", "%b-%y", "%b %y"),
    )
)
_TIMES = (
    *("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p", ":%H:%M:%S"),
    *("T%H:%M", "T%H:%M:%S", "T%H:%M:%S.%f", "T%H:%MZ", "T%H:%M:%SZ", "T%H:%M:%S.%fZ", "T%H:%M:%S%z", "T%H:%M:%S.%f%z"),
)
_MONTH = (
    r"(jan|feb|mar|mrt|apr|abr|avr|may|mai|mei|maj|mag|jun|jui|giu|jul|lug|aug|ago|aou|sep|set|oct|okt|ott|out|nov|dec"
    r"|dez|dic|ene|gen|fev)[a-z]*\.?"
)
_IN_WORDS = re.compile(
    rf"^([a-z]+\.?,? )?([0-9]{{1,4}}(st|nd|rd|th|\.|º)?[-/. ]*(de )?{_MONTH}[-/., ]*(de )?[0-9]{{2,4}}"
    rf"|{_MONTH} [0-9]{{1,2}}(st|nd|rd|th)?,? [0-9]{{4}}|{_MONTH}[-/ ][12][0-9]{{3}}|{_MONTH}-[0-9]{{2}})([ t:].*)?$"
)
_OF_A_MONTH = re.compile(r"^([12][0-9]{3}[-/][01]?[0-9]|[01]?[0-9]/[12][0-9]{3})$")

_YEAR = re.compile(r"(^| )(years?|yr|jahr|anno|ano|annee|ar|rok)( |$)")
_CODES = np.array(
    [
        *(-1, -7, -8, -9, -77, -88, -99, -999, -9999, -99999, 7, 8, 9, 77, 88, 99, 777, 888, 997, 998, 999),
        *(7777, 8888, 9999, 77777, 88888, 99999, 999999, 99.9, 999.9, 9999.9),
    ]
)
_ABBREVIATED = frozenset({
    "yes", "no", "true", "false", "male", "female", "man", "woman", "positive", "negative", "normal", "abnormal",
    "unknown", "left", "right", "high", "low", "married", "single", "ja", "nein", "nej", "si", "sim", "nao", "oui",
    "non", "weiblich", "mannlich", "homme", "femme", "hombre", "mujer", "masculino", "femenino", "feminino", "maschio",
    "femmina", "uomo", "donna",
})  # fmt: skip
MARKS: tuple[Mark, ...] = get_args(Mark)
_LEADING_ZERO = re.compile(r"^[+-]?0[0-9]")
_BEHIND = re.compile(r"^[+-]?[0-9][0-9.,' ]*?(?P<unit>[^\s\d.,;:+\-/()<>='][^\d]{0,9})$")
_BEFORE = re.compile(r"^[+-]?(?P<unit>[$£¥€₩₪₫₱₴₹₺₽฿]) ?[+-]?[0-9][0-9.,' ]*$")  # P17 is a code, not 17 of P


def plain_name(name: str) -> str:
    """Return a column's name in small letters without accents, with a blank between words.

    >>> plain_name("PatientID"), plain_name("Unnamed: 0"), plain_name("Código_paciente")
    ('patient id', 'unnamed 0', 'codigo paciente')
    """
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", _without_accents(name))
    return re.sub(r"[\W_]+", " ", spaced.lower()).strip()


def _without_accents(text: str) -> str:
    return "".join(
        character for character in unicodedata.normalize("NFKD", text) if not unicodedata.combining(character)
    )


def is_name_of_ids(name: str, values: int, rows: int) -> bool:
    """Return whether a column's name means ids. values: its different values; two are no patients."""
    plain = plain_name(name)
    known = any(names.search(plain) for names in (_ROWS, _ALONE, _OF_WHOM, _WHOM))
    return values > 2 and (known or (values == rows and _COUNTED.search(plain) is not None))


def is_name_of_people(name: str) -> bool:
    """Return whether a column's name means names of people, or their addresses."""
    return _PEOPLE.search(plain_name(name)) is not None


def is_name_of_codes(name: str) -> bool:
    """Return whether a column's name means that its numbers are codes without an order."""
    return _CODED.search(plain_name(name)) is not None


def are_years(name: str, distinct: NDArray[np.float64]) -> bool:
    """Return whether whole numbers are years by the column's name."""
    return bool(len(distinct) and 1800 <= distinct[0] <= distinct[-1] <= 2200) and bool(_YEAR.search(plain_name(name)))


def date_formats(texts: Sequence[str]) -> tuple[str, ...] | None:
    """Return the known formats that all words fit, may be empty; None if they are not dates."""
    plain = [_without_accents(text).lower() for text in texts]
    in_words = sum(_IN_WORDS.match(text) is not None for text in plain)
    in_digits = sum(DATE_LIKE.match(text) is not None or _OF_A_MONTH.match(text) is not None for text in texts)
    if not texts or in_words + in_digits < 0.9 * len(texts):
        return None
    days, times = _DAYS_IN_WORDS if in_words else _DAYS, _TIMES if ":" in texts[0] else ("",)
    forms = [day + time for day in days for time in times]
    return tuple(form for form in forms if all(fits(text, form) for text in texts))


def fits(text: str, form: str) -> bool:
    """Return whether a text is a date of a form."""
    try:
        datetime.strptime(text, form)
    except ValueError:
        return False
    return True


def are_days(distinct: NDArray[np.float64]) -> bool:
    """Return whether whole numbers are all days such as 20240131."""
    if len(distinct) < 3 or distinct[0] < 19000101 or distinct[-1] > 21001231:
        return False
    return all(number == int(number) and fits(str(int(number)), "%Y%m%d") for number in distinct)


def with_leading_zero(words: Sequence[str]) -> list[str]:
    """Return the words that are numbers and begin with a zero, such as 0031."""
    return [word for word in words if _LEADING_ZERO.match(word)]


def as_written(words: Sequence[str], decimal: str) -> Number | None:
    """Return how to read words that are numbers except for marks between thousands or a unit beside them."""
    unit = _shared_unit(words)
    bare = [without_unit(word, unit) for word in words]
    if (mark := _mark_of(bare, decimal)) is not None:
        return Number(unit=unit, thousands=mark)
    return Number(unit=unit) if unit and are_numbers(np.array(bare, object), decimal).all() else None


def _shared_unit(words: Sequence[str]) -> str:
    """Return the one sign or word after or before numbers; empty if there are several."""
    for place in (_BEHIND, _BEFORE):
        units = {match["unit"] for word in words if (match := place.match(word))}
        if len(units) == 1:
            return units.pop()
    return ""


def _mark_of(words: Sequence[str], decimal: str) -> Mark | None:
    """Return the mark between the thousands of words that are numbers otherwise."""
    for mark in MARKS:
        fraction = "" if mark == decimal else rf"({re.escape(decimal)}[0-9]+)?"
        grouped, small = marked(mark, decimal), re.compile(rf"^[+-]?[0-9]{{1,3}}{fraction}$")
        grouped_words = [word for word in words if grouped.match(word)]
        rest = [word for word in words if not grouped.match(word)]
        if not grouped_words or not all(small.match(word) for word in rest):
            continue
        if mark != decimal or _are_grouped(grouped_words, rest, mark):
            return mark
    return None


def _are_grouped(grouped: list[str], rest: list[str], mark: str) -> bool:
    """Return whether 1.234 is no fraction: it is outside the rest, these are near 1000, or most are round."""
    if not rest:
        return 2 * sum(word.endswith("0") for word in grouped) >= len(grouped)
    sizes = [size for word in rest if (size := abs(float(word)))] or [0.0]
    fractions = [abs(float(word.replace(mark, "."))) for word in grouped if word.count(mark) == 1]
    among = any(min(sizes) <= fraction <= max(sizes) for fraction in fractions)
    return len(fractions) < len(grouped) or max(sizes) >= 100 or not among


def spellings(words: Iterable[str], counts: Mapping[str, int]) -> dict[str, str]:
    """Return words that are another spelling of a more frequent one, such as yes, YES and Y."""
    meanings, by_sound = dict[str, str](), dict[str, list[str]]()
    for word in words:
        by_sound.setdefault(_sound(word), []).append(word)
    first = {sound: max(alike, key=lambda word: (counts[word], word)) for sound, alike in by_sound.items()}
    for sound, alike in by_sound.items():
        known = () if len(sound) == 2 else _ABBREVIATED & by_sound.keys() - {sound}
        longer = [word for word in known if word.startswith(sound)]
        meant = first[longer[0]] if len(longer) == 1 else first[sound]
        meanings |= {word: meant for word in alike if word != meant}
    return {word: meanings.get(meant, meant) for word, meant in meanings.items()}


def _sound(word: str) -> str:
    """Return the common part of a word's spellings: no capitals, no accents, and nothing between its parts."""
    plain = _without_accents(word).casefold()
    return re.sub(r"(?<=[^\W\d_])[\s_.\-]+(?=[^\W\d_])|(?<=\w)\.$", "", plain)


def stand_for_none(distinct: NDArray[np.float64]) -> list[float]:
    """Return the numbers that surveys write for absent values, such as -9 and 999, if they are far from the rest.

    A number far from all others is far from any part of them, whose spread is no larger.
    """
    codes, rest = distinct[np.isin(distinct, _CODES)], distinct[~np.isin(distinct, _CODES)]
    if len(rest) < 2:
        return []
    low, high = float(rest[0]), float(rest[-1])
    step = low == 0 and high < 5 and (rest == np.round(rest)).all()  # -1, 0 and 1 are steps
    absent_codes = list[float]()
    if len(rest) > FEW_ROWS and np.round(low) == low <= -10 and 2 * (rest[1] - low) >= high - rest[1]:
        absent_codes, low = [low], float(rest[1])  # such as -200
    for code in map(float, codes):
        share = 1.0 if abs(code) < 10 else 0.5 if abs(code) < 100 else 0.25
        far = low - code >= max(20, share * (high - low)) or (low >= 0 and (code < -1 or not step))
        if (code < min(low, 0) and far) or (code > high and code - high >= share * (high - low)):
            absent_codes.append(code)
    return absent_codes if any(code < 0 or code >= 9 for code in absent_codes) else []


def lone_zero(distinct: NDArray[np.float64], zeros: int, rows: int) -> bool:
    """Return whether zero is far from all other numbers, which are many and larger, and may mean "not measured".

    A zero in most rows is rather an amount of nothing. Counts continue from 1, with small steps there.
    """
    rest = distinct[distinct != 0]
    if not 0 < 2 * zeros <= rows or len(rest) < FEW_ROWS or rest[0] < 0:
        return False
    return bool(rest[0] >= max((rest[-1] - rest[0]) * (0.05 if zeros > 1 else 0.2), 5 * np.median(np.diff(rest))))


_KINDS_OF_WORDS = (
    {"yes", "no", "y", "n"}, {"true", "false", "t", "f"}, {"m", "f", "male", "female", "w"}, {"ja", "nein"},
    {"si", "no"}, {"oui", "non"}, {"positive", "negative", "pos", "neg"},
)  # fmt: skip


def is_cell(name: str, words: Sequence[str]) -> bool:
    """Return whether a column's name looks like one of its cells, all of them words."""
    if name in words:
        return True
    plain, others = name.casefold(), {word.casefold() for word in words}
    if any(plain in kind and others and others <= kind for kind in _KINDS_OF_WORDS):
        return True
    shape = _shape(name)
    return "9" in shape and bool(words) and all(_shape(word) == shape for word in words)


def _shape(word: str) -> str:
    return re.sub(r"[0-9]", "9", re.sub(r"[^\W\d_]", "a", word))
