"""The secure sum alone, over connections of your own: `secure_sum` at the server, a `SumClient` at each silo.

Both ends exchange bytes, by a function call, a queue or an HTTP request. `moretta.secure_aggregation` has the theory
and threat model of the messages; one more asks for the upload. One `SumClient` helps open one sum and then no other,
because two sums of the same numbers over different silos would reveal a silo's own.
"""

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from moretta.contract.codec import Codec
from moretta.contract.messages import Message, Stamp, Tensors, message
from moretta.contract.roles import Aborted, Ask, Exchange, Missing, Reason, Replies
from moretta.errors import MorettaError, PeerError, RunFailed
from moretta.secure_aggregation.agreement import fresh_run
from moretta.secure_aggregation.cohort import Credentials, Origin, Participation, Rules
from moretta.secure_aggregation.identity import Roster
from moretta.secure_aggregation.keyed_sums import Aggregator
from moretta.secure_aggregation.one_sum import HelpedSums
from moretta.secure_aggregation.schemes import MESSAGES, aggregator, contributor
from moretta.secure_aggregation.settings import SecureAggregation
from moretta.secure_aggregation.sums import Sum, query_of


@message("secure-sum/ask")
class AskSum(Message):
    """Upload your tensors. encoding: how, by tensor."""

    encoding: Mapping[str, int]


Deliver = Callable[[bytes], bytes]
CODEC = Codec((*MESSAGES, AskSum))


def secure_sum(
    silos: Mapping[str, Deliver],
    shapes: Mapping[str, tuple[int, ...]],
    settings: SecureAggregation | None = None,
    *,
    most_weight: int | None = None,
) -> Sum:
    """Act as the server of one secure sum, and return the weighted mean of the silos' tensors.

    Args:
        silos: Maps each silo's name to a function that delivers bytes to its `SumClient.answer` and returns the answer.
            Each runs in a thread. One that raises means that its silo is gone; enough others complete the sum.
        shapes: Maps each tensor's name to its shape.
        settings: Those of a run, the same at all ends; None means `SecureAggregation()`.
        most_weight: An upper bound of the sum of all weights; None means weight 1 for each silo.

    Returns:
        Sum: `means` (float64), `weight` of its silos, `steps` (largest errors), `silos`; sum = `means[name] * weight`.

    Raises:
        RunFailed: Too few silos are left to open a sum, or their weights sum to more than `most_weight`.
        RangeError: The ring has no room for as many silos of that weight.
    """
    settings = settings or SecureAggregation()
    roster = settings.load_roster()
    run, rules = fresh_run(roster), _rules(settings, roster, silos)
    most = len(silos) if most_weight is None else most_weight
    server = aggregator(settings.scheme, settings.ring_bits, rules)
    with ThreadPoolExecutor(max(1, len(silos))) as pool:
        now, missing = _agree(server, run, silos, pool, rules.least(settings.scheme))
        # A larger sum of weights is read as the largest planned one, so one more is planned.
        request = server.want(dict(shapes), dict.fromkeys(shapes, settings.largest), most + 1)
        ask = AskSum(stamp=now, encoding=request.fraction_bits)
        total = _play(server.sum(ask, request), silos, pool)
    if isinstance(total, Aborted):
        raise _failed("the sum could not be opened", {**missing, **total.missing}, total.because)
    result: Sum = total
    if result.weight > most:
        raise RunFailed(f"all silos' weights together are {most + 1} or more, expected fewer; raise most_weight")
    return result


