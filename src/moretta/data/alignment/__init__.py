"""Partners' rows in one order, by their ids and without showing them: private set intersection.

**Theory.** Partners hold rows of partly the same people, named by an id. Let E be an encoding of ids as points of a
curve (`curve`), and a and b secret numbers of two partners, drawn for this one exchange. Then a(b E(x)) = b(a E(x)),
and without a no party can distinguish a E(x) from a random point, for any guess of x (the decisional Diffie-Hellman
assumption). So each partner shows its ids under its own secret, the other adds its secret, and both compare the points
under both secrets::

    A                                                  B
      a E(x) for all of A's ids, in secret order  -->
                                                  <--    b E(y) for all of B's ids, in secret order
      a (b E(y)), in the received order           -->
                                                  <--    b (a E(x)), likewise
      an own id whose point is in both lists is shared; both sort the shared ones by normalised id

Declared rules normalise ids before they are compared (`partner.IdRules`). A patient with several rows counts once for
each: the points encode (normalised id, k), with k the row's number among those of that id in the file.

**Who learns what** (``docs/alignment.md`` has the reasons). Both partners learn which of their own ids the other has,
and for each id the smaller of the two numbers of rows. They learn the length of the other's list, unless it is padded
to a declared size (`pad_to`). No other party learns an id, or can test one, from the messages. A partner that does not
follow the protocol can list ids of which it has no rows, and so test them: as many as its list is long.

More than two partners align in a chain: the first with the second, the remaining rows with the third, and so on
(`exchange.relay`). The first two learn which ids they share, also those that the third lacks.
"""
