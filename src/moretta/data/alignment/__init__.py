"""Partners' rows in one order, found by their ids and without showing them: private set intersection.

**Theory.** Partners hold rows of partly the same people, named by an id. Let E be an encoding of ids as points of a
curve (`curve`), and a and b secret numbers of two partners, drawn for this one exchange. Then a(b E(x)) = b(a E(x)),
and without a nobody can tell a E(x) from a random point, whatever x he guesses (the decisional Diffie-Hellman
assumption). So each shows its own ids under its own secret, the other puts its secret on top, and what is under both is
compared::

    A                                                  B
      a E(x) for all of A's ids, in secret order  -->
                                                  <--    b E(y) for all of B's ids, in secret order
      a (b E(y)), in the order they came          -->
                                                  <--    b (a E(x)), likewise
      an own id whose point is in both lists is shared; both sort the shared ones by normalised id

Ids are compared as declared rules normalise them (`ids.IdRules`). A patient with several rows counts once for each:
what is encoded is (normalised id, k), k the row's number among those of that id in the file.

**Who learns what** stands in ``docs/alignment.md`` with its grounds; in short: both partners learn which of their own
ids the other has, of each the lesser number of rows, and how long the other's list is, where it is not filled up to a
declared size (`pad_to`). Nobody else learns an id, or can test one, from all that is sent. A partner that follows no
protocol can put ids in its list that it has no rows of, as many as its list is long, and so test them.

More than two partners align in a chain: the first with the second, what is left with the third, and so on
(`exchange.relay`). The first two learn which ids they share, also those that the third lacks.
"""