class SumClient:
    """Take a silo's part in one secure sum, over connections of your own.

    Args:
        name: The silo's name at the server.
        silos: The names of all silos of the sum. Their number sets how many must remain for it to be opened.
        tensors: Real arrays by name; never written to.
        weight: A whole number, 1 or more, the tensors' weight in the mean; the server learns only the sum of weights.
        settings: Those of a run, the same at all ends; None means `SecureAggregation()`.
        helped: The record of all sums that the silo has helped open, with its owner's floors; None records this one.
        about: A digest of the server's question that the tensors answer, such as a model to train. Tensors of silos
            with other digests do not add up; else a server could have all but one silo answer something known.

    Source:
        Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning", Figure 4.
    """

    def __init__(
        self,
        name: str,
        silos: Collection[str],
        tensors: Tensors,
        weight: int = 1,
        settings: SecureAggregation | None = None,
        helped: HelpedSums | None = None,
        about: bytes = b"",
    ) -> None:
        self._helped, self._about = helped, about
        self._settings = settings or SecureAggregation()
        self._name, self._silos, self._weight = name, silos, weight
        self._tensors = {key: np.asarray(value) for key, value in tensors.items()}
        self._run = ""
        self._half: Any = None

    def answer(self, data: bytes) -> bytes:
        """Return the answer to the server's bytes.

        Args:
            data: One message of `secure_sum`.

        Raises:
            PeerError: The bytes are not what a server of one sum sends. Nothing is sent then.
            RangeError: A value is too large for the settings' limit, or not finite.
            SumSpent: This silo has helped open another sum.
        """
        asks = CODEC.decode(data)
        if self._half is None:
            self._begin(asks.stamp.run)
        if (asks.stamp.run, asks.stamp.round, asks.stamp.take) != (self._run, 1, 0):
            raise PeerError("this silo takes part in one sum; for another, make another SumClient")
        if isinstance(asks, AskSum):
            asked = query_of(asks, self._about)
            return CODEC.encode(self._half.upload(asks.stamp, self._tensors, self._weight, asks.encoding, asked=asked))
        reply = self._half.answer(asks)
        if reply is None:
            raise PeerError(f"expected a message of a secure sum, got `{asks.TAG}`")
        return CODEC.encode(reply)

    def _begin(self, run: str) -> None:
        of, roster = self._settings, self._settings.load_roster()
        origin = Origin(Credentials.of(self._name, of.identity_of(self._name), roster))
        self._run, rules = run, _rules(of, roster, self._silos)
        self._half = contributor(
            of.scheme, self._name, of.ring_bits, rules, origin=origin, run=run, helped=self._helped
        )


def _rules(settings: SecureAggregation, roster: Roster | None, silos: Collection[str]) -> Rules:
    return settings.rules(roster, Participation(tuple(sorted(silos)), len(silos)))


def _agree(
    server: Aggregator, run: str, silos: Mapping[str, Deliver], pool: ThreadPoolExecutor, least: int
) -> tuple[Stamp, Mapping[str, Missing]]:
    """Set up with the silos that are present; return the stamp of that attempt, and the missing silos."""
    missing = dict[str, Missing]()
    for attempt in range(len(silos) + 1):
        now, cohort = Stamp(run, 1, attempt), [name for name in silos if name not in missing]
        if len(cohort) < least:
            break
        ended = _play(server.setup(now, cohort), silos, pool)
        if ended is None:
            return now, missing
        missing |= ended.missing
    raise _failed(f"at least {least} silos must agree on keys", missing, "")


def _play(exchange: Exchange[Any], silos: Mapping[str, Deliver], pool: ThreadPoolExecutor) -> Any:
    replies: Any = None
    while True:
        try:
            ask = exchange.send(replies)
        except StopIteration as end:
            return end.value
        coming = {name: pool.submit(_asked, ask, silos[name], name) for name in ask.messages}
        answers = {name: future.result() for name, future in coming.items()}
        replies = Replies(
            {name: answer for name, answer in answers.items() if isinstance(answer, Message)},
            {name: answer for name, answer in answers.items() if isinstance(answer, Missing)},
        )


def _asked(ask: Ask, deliver: Deliver, name: str) -> Message | Missing:
    message = ask.messages[name]
    try:
        data = deliver(CODEC.encode(message))
    except MorettaError as error:
        return Missing(Reason.REFUSED, str(error))
    except Exception as error:  # noqa: BLE001  # any error of a connection: that silo is gone, and named
        return Missing(Reason.DISCONNECTED, f"{type(error).__name__}: {error}")
    try:
        reply = CODEC.decode(data)
        if not isinstance(reply, ask.reply) or reply.stamp != message.stamp:
            raise PeerError(f"expected an answer to `{message.TAG}`, got `{reply.TAG}`")
        ask.check(name, reply)
    except MorettaError as error:
        return Missing(Reason.MALFORMED, str(error))
    return reply


def _failed(what: str, missing: Mapping[str, Missing], because: str) -> RunFailed:
    gone = "; ".join(f"{silo}: {why.reason.value}, {why.detail}" for silo, why in sorted(missing.items()))
    return RunFailed(": ".join(filter(None, [what, because, gone])) or what)
